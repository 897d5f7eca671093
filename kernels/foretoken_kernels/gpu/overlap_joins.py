# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Fill the batch rows of sequences that join between two overlapped steps."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken_kernels.overlap_state import BatchState, Joining

_BLOCK = 128


@triton.jit(do_not_specialize=["num_batch_rows"])
def _join_batch(batch, joining, num_batch_rows, BLOCK: tl.constexpr):
    batch_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    joins = tl.load(joining.joins + batch_row, mask=batch_row < num_batch_rows, other=0) > 0
    tl.store(batch.batch_slots + batch_row, tl.load(joining.batch_slots + batch_row, mask=joins), mask=joins)
    tl.store(batch.lengths + batch_row, tl.load(joining.lengths + batch_row, mask=joins), mask=joins)
    tl.store(batch.num_left + batch_row, tl.load(joining.num_left + batch_row, mask=joins), mask=joins)
    tl.store(batch.num_outputs + batch_row, tl.load(joining.num_outputs + batch_row, mask=joins), mask=joins)
    tl.store(batch.last_tokens + batch_row, tl.load(joining.last_tokens + batch_row, mask=joins), mask=joins)
    tl.store(batch.joined + batch_row, tl.load(joining.joined + batch_row, mask=joins), mask=joins)
    tl.store(batch.rates + batch_row, tl.zeros((BLOCK,), tl.float32), mask=joins)


def join_batch(batch: BatchState, joining: Joining) -> None:
    """Fill the batch rows of sequences that join.

    reference_overlap.join_batch_reference defines it.
    """
    num_batch_rows = len(joining.joins)
    _join_batch[(triton.cdiv(num_batch_rows, _BLOCK),)](batch, joining, num_batch_rows, BLOCK=_BLOCK, num_warps=4)
