"""Which passes over a step's rows and prompts there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretoken.models.batch import ForwardBatch, blank_batch
from foretoken.models.device_sizes import PassSizes
from verifier_svc.overlap.joined_prompts import JoinedSizes
from verifier_svc.overlap.sizes import ShapeRows

LARGE = JoinedSizes(PassSizes(rows=8192, wanted=4096, seqs=256, blocks=512), 256, max_width=32, small_width=8)
SMALL = JoinedSizes(PassSizes(rows=100, wanted=40, seqs=4, blocks=8), 4, max_width=8, small_width=8)


def prompts(rows: int, seqs: int = 1) -> ForwardBatch:
    return blank_batch(rows, seqs)


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("num_rows", [1, 5, 40, 130, 300, 600, 1100])
@pytest.mark.parametrize("num_prompt_rows", [1, 59, 95, 300, 700, 1500])
def test_a_size_holds_what_it_is_chosen_for_and_has_a_graph(
    sizes: JoinedSizes, num_rows: int, num_prompt_rows: int
) -> None:
    for num_batch_rows in (1, 4, 200):
        size = sizes.of(num_rows, num_batch_rows, 1, 8, prompts(num_prompt_rows))
        total = num_rows + num_prompt_rows
        fits = total <= min(2048, sizes.most.rows) and num_rows <= min(1024, sizes.most.wanted)
        if num_batch_rows > sizes.max_batch_rows or not fits:
            assert size is None
        else:
            assert size is not None and size in sizes.all(is_long=False)
            assert size.rows >= total and size.wanted >= num_rows and size.seqs >= num_batch_rows


def test_few_rows_are_empty() -> None:
    """A row costs as much as another, whether it is one of a prompt or none."""
    for total in range(2, 2049):
        size = LARGE.of(1, 1, 1, 1, prompts(total - 1))
        assert size is not None and size.rows - total < max(32, total / 8)


def test_what_no_graph_holds_has_a_pass_of_its_own() -> None:
    assert LARGE.of(16, 16, 128, 1, prompts(300, 8)) is not None
    assert LARGE.of(16, 16, 128, 1, prompts(300, 9)) is None
    longer = replace(LARGE, most=LARGE.most._replace(blocks=8192))
    assert longer.of(16, 16, 1024, 1, prompts(300)) is not None
    assert longer.of(16, 16, 1025, 1, prompts(300)) is None


@pytest.mark.parametrize("num_rows", [1, 100, 129, 500])
@pytest.mark.parametrize("num_prompt_rows", [1, 300, 1500])
def test_a_long_sequence_in_the_step_or_a_long_prompt_needs_wide_tables(num_rows: int, num_prompt_rows: int) -> None:
    short = prompts(num_prompt_rows)
    long = replace(short, block_tables=np.zeros((1, 129), np.int32))
    assert LARGE.of(num_rows, 100, 128, 8, short) not in set(LARGE.all(is_long=True))
    for size in (LARGE.of(num_rows, 100, 129, 8, short), LARGE.of(num_rows, 100, 1, 8, long)):
        assert size in set(LARGE.all(is_long=True)) and size is not None
        assert size.blocks >= 129 and size.rows >= num_rows + num_prompt_rows and size.wanted >= num_rows
    assert LARGE.of(513, 100, 129, 8, short) is None
    assert LARGE.of(num_rows, 7, 129, 8, short) is None, "a few long sequences would wait for long"


def test_many_rows_are_in_small_trees() -> None:
    """Attention's tiles are for the bound on a tree's rows. Large trees have at most 256 rows together."""
    large, small = (LARGE.of(rows, 16, 128, 8, prompts(300)) for rows in (256, 257))
    assert large is not None and large.max_seq_rows == 32
    assert small is not None and small.max_seq_rows == 8
    assert LARGE.of(256, 16, 128, 32, prompts(300)) == large
    assert LARGE.of(257, 16, 128, 32, prompts(300)) is None


def test_a_large_tree_beside_a_long_sequence_leaves_prompts_a_pass_of_their_own() -> None:
    """Otherwise attention would have tiles for large trees in all steps with a long sequence."""
    small = LARGE.of(256, 16, 129, 8, prompts(300))
    assert small is not None and small.max_seq_rows == 8
    assert LARGE.of(256, 16, 129, 9, prompts(300)) is None


def test_the_bound_is_that_of_the_shapes_in_which_steps_draft() -> None:
    chains, trees = ShapeRows(4, 4), ShapeRows(32, 32, is_for_few=True)
    for shapes, has_found, width in (
        ([ShapeRows(1, 1)], False, 1),
        ([ShapeRows(1, 1), chains, trees], False, 4),
        ([ShapeRows(1, 1), chains, trees], True, 32),
        ([ShapeRows(32, 32)], False, 32),
        ([trees], False, 32),
    ):
        sizes = LARGE.for_shapes(shapes, has_found=has_found)
        widths = {size.wanted: size.max_seq_rows for size in sizes.all(is_long=False) if size.rows == 2048}
        assert widths[256] == 32 and widths[512] == widths[1024] == width
        assert {size.max_seq_rows for size in sizes.all(is_long=True)} == {width}


def test_every_size_is_the_smallest_for_some_step() -> None:
    """A graph that is never chosen would only delay the start."""
    for sizes in (LARGE, SMALL, replace(LARGE, most=LARGE.most._replace(wanted=200))):
        for is_long, num_blocks in ((False, 1), (True, 129)):
            if is_long and sizes.most.blocks < num_blocks:
                continue
            all_sizes = list(sizes.all(is_long=is_long))
            assert len(all_sizes) == len(set(all_sizes))
            for size in all_sizes:
                num_rows = min(size.wanted, size.rows - 1)
                chosen = sizes.of(num_rows, size.seqs, num_blocks, 1, prompts(size.rows - num_rows))
                assert chosen == size or (is_long and size.seqs < 8)
