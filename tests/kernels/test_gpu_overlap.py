"""Test the operations between the passes of overlapped steps against their definitions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import foretoken_kernels
import numpy as np
import pytest
import torch
from foretoken_kernels import reference_overlap as reference
from foretoken_kernels.gpu.forced_walk import force_walk
from foretoken_kernels.gpu.overlap_joins import join_batch
from foretoken_kernels.gpu.overlap_results import advance_batch, finish_step, gather_hidden
from foretoken_kernels.gpu.overlap_rows import lay_out_rows
from foretoken_kernels.gpu.shared_rows import share_rows
from foretoken_kernels.overlap_state import BatchState, DraftedTrees, Joining, StepResults, StepRows, new_batch_state
from foretoken_kernels.sampler_state import (
    FINISH_BROKEN,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    WalkTensors,
)

from tests.kernels.sampling_batches import new_walk_result

BLOCK, BLOCKS, KV_SLOTS, VOCAB, STEP = 4, 12, 200, 50, 7


class State(NamedTuple):
    batch: BatchState
    trees: DraftedTrees
    found: DraftedTrees
    tables: torch.Tensor
    rows: StepRows


def clone(value: NamedTuple) -> NamedTuple:  # type: ignore[valid-type]
    return type(value)(*(item.clone() for item in value))  # type: ignore[attr-defined]


def state_of(
    random: np.random.Generator, widths: list[int], nodes: int, words: int, device: str, *, with_found: bool = False
) -> State:
    """Return a batch whose drafted trees have up to ``nodes``
    nodes, and found ones one node more.
    """

    def ints(*shape: int, low: int = 0, high: int = 5) -> torch.Tensor:
        return torch.from_numpy(random.integers(low, high, shape, np.int32)).to(device)

    num_batch_rows = len(widths)
    starts = np.cumsum([0, *widths])
    # Rows after those of the sequences only fill up a size.
    num_rows = int(starts[-1]) + 3
    batch = BatchState(
        ints(num_batch_rows),
        ints(num_batch_rows, low=1, high=30),
        ints(num_batch_rows, low=0, high=nodes + 3),
        ints(num_batch_rows),
        ints(num_batch_rows, high=VOCAB),
        # A tree of a sequence that has just joined is another's.
        ints(num_batch_rows, low=STEP - 3, high=STEP + 1),
        torch.from_numpy(random.uniform(1, 5, num_batch_rows).astype(np.float32)).to(device),
        torch.full((1,), STEP, dtype=torch.int32, device=device),
    )

    def trees(most: int) -> DraftedTrees:
        parents = np.full((num_batch_rows, most), -1, np.int32)
        for node in range(1, most):
            parents[:, node] = random.integers(0, node, num_batch_rows)
        return DraftedTrees(
            torch.full((1,), STEP, dtype=torch.int32, device=device),
            ints(num_batch_rows, low=0, high=most + 2),
            ints(num_batch_rows, most, high=VOCAB),
            torch.from_numpy(parents).to(device),
        )

    found = trees(nodes + 1)
    found.stamp.fill_(STEP if with_found else STEP - 1)

    def filler(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype, device=device)

    rows = StepRows(
        torch.from_numpy(starts.astype(np.int32)).to(device),
        *(filler(num_rows) for _ in range(4)),
        filler(num_rows, words, dtype=torch.int64),
        filler(num_batch_rows),
        *(filler(num_rows) for _ in range(3)),
        *(filler(num_batch_rows) for _ in range(4)),
    )
    return State(batch, trees(nodes), found, ints(num_batch_rows, BLOCKS, high=KV_SLOTS // BLOCK), rows)


def lay_out(state: State, max_width: int, max_depth: int = 100) -> StepRows:
    """Lay out rows with the kernel and the reference; they must agree."""
    expected = clone(state.rows)
    tables = state.tables
    reference.lay_out_rows_reference(
        state.batch,
        state.trees,
        state.found,
        tables,
        expected,  # type: ignore[arg-type]
        BLOCK,
        VOCAB,
        max_depth,
    )
    lay_out_rows(
        state.batch,
        state.trees,
        state.found,
        state.tables,
        state.rows,
        block_size=BLOCK,
        num_kv_slots=KV_SLOTS,
        vocab_size=VOCAB,
        max_width=max_width,
        max_depth=max_depth,
    )
    for name in StepRows._fields:
        assert torch.equal(getattr(state.rows, name), getattr(expected, name)), name
    return state.rows


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("widths", "nodes", "words"), [([1, 1, 1], 1, 1), ([6, 1, 4], 6, 1), ([70, 3, 0, 70], 70, 2), ([140], 140, 3)]
)
def test_rows(widths: list[int], nodes: int, words: int, seed: int, device: str) -> None:
    state = state_of(np.random.default_rng(seed), widths, nodes, words, device, with_found=seed % 2 == 1)
    rows = lay_out(state, max(widths))
    end = sum(widths)
    assert (rows.kv_slots[end:] == 77).all(), "no kernel writes rows after the sequences'"


def share(state: State, scores: torch.Tensor, widths: list[int], num_rows: int) -> list[int]:
    """Divide rows with the kernel and the reference, which must agree.

    Return the rows of each sequence.
    """
    most = torch.tensor(widths, dtype=torch.int32, device=scores.device)
    expected = torch.full_like(state.rows.row_starts, 77)
    copy = expected.clone()
    reference.share_rows_reference(state.batch, state.trees, state.found, scores, most, expected, num_rows)
    trees, starts = (state.trees, state.found), state.rows.row_starts
    share_rows(state.batch, *trees, scores, most, starts, copy, num_rows=num_rows, max_width=max(widths))
    assert starts.tolist() == expected.tolist()
    assert copy.tolist() == expected.tolist()
    return starts.diff().tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("widths", "num_rows"), [([5, 5, 5, 5], 11), ([8, 0, 1, 8, 3], 9), ([2], 1), ([8] * 40, 130), ([4, 4], 99)]
)
def test_shared_rows(widths: list[int], num_rows: int, seed: int, device: str) -> None:
    random = np.random.default_rng(seed)
    state = state_of(random, widths, max(widths), 1, device, with_found=seed % 2 == 1)
    # Some of one value, some too bad to tell apart, some of no value.
    scores = -np.cumsum(random.choice([0.0, 0.001, 0.3, 2.0, 9.0], (len(widths), max(widths))), axis=1)
    scores[random.random(scores.shape) < 0.1] = np.nan
    sizes = share(state, torch.from_numpy(scores.astype(np.float32)).to(device), widths, num_rows)
    assert sum(sizes) == min(num_rows, sum(widths))
    assert all(min(width, 1) <= size <= width for size, width in zip(sizes, widths, strict=True))


def test_the_best_nodes_of_the_batch_get_the_rows(device: str) -> None:
    state = state_of(np.random.default_rng(4), [4] * 5, 4, 1, device)
    state.batch.num_left[:] = torch.tensor([9, 9, 9, 9, 2])
    state.batch.joined[:] = torch.tensor([0, 0, STEP, 0, 0])
    state.batch.rates.fill_(3.0)
    state.trees.num_nodes.fill_(4)
    scores = torch.tensor([-0.1, -0.2, -0.3], device=device).repeat(5, 1)
    scores[1] *= 10
    scores = torch.cat([torch.zeros(5, 1, device=device), scores], dim=1)
    # The third has just joined, so its tree is another's; the fifth may emit two tokens at most.
    assert share(state, scores, [4] * 5, 12) == [4, 1, 1, 4, 2]
    assert share(state, scores, [4] * 5, 15) == [4, 4, 1, 4, 2]
    assert share(state, scores, [4] * 5, 8) == [2, 1, 1, 2, 2]
    # Of places without a node, the first.
    assert share(state, scores, [4] * 5, 17) == [4, 4, 3, 4, 2]


def test_slower_sequences_count_more(device: str) -> None:
    """At the same scores the slowest ones get the rows; a chance that is
    worse by less than the rates' squares, too.
    """
    state = state_of(np.random.default_rng(4), [4] * 4, 4, 1, device)
    state.batch.num_left.fill_(9)
    state.batch.joined.fill_(STEP - 64)
    state.trees.num_nodes.fill_(4)
    state.batch.rates[:] = torch.tensor([4.0, 2.0, 3.0, 4.0])
    scores = torch.tensor([0.0, -0.2, -0.4, -0.6], device=device).repeat(4, 1)
    assert share(state, scores, [4] * 4, 10) == [1, 4, 4, 1]
    # 2 * log(3 / 2) is 0.81; all rates' mean, which counts a little, makes it 0.7.
    scores[1] -= 0.2
    assert share(state, scores, [4] * 4, 7) == [1, 4, 1, 1]
    scores[1] -= 1.0
    assert share(state, scores, [4] * 4, 7) == [1, 1, 4, 1]
    # Of one that has just joined little is known.
    state.batch.joined[1] = STEP - 1
    state.batch.rates[1] = 1.0
    scores[:] = torch.tensor([0.0, -0.2, -0.4, -0.6], device=device)
    assert share(state, scores, [4] * 4, 5) == [1, 1, 2, 1]


def test_rates_are_those_of_the_latest_steps(device: str) -> None:
    """A rate begins with the first step, is the mean of the first 64, and then fades."""
    batch, expected = (new_batch_state(2, device) for _ in range(2))
    rows = state_of(np.random.default_rng(0), [4, 4], 4, 1, device).rows
    rows.num_nodes[:] = torch.tensor([4, 0])
    batch.num_left.fill_(9999)
    batch.rates[1] = 7.0
    expected = BatchState(*(tensor.clone() for tensor in batch))
    counts = np.random.default_rng(1).integers(1, 5, 100)
    for number, count in enumerate(counts):
        for state, advance in ((batch, advance_batch), (expected, reference.advance_batch_reference)):
            walk = new_walk_result(2, 4, device)
            walk.num_tokens[0] = int(count)
            results = StepResults(
                *(torch.zeros(size, dtype=torch.int32, device=device) for size in (1, 2, 2, 2)),
                torch.zeros(2, 4, dtype=torch.int32, device=device),
                torch.zeros(8, 0, device=device),
            )
            advance(state, rows, walk, results)
            state.step.add_(1)
        torch.testing.assert_close(batch.rates, expected.rates)
        if number < 64:
            assert float(batch.rates[0]) == pytest.approx(counts[: number + 1].mean(), rel=1e-5)
    assert float(batch.rates[0]) != pytest.approx(counts.mean(), rel=1e-3) and float(batch.rates[1]) == 7.0


def test_found_nodes_come_before_drafted_ones(device: str) -> None:
    state = state_of(np.random.default_rng(4), [4] * 3, 4, 1, device, with_found=True)
    state.batch.num_left.fill_(9)
    state.batch.joined.fill_(0)
    state.batch.rates.fill_(3.0)
    state.trees.num_nodes.fill_(4)
    state.found.num_nodes[:] = torch.tensor([0, 4, 1])
    scores = torch.full((3, 4), -0.01, device=device)
    assert share(state, scores, [4] * 3, 7) == [2, 4, 1]


@pytest.mark.parametrize("stamp", [STEP, STEP - 1])
def test_a_found_tree_replaces_the_drafted_one(stamp: int, device: str) -> None:
    """The host knows who has the batch row, so it may find a tree for one that has just joined."""
    state = state_of(np.random.default_rng(3), [7, 7, 7, 2], 6, 1, device)
    state.batch.num_left.fill_(9)
    state.batch.joined[:] = torch.tensor([STEP, STEP, 0, STEP], dtype=torch.int32)
    state.trees.num_nodes.fill_(4)
    state.found.stamp.fill_(stamp)
    state.found.num_nodes[:] = torch.tensor([7, 1, 0, 7], dtype=torch.int32)
    rows = lay_out(state, 7)
    is_found = stamp == STEP
    assert rows.num_nodes.tolist() == ([7, 1, 4, 2] if is_found else [1, 1, 4, 1])
    if is_found:
        assert rows.tokens[1:7].tolist() == state.found.tokens[0, 1:].tolist()
    assert rows.tokens[15:18].tolist() == state.trees.tokens[2, 1:4].tolist()


def test_an_unsound_tree_that_was_found_is_a_root(device: str) -> None:
    state = state_of(np.random.default_rng(1), [6, 6], 6, 1, device, with_found=True)
    state.found.num_nodes.fill_(6)
    state.batch.num_left.fill_(9)
    state.found.tokens[0, 2] = VOCAB
    assert lay_out(state, 6).num_nodes.tolist() == [1, 6]


@pytest.mark.parametrize("num_batch_rows", [1, 3, 150])
def test_sequences_that_join(num_batch_rows: int, device: str) -> None:
    random = np.random.default_rng(num_batch_rows)
    batch = new_batch_state(num_batch_rows, device)
    values = {
        name: torch.from_numpy(random.integers(1, 90, num_batch_rows).astype(np.int32)).to(device)
        for name in Joining._fields
    }
    joining = Joining(**values | {"joins": torch.arange(num_batch_rows, dtype=torch.int32, device=device) % 2})
    expected = clone(batch)
    reference.join_batch_reference(expected, joining)  # type: ignore[arg-type]
    join_batch(batch, joining)
    for name in BatchState._fields:
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name


@pytest.mark.parametrize("max_depth", [1, 2, 3])
def test_a_tree_that_is_too_deep_is_a_root(max_depth: int, device: str) -> None:
    state = state_of(np.random.default_rng(4), [6, 6, 6], 6, 1, device)
    state.trees.num_nodes.fill_(6)
    state.batch.num_left.fill_(9)
    state.batch.joined.fill_(0)
    chain, bush, star = [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 2, 2], [-1, 0, 0, 0, 0, 0]
    state.trees.parents.copy_(torch.tensor([chain, bush, star], dtype=torch.int32))
    rows = lay_out(state, 6, max_depth)
    assert rows.num_nodes.tolist() == [1, 6 if max_depth > 1 else 1, 6]


@pytest.mark.parametrize("what", ["stamp", "parent", "own parent", "negative parent", "token", "negative token"])
def test_an_unsound_tree_is_a_root(what: str, device: str) -> None:
    state = state_of(np.random.default_rng(1), [6, 6], 6, 1, device)
    state.trees.num_nodes.fill_(6)
    state.batch.num_left.fill_(9)
    state.batch.joined.fill_(0)
    if what == "stamp":
        state.trees.stamp.fill_(STEP - 1)
    elif "parent" in what:
        state.trees.parents[0, 3] = {"parent": 4, "own parent": 3, "negative parent": -1}[what]
    else:
        state.trees.tokens[0, 5] = VOCAB if what == "token" else -1
    rows = lay_out(state, 6)
    assert rows.num_nodes.tolist() == ([1, 1] if what == "stamp" else [1, 6])


def test_a_block_that_is_none_gives_no_kv_slot(device: str) -> None:
    state = state_of(np.random.default_rng(2), [5], 5, 1, device)
    state.batch.lengths.fill_(BLOCK * BLOCKS - 1)
    state.batch.num_left.fill_(9)
    state.batch.joined.fill_(0)
    state.trees.num_nodes.fill_(5)
    state.tables[0, -1] = 3
    rows = lay_out(state, 5)
    assert rows.kv_slots[:5].tolist() == [3 * BLOCK + 2, 3 * BLOCK + 3, -1, -1, -1]


def walk_of(random: np.random.Generator, rows: StepRows, most: int, device: str) -> WalkTensors:
    """Return a walk down some path of each tree, as gpu.walk leaves it; the rest is noise."""
    num_batch_rows = len(rows.num_nodes)
    finishes = [FINISH_NONE, FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_BROKEN]
    walk = new_walk_result(num_batch_rows, most, device)
    for name in ("tokens", "nodes", "accepted"):
        getattr(walk, name).copy_(torch.from_numpy(random.integers(0, VOCAB, (num_batch_rows, most), np.int32)))
    for batch_row in range(num_batch_rows):
        count, start = int(rows.num_nodes[batch_row]), int(rows.row_starts[batch_row])
        path: list[int] = []
        node = int(random.integers(0, max(count, 1)))
        while node > 0:
            path.append(node)
            node = int(rows.parents[start + node])
        path.reverse()
        walk.accepted[batch_row, : len(path)] = torch.tensor(path, dtype=torch.int32)
        walked, finish = len(path) + 1, int(random.choice(finishes))
        emitted = walked - (finish == FINISH_STOP)
        walk.num_walked[batch_row], walk.num_tokens[batch_row], walk.finish[batch_row] = walked, emitted, finish
        walk.num_matched[batch_row], walk.num_accepted[batch_row] = len(path), min(len(path), emitted)
    return walk


def results_of(num_batch_rows: int, most: int, width: int, device: str) -> StepResults:
    return StepResults(
        torch.zeros(1, dtype=torch.int32, device=device),
        *(torch.full((num_batch_rows,), 5, dtype=torch.int32, device=device) for _ in range(3)),
        torch.zeros((num_batch_rows, most), dtype=torch.int32, device=device),
        torch.zeros((num_batch_rows * most, width), device=device),
    )


@pytest.mark.parametrize("seed", range(6))
def test_results(seed: int, device: str) -> None:
    random = np.random.default_rng(seed)
    state = state_of(random, [6, 1, 4, 6], 6, 1, device)
    rows = lay_out(state, 6)
    walk, results = walk_of(random, rows, 6, device), results_of(4, 6, 3, device)
    hidden_states = torch.from_numpy(random.standard_normal((len(rows.token_ids), 3)).astype(np.float32)).to(device)
    batch, expected_walk, expected = clone(state.batch), clone(walk), clone(results)
    reference.advance_batch_reference(batch, rows, expected_walk, expected)  # type: ignore[arg-type]
    reference.gather_hidden_reference(hidden_states, rows, expected_walk, expected)  # type: ignore[arg-type]
    reference.finish_step_reference(batch, expected)  # type: ignore[arg-type]
    advance_batch(state.batch, rows, walk, results)
    gather_hidden(hidden_states, rows, walk, results)
    finish_step(state.batch, results)
    for have, want in ((state.batch, batch), (walk, expected_walk), (results, expected)):
        for name in type(have)._fields:
            assert torch.equal(getattr(have, name), getattr(want, name)), name
    assert state.batch.step.tolist() == results.stamp.tolist() == [STEP + 1]


@pytest.mark.parametrize("mean", [1.0, 2.5, 4.0, 9.0])
def test_a_forced_walk(mean: float, device: str) -> None:
    random = np.random.default_rng(3)
    state = state_of(random, [8, 1, 8, 8], 8, 1, device)
    state.batch.num_left[:] = torch.tensor([20, 20, 2, 20], dtype=torch.int32)
    state.trees.num_nodes.fill_(8)
    rows = lay_out(state, 8)
    walk = walk_of(random, rows, 8, device)
    owed = torch.zeros(4, device=device)
    expected, expected_owed = clone(walk), owed.clone()
    lengths = []
    for _ in range(4):
        reference.force_walk_reference(rows, expected, expected_owed, mean)  # type: ignore[arg-type]
        force_walk(rows, walk, owed, mean, 8)
        assert torch.equal(owed, expected_owed)
        for name in WalkTensors._fields:
            assert torch.equal(getattr(walk, name), getattr(expected, name)), name  # type: ignore[attr-defined]
        lengths.append(int(walk.num_walked[0]))
    if mean == 2.5:
        assert lengths == [2, 3, 2, 3]
    # Benchmarks report a broken model too.
    walk.finish[0] = FINISH_BROKEN
    found = [column[0].clone() for column in walk]
    force_walk(rows, walk, owed, mean, 8)
    assert all(torch.equal(now[0], before) for now, before in zip(walk, found, strict=True))


def test_nobody_sits_at_first(device: str) -> None:
    batch = new_batch_state(3, device)
    assert all(not tensor.any() for tensor in batch)


@pytest.mark.slow
def test_kernels_compile_without_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[2]), str(Path(foretoken_kernels.__file__).parents[1])]
    command = "from tests.kernels.compile_overlap import compile_all; compile_all()"
    result = subprocess.run(
        [sys.executable, "-c", command],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
