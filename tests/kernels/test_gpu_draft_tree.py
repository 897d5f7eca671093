"""Test draft trees grown on the device against the reference and the CPU's compiled functions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from foretoken_kernels import reference_draft_tree as reference
from foretoken_kernels.gpu import draft_tree as gpu
from foretoken_kernels.gpu import draft_tree_state as state

from tests.kernels.draft_courses import (
    BLOCK,
    NUM_KV_SLOTS,
    SCALE,
    SCRATCH,
    Course,
    Head,
    TreeRequest,
    block_tables,
    new_draft_output,
    set_requests,
)

RAGGED = [
    TreeRequest(16, 4, 4),
    TreeRequest(1, 0, 0),
    TreeRequest(4, 2, 1, length=40),
    TreeRequest(3, 9, 3),
    TreeRequest(12, 4, 4, length=31),
    TreeRequest(9, 1, 4),
    TreeRequest(9, 4, 0),
]


def at_temperature(tree_requests: list[TreeRequest], temperature: float) -> list[TreeRequest]:
    return [replace(w, temperature=temperature, seed=2**63 + 5 * i, choice=i % 3) for i, w in enumerate(tree_requests)]


@pytest.mark.parametrize(
    ("vocab", "temperature"),
    [
        (61, 0.7),
        pytest.param(61, 0.0, marks=pytest.mark.slow),
        pytest.param(1500, 0.7, marks=pytest.mark.slow),
        pytest.param(1500, 0.0, marks=pytest.mark.slow),
    ],
)
def test_trees_of_many_shapes(device: str, vocab: int, temperature: float) -> None:
    Course(at_temperature(RAGGED, temperature), branches=4, depth=5, head=Head(vocab)).check(device)


@pytest.mark.slow
def test_all_values_count(device: str) -> None:
    """The sum includes values that the CPU leaves out."""
    tree_requests = at_temperature(RAGGED, 1.1)
    Course(tree_requests, branches=4, depth=4, head=Head(1500)).check(device, against_cpu=False)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [32, 64])
def test_wide_trees(device: str, nodes: int) -> None:
    tree_requests = [TreeRequest(nodes, 5, 8), TreeRequest(nodes, 5, 8, temperature=1.0, seed=77, choice=3, length=10)]
    out = Course(tree_requests, branches=8, depth=5, head=Head(300)).check(device)
    assert out.num_nodes.tolist() == [nodes, nodes]


@pytest.mark.parametrize("temperature", [0.9, pytest.param(0.0, marks=pytest.mark.slow)])
def test_chains(device: str, temperature: float) -> None:
    tree_requests = at_temperature(
        [TreeRequest(9, 8, 1), TreeRequest(3, 8, 1), TreeRequest(6, 8, 5, length=17)], temperature
    )
    out = Course(tree_requests, branches=1, depth=8, head=Head(130), nodes=16).check(device)
    assert out.num_nodes.tolist() == [9, 3, 6]
    assert out.parents[0, :9].tolist() == list(range(-1, 8))


@pytest.mark.parametrize("temperature", [0.7, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [0.0, SCALE])
def test_reduced_vocabulary(device: str, temperature: float, scale: float) -> None:
    """There are few draft ids, and the noise is keyed by the target's ids."""
    target_ids = torch.randperm(128256, generator=torch.Generator().manual_seed(5))[:1100].sort().values.int()
    tree_requests = at_temperature([TreeRequest(12, 4, 4), TreeRequest(7, 3, 2)], temperature)
    out = Course(tree_requests, branches=4, depth=4, head=Head(1100), target_ids=target_ids, scale=scale).check(device)
    drafted = out.tokens[:, 1:][out.parents[:, 1:] >= 0]
    assert set(drafted.tolist()) <= set(target_ids.tolist())


def test_ids_at_and_above_the_limit_are_never_drafted(device: str) -> None:
    head = Head(200)
    head.table[:, 150:] += 20.0
    for temperature in (0.0, 1.0):
        tree_requests = at_temperature([TreeRequest(12, 4, 4)], temperature)
        out = Course(tree_requests, branches=4, depth=3, head=head, vocab_limit=150).check(device)
        assert out.tokens[0, 1:12].max() < 150


def test_bfloat16_logits(device: str) -> None:
    """Many logits are equal: the lower id comes first."""
    for temperature in (0.0, 0.7):
        tree_requests = at_temperature([TreeRequest(20, 4, 4), TreeRequest(9, 3, 3)], temperature)
        Course(tree_requests, branches=4, depth=4, head=Head(900), dtype=torch.bfloat16).check(device)


def test_equal_logits_and_equal_scores(device: str) -> None:
    """Of equal logits the lower id wins, of equal scores the earlier candidate; -0.0 equals 0.0."""
    head = Head(1300)
    head.table = (torch.arange(1300) % 3 == 0).float().repeat(97, 1)
    head.table[:, ::5] *= -0.0
    Course([TreeRequest(12, 3, 4), TreeRequest(30, 4, 4), TreeRequest(5, 4, 2)], branches=4, depth=4, head=head).check(
        device
    )
    head.table = torch.where(torch.arange(1300) % 2 == 0, 0.0, -0.0).repeat(97, 1)
    out = Course([TreeRequest(12, 3, 4)], branches=4, depth=4, head=head).check(device)
    assert out.tokens[0, 1:5].tolist() == [0, 1, 2, 3]


def test_rows_without_finite_logits_have_no_children(device: str) -> None:
    head = Head(1200)
    inf = math.inf
    # The roots' states are 0, 7, 14, 21, 28.
    head.table[7, 1111] = inf
    head.table[14] = -inf
    head.table[21] = math.nan
    head.table[28, ::2] = math.nan
    head.table[28, 1::4] = -inf
    head.table[28, 3] = 1e30
    head.table[60:80, 5] = inf
    head.table[80:90] = -inf
    for temperature in (0.0, 0.7):
        tree_requests = at_temperature([TreeRequest(12, 3, 2)] * 5, temperature)
        out = Course(tree_requests, branches=2, depth=3, head=head).check(device)
        assert out.num_nodes[1:4].tolist() == [1, 1, 1]
        assert out.num_nodes[0] > 4


FILTERS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 5000},
    {},
]


@pytest.mark.parametrize("scale", [0.0, pytest.param(SCALE, marks=pytest.mark.slow)])
def test_filters(device: str, scale: float) -> None:
    tree_requests = [TreeRequest(6, 2, 2, temperature=1.3, seed=i, **filters) for i, filters in enumerate(FILTERS)]
    tree_requests.append(TreeRequest(6, 2, 2, top_k=2, top_p=0.1))
    course = Course(tree_requests, branches=2, depth=2, head=Head(700), scale=scale)
    out = course.check(device, against_cpu=scale == 0.0)
    for tree in (1, 3):
        # Each row keeps only one token.
        assert out.num_nodes[tree] == 3
        torch.testing.assert_close(out.scores[tree], torch.zeros(64), rtol=0, atol=1e-5)
    assert out.num_nodes[8] == 6
    unfiltered = replace(course, filtered=False).check(device, against_cpu=False)
    assert unfiltered.num_nodes.tolist() == [6] * 9


def test_filters_of_equal_and_infinite_logits(device: str) -> None:
    """Values equal to the last one kept are kept; top-k may ask for more values than there are."""
    head = Head(300)
    head.table[0] = torch.arange(300).remainder(3).float()
    head.table[7] = -math.inf
    head.table[7, 3] = 1.0
    head.table[14] = -math.inf
    head.table[21, 9] = math.inf
    head.table[28, :] = math.nan
    head.table[28, 7] = -1e38
    tree_requests = [
        TreeRequest(5, 1, 4, temperature=0.5, top_k=k, top_p=p) for k, p in ((9, 0.5), (200, 0.999), (3, 0.5), (3, 0.5))
    ]
    tree_requests.append(TreeRequest(5, 1, 4, temperature=0.5, min_p=0.5, top_k=2))
    out = Course(tree_requests, branches=4, depth=1, head=head, scale=0.0).check(device, against_cpu=False)
    assert out.num_nodes.tolist() == [5, 2, 1, 1, 2]
    assert out.tokens[0, 1:5].tolist() == [2, 5, 8, 11]


def test_trees_that_want_nothing(device: str) -> None:
    tree_requests = [TreeRequest(1, 5, 5), TreeRequest(0, 5, 5), TreeRequest(8, 0, 5), TreeRequest(8, 5, 0)]
    course = Course(tree_requests, branches=8, depth=3, head=Head(64))
    out = course.check(device)
    assert out.num_nodes.tolist() == [1, 1, 1, 1]
    assert out.tokens[:, 0].tolist() == [100, 101, 102, 103]
    assert (out.parents == -1).all() and (out.tokens[:, 1:] == 0).all()
    _, levels, _ = course.run(gpu, device)
    for beams in levels:
        assert (beams.kv_slots == SCRATCH).all() and (beams.context_lens == 0).all()
        assert (beams.masks == 0).all()
        assert beams.row_starts.tolist() == [0, 8, 16, 24, 32]


@pytest.mark.parametrize("modules", [2, *(pytest.param(modules, marks=pytest.mark.slow) for modules in (3, 4))])
def test_masks_of_several_modules(device: str, modules: int) -> None:
    """A module does not see the beams of earlier modules."""
    Course([TreeRequest(20, 5, 4), TreeRequest(9, 4, 2)], branches=4, depth=5, head=Head(90), modules=modules).check(
        device
    )


def test_kv_slots_outside_the_cache_become_the_scratch_kv_slot(device: str) -> None:
    course = Course([TreeRequest(12, 4, 2, length=16)] * 5, branches=2, depth=2, head=Head(50))
    trees, beams = state.new_draft_trees(5, 2, 2, device), state.new_draft_beams(5, 2, device)
    set_requests(trees, course.tree_requests)
    trees.requests[4, state.FIRST_KV_SLOT] = 2**20
    logits = course.head.table[:5].to(device)
    gpu.offer_children(trees, logits, 0, gpu.offer_workspace(5, 2, 50, device), vocab_limit=50)
    tables = torch.tensor([[0, 3], [0, -1], [0, 2**31 - 1], [0, NUM_KV_SLOTS // BLOCK], [0, 0]], dtype=torch.int32)
    gpu.choose_beams(trees, 1, tables.to(device), BLOCK, beams, num_kv_slots=NUM_KV_SLOTS, scratch_kv_slot=SCRATCH)
    assert beams.kv_slots.tolist() == [48, 49] + [SCRATCH] * 8
    assert beams.context_lens.tolist() == [16] * 10


def test_no_more_beams_than_a_mask_has_bits(device: str) -> None:
    """Eight chains of ten levels: at the last two levels the mask is full."""
    head = Head(12)
    head.table *= 0.01
    head.table[1:, 0] += 10.0
    course = Course([TreeRequest(100, 10, 8)], branches=8, depth=10, head=head, nodes=128)
    course.check(device)
    _, _, trees = course.run(reference, "cpu")
    assert int(trees.fed_counts.max()) == state.MAX_BEAM_NODES


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    trees, workspace = state.new_draft_trees(2, 4, 3, device), gpu.offer_workspace(2, 4, 50, device)
    logits = torch.zeros((8, 50), device=device)
    with pytest.raises(ValueError, match="branches"):
        state.new_draft_trees(2, 3, 3, device)
    with pytest.raises(ValueError, match="rows"):
        gpu.offer_children(trees, logits[:7], 1, workspace, vocab_limit=50)
    with pytest.raises(ValueError, match="ids"):
        gpu.offer_children(trees, logits, 1, workspace, vocab_limit=51)
    with pytest.raises(ValueError, match="level 3"):
        gpu.offer_children(trees, logits, 3, workspace, vocab_limit=50)
    with pytest.raises(ValueError, match="map"):
        gpu.offer_children(
            trees, logits, 1, workspace, vocab_limit=50, target_ids=torch.zeros(9, dtype=torch.int32, device=device)
        )


@pytest.mark.gpu
def test_a_draft_is_one_graph(device: str) -> None:
    """Capture a draft once and replay it for other requests: the trees equal the reference's."""
    count, branches, depth, vocab = 4, 8, 5, 2048
    head = Head(vocab, num_states=count * branches)
    target_ids = torch.randperm(200000, generator=torch.Generator().manual_seed(5))[:vocab].int().to(device)
    tables = block_tables(count).to(device)
    logits = [head.table[: count * (branches if level else 1)].roll(level, 0).to(device) for level in range(depth)]
    trees, beams = state.new_draft_trees(count, branches, depth, device), state.new_draft_beams(count, branches, device)
    workspace, out = gpu.offer_workspace(count, branches, vocab, device), new_draft_output(count, 64, device)
    options: dict[str, Any] = {"vocab_limit": vocab, "target_ids": target_ids, "scale": SCALE}

    def draft(functions: Any, *extra: Any) -> None:
        functions.offer_children(trees, logits[0], 0, *extra, **options)
        for level in range(1, depth):
            functions.choose_beams(
                trees, level, tables, BLOCK, beams, num_kv_slots=NUM_KV_SLOTS, scratch_kv_slot=SCRATCH
            )
            functions.offer_children(trees, logits[level], level, *extra, **options)
        functions.emit_trees(trees, out)

    draft(gpu, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft(gpu, workspace)
    tree_requests = [TreeRequest(64, 5, 8, length=20 + i) for i in range(count)]
    filtered = [replace(w, top_p=0.9, top_k=40 * (i % 2)) for i, w in enumerate(at_temperature(tree_requests, 1.0))]
    for requests in (tree_requests, at_temperature(tree_requests, 0.8), filtered, [TreeRequest(1)] * count):
        set_requests(trees, requests)
        graph.replay()
        got = state.DraftOutput(*(tensor.cpu() for tensor in out))
        draft(reference)
        for name in ("tokens", "parents", "num_nodes"):
            torch.testing.assert_close(getattr(got, name), getattr(out, name).cpu(), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(got.scores, out.scores.cpu(), rtol=1e-5, atol=1e-5)
