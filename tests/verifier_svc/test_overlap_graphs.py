"""Which captured graph runs an overlapped step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch

from foretoken.models.batch import blank_batch
from foretoken.models.device_batch import BatchShape, captured_sizes, runs_of
from foretoken.models.device_batches import DeviceBatches
from foretoken.models.device_sizes import PassSizes
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.overlap.graphs import OverlapGraphs
from verifier_svc.overlap.sizes import (
    MAX_USUAL_ROWS,
    ShapeRows,
    UsualSize,
    long_sizes,
    prompt_passes,
    rows_of_shapes,
    usual_sizes,
)
from verifier_svc.overlap.stage import StepSize
from verifier_svc.speculation.candidate_shapes import (
    MOST_LARGE_TREE_ROWS,
    SHARED_FROM,
    candidate_shapes,
    is_large_tree,
    suits,
)

LAYERS = (2, 16)


def size(rows: int, seqs: int, width: int = 8, blocks: int = 128) -> StepSize:
    return StepSize(rows, seqs, width, blocks, LAYERS)


def captured(*sizes: StepSize) -> OverlapGraphs:
    graphs = OverlapGraphs()
    for each in sizes:
        graphs.add(each)
    return graphs


def test_a_batch_that_empties_runs_in_the_graph_of_a_fuller_one() -> None:
    graphs = captured(size(40, 8), size(80, 16), size(128, 16), size(288, 64))
    # Five of sixteen batch rows are left, and the last one is among them.
    assert graphs.choose(size(40, 16, 7, 30)) == size(80, 16)
    assert graphs.choose(size(40, 5)) == size(40, 8)
    assert graphs.choose(size(81, 16)) == size(128, 16)
    assert graphs.choose(size(81, 17)) == size(288, 64)


def test_no_graph_holds_what_is_larger_or_of_another_kind() -> None:
    graphs = captured(size(128, 16))
    assert graphs.choose(size(129, 16)) is None
    assert graphs.choose(size(16, 17)) is None
    assert graphs.choose(size(16, 2, width=9)) is None
    assert graphs.choose(size(16, 2, blocks=129)) is None
    assert graphs.choose(size(16, 2)._replace(captured_layers=(3,))) is None
    graphs.clear()
    assert graphs.choose(size(16, 2)) is None and not graphs.is_due


def test_spare_rows_that_cost_more_than_a_capture_end() -> None:
    graphs = captured(size(80, 16))
    assert graphs.choose(size(40, 16)) == size(80, 16)
    count = 0
    while not graphs.is_wasteful:
        graphs.count_step()
        count += 1
    # 40 rows of 20 us each.
    assert 100 <= count <= 200
    assert graphs.choose(size(40, 15)) is None, "it has the same graph"
    assert graphs.is_due and not graphs.is_wasteful
    assert graphs.choose(size(48, 15)) == size(80, 16) and not graphs.is_due
    graphs.choose(size(40, 15))
    graphs.add(size(40, 16))
    assert graphs.choose(size(40, 15)) == size(40, 16) and not graphs.is_due


def test_few_spare_rows_hardly_lead_to_a_capture() -> None:
    """A capture holds up all streams, which a few rows more do not."""

    def num_steps(rows: int) -> int:
        graphs = captured(size(1100, 256))
        assert graphs.choose(size(rows, 256)) == size(1100, 256)
        count = 0
        while not graphs.is_wasteful:
            graphs.count_step()
            count += 1
        return count

    assert num_steps(1024) > 20 * num_steps(512)


def test_rows_that_no_graph_of_its_own_could_spare_are_not_counted() -> None:
    graphs = captured(size(80, 16))
    assert graphs.choose(size(79, 16)) == size(80, 16)
    for _ in range(10_000):
        graphs.count_step()
    assert not graphs.is_due


def test_short_sequences_get_narrow_tables_even_with_more_spare_rows() -> None:
    graphs = captured(size(12, 16), size(10, 16, blocks=1024))
    assert graphs.choose(size(10, 16)) == size(12, 16)
    assert graphs.choose(size(10, 16, blocks=129)) == size(10, 16, blocks=1024)


def test_short_sequences_do_not_stay_in_wide_tables() -> None:
    graphs = captured(size(16, 16, blocks=1024))
    assert graphs.choose(size(16, 16)) == size(16, 16, blocks=1024)
    while not graphs.is_wasteful:
        graphs.count_step()
    graphs.choose(size(16, 16, blocks=129))
    for _ in range(10_000):
        graphs.count_step()
    assert not graphs.is_due


def captured_usual(usual: Iterable[UsualSize], blocks: int = 1) -> OverlapGraphs:
    return captured(*(StepSize(*captured_sizes(rows, seqs, width, blocks), LAYERS) for rows, seqs, width in usual))


@pytest.mark.parametrize("max_batch_rows", [1, 7, 100, 256, 500])
@pytest.mark.parametrize(("mean", "most"), [(1, 1), (2, 2), (4, 4), (5, 5), (4, 6), (6, 8), (7, 7), (32, 32)])
def test_every_number_of_sequences_has_a_graph_that_holds_it(max_batch_rows: int, mean: int, most: int) -> None:
    usual = list(usual_sizes(max_batch_rows, most, [ShapeRows(mean, most)], has_found=False))
    graphs = captured_usual(usual)
    assert all(size.rows <= MAX_USUAL_ROWS for size in usual)
    for count in range(SHARED_FROM if mean < most else 1, max_batch_rows + 1):
        if count * mean <= MAX_USUAL_ROWS:
            assert graphs.choose(size(count * mean, count, most, 1)), count


@pytest.mark.parametrize("max_batch_rows", [1, 7, 100, 256, 500])
@pytest.mark.parametrize(("mean", "most"), [(1, 1), (5, 5), (4, 6), (7, 7), (32, 32)])
def test_so_has_every_number_of_long_sequences(max_batch_rows: int, mean: int, most: int) -> None:
    usual = list(long_sizes(max_batch_rows, most, [ShapeRows(mean, most)], has_found=False))
    graphs = captured_usual(usual, 129)
    for count in range(1, max_batch_rows + 1):
        if count * mean <= MAX_USUAL_ROWS:
            assert graphs.choose(size(count * mean, count, most, 129)), count


@pytest.mark.parametrize("max_batch_rows", [1, 7, 100, 256, 500])
@pytest.mark.parametrize("has_found", [False, True])
@pytest.mark.parametrize(("sizes_of", "blocks"), [(usual_sizes, 1), (long_sizes, 129)])
def test_every_shape_of_a_choice_has_a_graph_however_the_batch_has_emptied(
    max_batch_rows: int, has_found: bool, sizes_of: Callable[..., Iterable[UsualSize]], blocks: int
) -> None:
    shapes = candidate_shapes(TreeBounds(32))
    assert {16, 32} <= {shape.nodes for shape in shapes}
    graphs = captured_usual(sizes_of(max_batch_rows, 32, rows_of_shapes(shapes), has_found=has_found), blocks)
    for shape in shapes:
        for count in filter(partial(suits, shape), range(1, max_batch_rows + 1)):
            for batch_rows in range(count, max_batch_rows + 1, 7):
                if is_large_tree(shape) or batch_rows * shape.rows <= MAX_USUAL_ROWS:
                    needed = size(count * shape.rows, batch_rows, shape.nodes, blocks)
                    assert graphs.choose(needed), (shape, count, batch_rows)
                    # The host may have found a tree of any size for a sequence.
                    needed = needed._replace(rows=min(needed.rows + 31, 32 * batch_rows, MAX_USUAL_ROWS), max_width=32)
                    assert not has_found or graphs.choose(needed), (shape, count, batch_rows)


def test_large_trees_get_no_graphs_for_batches_that_do_not_draft_them() -> None:
    shapes = candidate_shapes(TreeBounds(32))
    usual = usual_sizes(256, 32, rows_of_shapes(shapes), has_found=False)
    assert max(size.rows for size in usual if size.max_width > 8) == MOST_LARGE_TREE_ROWS
    # A fixed shape is drafted in any batch.
    (fixed,) = candidate_shapes(TreeBounds(32, 5))
    usual = usual_sizes(256, 32, rows_of_shapes([fixed]), has_found=False)
    assert max(size.rows for size in usual) == MAX_USUAL_ROWS


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("max_rows", [8, 100, 512, 2048])
def test_prompts_that_join_no_step_have_graphs(max_rows: int, is_long: bool) -> None:
    """One long prompt of many rows that fills no chunk runs in the pass of a few."""
    blocks = 129 if is_long else 1
    batches = DeviceBatches(PassSizes(9000, 9000, 256, 4096), 16, torch.device("cpu"), graphs=True)

    captured: set[BatchShape | None] = set()

    def graph(rows: int, seqs: int) -> BatchShape | None:
        batch = blank_batch(rows, seqs, blocks, 16)
        return batches.upload(batch, runs_of(batch), is_captured=captured.__contains__).graph_shape

    for rows, seqs in prompt_passes(max_rows, 256, is_long=is_long):
        captured.add(graph(rows, seqs))
    lone = graph(1, 1)
    assert lone is not None and lone.seqs == 1
    for seqs in (1, 8, 64):
        assert {graph(rows, seqs) for rows in range(seqs, max_rows + 1)} <= captured
    # One that is captured nowhere gets a graph of its own.
    captured.clear()
    assert graph(1, 1) == lone
