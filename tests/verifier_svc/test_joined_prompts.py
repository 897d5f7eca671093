"""Which passes over a step's rows and prompts there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretoken.models.batch import ForwardBatch, blank_batch
from foretoken.models.device_sizes import PassSizes
from verifier_svc.overlap.joined_prompts import JoinedSizes

LARGE = JoinedSizes(PassSizes(rows=8192, wanted=4096, seqs=256, blocks=512), max_batch_rows=256, max_width=32)
SMALL = JoinedSizes(PassSizes(rows=100, wanted=40, seqs=4, blocks=8), max_batch_rows=4, max_width=8)


def prompts(rows: int, seqs: int = 1) -> ForwardBatch:
    return blank_batch(rows, seqs)


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("num_rows", [1, 5, 40, 130, 300, 600, 1100])
@pytest.mark.parametrize("num_prompt_rows", [1, 59, 95, 300, 700, 1500])
def test_a_size_holds_what_it_is_chosen_for_and_has_a_graph(
    sizes: JoinedSizes, num_rows: int, num_prompt_rows: int
) -> None:
    for num_batch_rows in (1, 4, 200):
        size = sizes.of(num_rows, num_batch_rows, 1, prompts(num_prompt_rows))
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
        size = LARGE.of(1, 1, 1, prompts(total - 1))
        assert size is not None and size.rows - total < max(32, total / 8)


def test_what_no_graph_holds_has_a_pass_of_its_own() -> None:
    assert LARGE.of(16, 16, 128, prompts(300, 8)) is not None
    assert LARGE.of(16, 16, 128, prompts(300, 9)) is None
    longer = JoinedSizes(LARGE.most._replace(blocks=8192), max_batch_rows=256, max_width=32)
    assert longer.of(16, 16, 1024, prompts(300)) is not None
    assert longer.of(16, 16, 1025, prompts(300)) is None


@pytest.mark.parametrize("num_rows", [1, 100, 129, 500])
@pytest.mark.parametrize("num_prompt_rows", [1, 300, 1500])
def test_a_long_sequence_in_the_step_or_a_long_prompt_needs_wide_tables(num_rows: int, num_prompt_rows: int) -> None:
    short = prompts(num_prompt_rows)
    long = replace(short, block_tables=np.zeros((1, 129), np.int32))
    assert LARGE.of(num_rows, 100, 128, short) not in set(LARGE.all(is_long=True))
    for size in (LARGE.of(num_rows, 100, 129, short), LARGE.of(num_rows, 100, 1, long)):
        assert size in set(LARGE.all(is_long=True)) and size is not None
        assert size.blocks >= 129 and size.rows >= num_rows + num_prompt_rows and size.wanted >= num_rows
    assert LARGE.of(513, 100, 129, short) is None
    assert LARGE.of(num_rows, 7, 129, short) is None, "a few long sequences would wait for long"
