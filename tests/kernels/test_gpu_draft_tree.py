"""Draft trees grown on the device, against the reference and against the CPU's compiled functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from foretoken_kernels import reference_draft_tree as reference
from foretoken_kernels.cpu import draft_tree as cpu
from foretoken_kernels.gpu import draft_tree as gpu
from foretoken_kernels.gpu import draft_tree_state as state

BLOCK = 16
SCALE = 0.8
NUM_SLOTS = 4096
SCRATCH = NUM_SLOTS - 1


@dataclass
class Wish:
    """What one request asks of its tree."""

    max_nodes: int = 8
    max_depth: int = 3
    max_branches: int = 2
    length: int = 9
    temperature: float = 0.0
    seed: int = 11
    choice: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Head:
    """A draft model of a table: logits of a state, which is a function of the states and tokens before it.

    A node's state is its source's and its token, so a wrong source gives another tree.
    """

    def __init__(self, vocab: int, num_states: int = 97, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_states = num_states
        self.table = torch.randn((num_states, vocab), generator=generator) * 3.0

    def roots(self, count: int) -> torch.Tensor:
        return torch.arange(count) * 7 % self.num_states

    def step(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return (states * 31 + token_ids.long() * 17 + 5) % self.num_states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.table[states]


def set_requests(trees: state.DraftTrees, wishes: list[Wish]) -> None:
    rows = np.zeros((len(wishes), state.NUM_COLUMNS), np.int32)
    for tree, wish in enumerate(wishes):
        rows[tree, state.LENGTH] = wish.length
        rows[tree, state.MAX_NODES], rows[tree, state.MAX_DEPTH] = wish.max_nodes, wish.max_depth
        rows[tree, state.MAX_BRANCHES], rows[tree, state.CHOICE_INDEX] = wish.max_branches, wish.choice
        rows[tree, state.FIRST_SLOT] = -(-wish.length // BLOCK) * BLOCK
        rows[tree, state.ROOT_TOKEN] = 100 + tree
        seed = np.array([wish.seed], np.uint64).view(np.int32)
        rows[tree, state.SEED_LOW], rows[tree, state.SEED_HIGH] = seed
        rows.view(np.float32)[tree, state.TEMPERATURE] = wish.temperature
        rows[tree, state.TOP_K] = wish.top_k
        rows.view(np.float32)[tree, state.TOP_P] = wish.top_p
        rows.view(np.float32)[tree, state.MIN_P] = wish.min_p
    trees.requests.copy_(torch.from_numpy(rows))


def block_tables(num_trees: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(num_trees * 8, generator=generator).reshape(num_trees, 8).int()


@dataclass
class Course:
    """A whole draft: the wishes, the shapes, and the head."""

    wishes: list[Wish]
    branches: int
    depth: int
    head: Head
    nodes: int = 64
    target_ids: torch.Tensor | None = None
    vocab_limit: int = 0
    scale: float = SCALE
    dtype: torch.dtype = torch.float32
    filtered: bool = True
    modules: int = 1

    def logits(self, states: torch.Tensor, trees: list[int], level: int, is_clipped: bool) -> torch.Tensor:
        """The head's, of beams of ``level``.

        With the sampler's noise the CPU leaves what has less than e**-MARGIN of the best one's chance out of a sum.
        Where it is compared with, such logits are -inf, so that nobody counts them.
        """
        logits = self.head.logits(states).to(self.dtype)
        if not is_clipped or self.scale == 0.0:
            return logits
        tokens = torch.arange(logits.shape[1]) if self.target_ids is None else self.target_ids.long()
        for row, tree in zip(logits, trees, strict=True):
            wish = self.wishes[tree]
            if wish.temperature > 0.0:
                words = (wish.seed & 0xFFFFFFFF, wish.seed >> 32)
                values = row.float() / wish.temperature
                values += reference.token_noise(tokens, wish.length + level, wish.choice, words)
                values = values.nan_to_num(-math.inf, math.inf, -math.inf)
                values[self.limit :] = -math.inf
                row[values < values.max() - (cpu.MARGIN - 0.01) * self.scale / wish.temperature] = -math.inf
        return logits

    @property
    def limit(self) -> int:
        return self.vocab_limit or self.head.table.shape[1]

    def run(
        self, functions: Any, device: str, is_clipped: bool = False
    ) -> tuple[state.DraftOutput, list[state.DraftBeams], state.DraftTrees]:
        """The draft by the functions of ``gpu`` or of ``reference``, and the beams of each level."""
        count, vocab = len(self.wishes), self.head.table.shape[1]
        trees = state.new_draft_trees(count, self.branches, self.depth, device)
        beams = state.new_draft_beams(count, self.branches, device)
        out = state.new_draft_output(count, self.nodes, device)
        # Garbage of an earlier draft must not matter.
        for tensor in trees[1:7]:
            tensor.fill_(3)
        set_requests(trees, self.wishes)
        tables = block_tables(count).to(device)
        target_ids = None if self.target_ids is None else self.target_ids.to(device)
        extra = ()
        if functions is gpu:
            extra = (gpu.offer_workspace(count, self.branches, vocab, device),)
        options = {"vocab_limit": self.limit, "target_ids": target_ids, "scale": self.scale, "filtered": self.filtered}
        states = self.head.roots(count)
        logits = self.logits(states, list(range(count)), 0, is_clipped).to(device)
        functions.offer_children(trees, logits, 0, *extra, **options)
        rows = [row // self.branches for row in range(count * self.branches)]
        levels = []
        for level in range(1, self.depth):
            first_depth = min(level, self.modules - 1)
            functions.choose_beams(
                trees, level, tables, BLOCK, beams, num_slots=NUM_SLOTS, scratch_slot=SCRATCH, first_depth=first_depth
            )
            levels.append(state.DraftBeams(*(tensor.clone().cpu() for tensor in beams)))
            states = self.head.step(states[beams.sources.cpu().long()], beams.token_ids.cpu())
            logits = self.logits(states, rows, level, is_clipped).to(device)
            functions.offer_children(trees, logits, level, *extra, **options)
        functions.emit_trees(trees, out)
        return state.DraftOutput(*(tensor.cpu() for tensor in out)), levels, trees

    def run_cpu(self) -> tuple[list[tuple[list[int], list[int], list[float]]], list[cpu.Beams]]:
        """The draft by the CPU's compiled functions: tokens, parents and scores of each tree, beams of each level."""
        count, vocab = len(self.wishes), self.head.table.shape[1]
        trees = cpu.new_trees(count, max(self.nodes, self.branches + 1), vocab)
        for tree, wish in enumerate(self.wishes):
            branches = min(wish.max_branches, self.branches)
            depth = min(wish.max_depth, wish.max_nodes - 1)
            trees.shapes[tree] = (wish.length, wish.max_nodes, depth, branches, wish.choice, wish.top_k)
            trees.filters[tree] = (wish.temperature, wish.top_p, wish.min_p)
            trees.seeds[tree] = wish.seed
            trees.counts[tree, cpu.FIRST_SLOT] = -(-wish.length // BLOCK) * BLOCK
        target_ids = np.empty(0, np.int32) if self.target_ids is None else self.target_ids.numpy()
        rows = np.array([i for i, w in enumerate(self.wishes) if min(w.max_nodes - 1, w.max_depth) > 0], np.int32)
        beams = cpu.new_beams(count * self.branches * 2)
        tables = block_tables(count).numpy()

        def offer(states: torch.Tensor, trees_of: Any, nodes: Any, level: int) -> None:
            logits = self.logits(states, trees_of.tolist(), level, True).float().reshape(-1).numpy()
            cpu.offer_children(trees, logits, vocab, self.limit, target_ids, trees_of, nodes, 0, self.scale)

        levels = []
        states = self.head.roots(count)[rows.astype(np.int64)]
        if len(rows):
            offer(states, rows, np.full(len(rows), -1, np.int32), 0)
        for level in range(1, self.depth):
            found = cpu.choose_beams(trees, rows, level, tables, BLOCK, beams)
            cpu.keep_module_ancestors(trees, beams, found, min(level, self.modules - 1))
            levels.append(cpu.Beams(*(array[:found].copy() for array in beams)))
            if not found:
                break
            sources, tokens = torch.from_numpy(beams.sources[:found].copy()), torch.from_numpy(beams.token_ids[:found])
            states = self.head.step(states[sources.long()], tokens)
            offer(states, beams.rows[:found].copy(), beams.nodes[:found].copy(), level)
        starts, most = np.zeros(count + 1, np.int32), sum(max(w.max_nodes, 1) for w in self.wishes)
        tokens, parents, scores = np.zeros(most, np.int32), np.zeros(most, np.int32), np.zeros(most, np.float32)
        cpu.emit_trees(trees, np.arange(100, 100 + count, dtype=np.int32), starts, tokens, parents, scores)
        found_trees = [
            (tokens[low:high].tolist(), parents[low:high].tolist(), scores[low:high].tolist())
            for low, high in pairwise(starts)
        ]
        return found_trees, levels

    def check(self, device: str, *, against_cpu: bool = True) -> state.DraftOutput:
        got, beams, trees = self.run(gpu, device, against_cpu)
        expected, expected_beams, expected_trees = self.run(reference, "cpu", against_cpu)
        for name in ("tokens", "parents", "num_nodes"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(got.scores, expected.scores, rtol=1e-5, atol=1e-5)
        for level, expected_level in zip(beams, expected_beams, strict=True):
            for name, tensor in level._asdict().items():
                torch.testing.assert_close(tensor, getattr(expected_level, name), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(trees.fed_counts[:, 1:].cpu(), expected_trees.fed_counts[:, 1:])
        if against_cpu:
            found_trees, levels = self.run_cpu()
            for level, of_cpu in zip(beams, levels, strict=False):
                run = level.context_lens > 0
                assert level.token_ids[run].tolist() == of_cpu.token_ids.tolist()
                assert level.positions[run].tolist() == of_cpu.positions.tolist()
                assert level.slot_mapping[run].tolist() == of_cpu.slots.tolist()
                assert level.context_lens[run].tolist() == of_cpu.context_lens.tolist()
                assert level.masks[run].tolist() == of_cpu.masks.astype(np.int64).tolist()
                assert (run.nonzero()[:, 0] // self.branches).tolist() == of_cpu.rows.tolist()
            for tree, (tokens, parents, scores) in enumerate(found_trees):
                size = int(got.num_nodes[tree])
                assert (got.tokens[tree, :size].tolist(), got.parents[tree, :size].tolist()) == (tokens, parents)
                np.testing.assert_allclose(got.scores[tree, :size].numpy(), scores, rtol=0, atol=1e-5)
        return got


RAGGED = [
    Wish(16, 4, 4),
    Wish(1, 0, 0),
    Wish(4, 2, 1, length=40),
    Wish(3, 9, 3),
    Wish(12, 4, 4, length=31),
    Wish(9, 1, 4),
    Wish(9, 4, 0),
]


def at_temperature(wishes: list[Wish], temperature: float) -> list[Wish]:
    return [replace(w, temperature=temperature, seed=2**63 + 5 * i, choice=i % 3) for i, w in enumerate(wishes)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [61, 1500])
def test_trees_of_many_shapes(device: str, vocab: int, temperature: float) -> None:
    Course(at_temperature(RAGGED, temperature), branches=4, depth=5, head=Head(vocab)).check(device)


def test_all_values_count(device: str) -> None:
    """Those too that the CPU leaves out."""
    wishes = at_temperature(RAGGED, 1.1)
    Course(wishes, branches=4, depth=4, head=Head(1500)).check(device, against_cpu=False)


@pytest.mark.parametrize("nodes", [32, 64])
def test_wide_trees(device: str, nodes: int) -> None:
    wishes = [Wish(nodes, 5, 8), Wish(nodes, 5, 8, temperature=1.0, seed=77, choice=3, length=10)]
    out = Course(wishes, branches=8, depth=5, head=Head(300)).check(device)
    assert out.num_nodes.tolist() == [nodes, nodes]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chains(device: str, temperature: float) -> None:
    wishes = at_temperature([Wish(9, 8, 1), Wish(3, 8, 1), Wish(6, 8, 5, length=17)], temperature)
    out = Course(wishes, branches=1, depth=8, head=Head(130), nodes=16).check(device)
    assert out.num_nodes.tolist() == [9, 3, 6]
    assert out.parents[0, :9].tolist() == list(range(-1, 8))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("scale", [0.0, SCALE])
def test_reduced_vocabulary(device: str, temperature: float, scale: float) -> None:
    """Draft ids are few, and the noise is that of the target's ids."""
    target_ids = torch.randperm(128256, generator=torch.Generator().manual_seed(5))[:1100].sort().values.int()
    wishes = at_temperature([Wish(12, 4, 4), Wish(7, 3, 2)], temperature)
    out = Course(wishes, branches=4, depth=4, head=Head(1100), target_ids=target_ids, scale=scale).check(device)
    drafted = out.tokens[:, 1:][out.parents[:, 1:] >= 0]
    assert set(drafted.tolist()) <= set(target_ids.tolist())


def test_ids_at_and_above_the_limit_are_never_drafted(device: str) -> None:
    head = Head(200)
    head.table[:, 150:] += 20.0
    for temperature in (0.0, 1.0):
        wishes = at_temperature([Wish(12, 4, 4)], temperature)
        out = Course(wishes, branches=4, depth=3, head=head, vocab_limit=150).check(device)
        assert out.tokens[0, 1:12].max() < 150


def test_bfloat16_logits(device: str) -> None:
    """Many are equal: of equal ones the lower id is ahead."""
    for temperature in (0.0, 0.7):
        wishes = at_temperature([Wish(20, 4, 4), Wish(9, 3, 3)], temperature)
        Course(wishes, branches=4, depth=4, head=Head(900), dtype=torch.bfloat16).check(device)


def test_equal_logits_and_equal_scores(device: str) -> None:
    """Of equal logits the lower ids, of equal scores the earlier candidates; zeros are equal whatever their sign."""
    head = Head(1300)
    head.table = (torch.arange(1300) % 3 == 0).float().repeat(97, 1)
    head.table[:, ::5] *= -0.0
    Course([Wish(12, 3, 4), Wish(30, 4, 4), Wish(5, 4, 2)], branches=4, depth=4, head=head).check(device)
    head.table = torch.where(torch.arange(1300) % 2 == 0, 0.0, -0.0).repeat(97, 1)
    out = Course([Wish(12, 3, 4)], branches=4, depth=4, head=head).check(device)
    assert out.tokens[0, 1:5].tolist() == [0, 1, 2, 3]


def test_rows_without_finite_logits_have_no_children(device: str) -> None:
    head = Head(1200)
    inf = math.inf
    # Roots' states are 0, 7, 14, 21, 28.
    head.table[7, 1111] = inf
    head.table[14] = -inf
    head.table[21] = math.nan
    head.table[28, ::2] = math.nan
    head.table[28, 1::4] = -inf
    head.table[28, 3] = 1e30
    head.table[60:80, 5] = inf
    head.table[80:90] = -inf
    for temperature in (0.0, 0.7):
        wishes = at_temperature([Wish(12, 3, 2)] * 5, temperature)
        out = Course(wishes, branches=2, depth=3, head=head).check(device)
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


@pytest.mark.parametrize("scale", [0.0, SCALE])
def test_filters(device: str, scale: float) -> None:
    wishes = [Wish(6, 2, 2, temperature=1.3, seed=i, **filters) for i, filters in enumerate(FILTERS)]
    wishes.append(Wish(6, 2, 2, top_k=2, top_p=0.1))
    course = Course(wishes, branches=2, depth=2, head=Head(700), scale=scale)
    out = course.check(device, against_cpu=scale == 0.0)
    for tree in (1, 3):
        # One token is left everywhere.
        assert out.num_nodes[tree] == 3
        torch.testing.assert_close(out.scores[tree], torch.zeros(64), rtol=0, atol=1e-5)
    assert out.num_nodes[8] == 6
    unfiltered = replace(course, filtered=False).check(device, against_cpu=False)
    assert unfiltered.num_nodes.tolist() == [6] * 9


def test_filters_of_equal_and_infinite_logits(device: str) -> None:
    """Values that equal the last one kept are kept too; top-k may ask for more than there is."""
    head = Head(300)
    head.table[0] = torch.arange(300).remainder(3).float()
    head.table[7] = -math.inf
    head.table[7, 3] = 1.0
    head.table[14] = -math.inf
    head.table[21, 9] = math.inf
    head.table[28, :] = math.nan
    head.table[28, 7] = -1e38
    wishes = [Wish(5, 1, 4, temperature=0.5, top_k=k, top_p=p) for k, p in ((9, 0.5), (200, 0.999), (3, 0.5), (3, 0.5))]
    wishes.append(Wish(5, 1, 4, temperature=0.5, min_p=0.5, top_k=2))
    out = Course(wishes, branches=4, depth=1, head=head, scale=0.0).check(device, against_cpu=False)
    assert out.num_nodes.tolist() == [5, 2, 1, 1, 2]
    assert out.tokens[0, 1:5].tolist() == [2, 5, 8, 11]


def test_trees_that_want_nothing(device: str) -> None:
    wishes = [Wish(1, 5, 5), Wish(0, 5, 5), Wish(8, 0, 5), Wish(8, 5, 0)]
    course = Course(wishes, branches=8, depth=3, head=Head(64))
    out = course.check(device)
    assert out.num_nodes.tolist() == [1, 1, 1, 1]
    assert out.tokens[:, 0].tolist() == [100, 101, 102, 103]
    assert (out.parents == -1).all() and (out.tokens[:, 1:] == 0).all()
    _, levels, _ = course.run(gpu, device)
    for beams in levels:
        assert (beams.slot_mapping == SCRATCH).all() and (beams.context_lens == 0).all()
        assert (beams.masks == 0).all()
        assert beams.row_starts.tolist() == [0, 8, 16, 24, 32]


@pytest.mark.parametrize("modules", [2, 3, 4])
def test_masks_of_several_modules(device: str, modules: int) -> None:
    """A module sees no beam of an earlier one's."""
    Course([Wish(20, 5, 4), Wish(9, 4, 2)], branches=4, depth=5, head=Head(90), modules=modules).check(device)


def test_slots_outside_the_cache_become_the_scratch_slot(device: str) -> None:
    course = Course([Wish(12, 4, 2, length=16)] * 5, branches=2, depth=2, head=Head(50))
    trees, beams = state.new_draft_trees(5, 2, 2, device), state.new_draft_beams(5, 2, device)
    set_requests(trees, course.wishes)
    trees.requests[4, state.FIRST_SLOT] = 2**20
    logits = course.head.table[:5].to(device)
    gpu.offer_children(trees, logits, 0, gpu.offer_workspace(5, 2, 50, device), vocab_limit=50)
    tables = torch.tensor([[0, 3], [0, -1], [0, 2**31 - 1], [0, NUM_SLOTS // BLOCK], [0, 0]], dtype=torch.int32)
    gpu.choose_beams(trees, 1, tables.to(device), BLOCK, beams, num_slots=NUM_SLOTS, scratch_slot=SCRATCH)
    assert beams.slot_mapping.tolist() == [48, 49] + [SCRATCH] * 8
    assert beams.context_lens.tolist() == [16] * 10


def test_no_more_beams_than_a_mask_has_bits(device: str) -> None:
    """Eight chains of ten levels: the last two find the mask full."""
    head = Head(12)
    head.table *= 0.01
    head.table[1:, 0] += 10.0
    course = Course([Wish(100, 10, 8)], branches=8, depth=10, head=head, nodes=128)
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
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_a_draft_is_one_graph(device: str, vocab: int) -> None:
    """Captured once, replayed for other requests: the trees are those of the reference."""
    count, branches, depth = 16, 8, 5
    head = Head(vocab, num_states=count * branches)
    target_ids = torch.randperm(200000, generator=torch.Generator().manual_seed(5))[:vocab].int().to(device)
    tables = block_tables(count).to(device)
    logits = [head.table[: count * (branches if level else 1)].roll(level, 0).to(device) for level in range(depth)]
    trees, beams = state.new_draft_trees(count, branches, depth, device), state.new_draft_beams(count, branches, device)
    workspace, out = gpu.offer_workspace(count, branches, vocab, device), state.new_draft_output(count, 64, device)
    options: dict[str, Any] = {"vocab_limit": vocab, "target_ids": target_ids, "scale": SCALE}

    def draft(functions: Any, *extra: Any) -> None:
        functions.offer_children(trees, logits[0], 0, *extra, **options)
        for level in range(1, depth):
            functions.choose_beams(trees, level, tables, BLOCK, beams, num_slots=NUM_SLOTS, scratch_slot=SCRATCH)
            functions.offer_children(trees, logits[level], level, *extra, **options)
        functions.emit_trees(trees, out)

    draft(gpu, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft(gpu, workspace)
    wishes = [Wish(64, 5, 8, length=20 + i) for i in range(count)]
    filtered = [replace(w, top_p=0.9, top_k=40 * (i % 2)) for i, w in enumerate(at_temperature(wishes, 1.0))]
    for requests in (wishes, at_temperature(wishes, 0.8), filtered, [Wish(1)] * count):
        set_requests(trees, requests)
        graph.replay()
        got = state.DraftOutput(*(tensor.cpu() for tensor in out))
        draft(reference)
        for name in ("tokens", "parents", "num_nodes"):
            torch.testing.assert_close(getattr(got, name), getattr(out, name).cpu(), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(got.scores, out.scores.cpu(), rtol=1e-5, atol=1e-5)
