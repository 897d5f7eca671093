# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Finish an overlapped step: advance its sequences and lay out its results for a drafter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.overlap_state import RATE_STEPS, BatchState, StepResults, StepRows
from foretoken_kernels.sampler_state import FINISH_NONE, WalkTensors

_COPY_BLOCK = 2048
_NONE = tl.constexpr(FINISH_NONE)


@triton.jit(do_not_specialize=["max_walked"])
def _advance_batch(batch, rows, walk, results, max_walked, most, TOKENS: tl.constexpr, RATE_STEPS: tl.constexpr):
    batch_row = tl.program_id(0)
    is_taken = tl.load(rows.num_nodes + batch_row) > 0
    count = tl.minimum(tl.maximum(tl.load(walk.num_tokens + batch_row), 0), tl.minimum(max_walked, most))
    count = tl.where(is_taken, count, 0)
    finish = tl.load(walk.finish + batch_row)
    if is_taken == 0:
        tl.store(walk.num_walked + batch_row, 0)
        tl.store(walk.num_tokens + batch_row, 0)
        tl.store(walk.num_matched + batch_row, 0)
        tl.store(walk.num_accepted + batch_row, 0)
        tl.store(walk.finish + batch_row, _NONE)
    length = tl.load(batch.lengths + batch_row) + count
    left = tl.where(is_taken & (finish == _NONE), tl.load(batch.num_left + batch_row) - count, 0)
    num_outputs = tl.load(batch.num_outputs + batch_row) + count
    num_steps = tl.load(batch.step) - tl.load(batch.joined + batch_row) + 1
    rate = tl.load(batch.rates + batch_row)
    rate += (count.to(tl.float32) - rate) / tl.minimum(tl.maximum(num_steps, 1), RATE_STEPS).to(tl.float32)
    token = tl.arange(0, TOKENS)
    is_new = token < count
    tokens = tl.load(walk.tokens + batch_row.to(tl.int64) * max_walked + token, mask=is_new, other=0)
    tl.store(results.new_tokens + batch_row.to(tl.int64) * most + token, tokens, mask=is_new)
    last = tl.sum(tl.where(token == count - 1, tokens, 0), axis=0)
    last = tl.where(count > 0, last, tl.load(batch.last_tokens + batch_row))
    # All threads have read what is overwritten now.
    tl.debug_barrier()
    tl.store(batch.lengths + batch_row, length)
    tl.store(batch.num_left + batch_row, left)
    tl.store(batch.rates + batch_row, rate, mask=is_taken)
    tl.store(batch.num_outputs + batch_row, num_outputs)
    tl.store(batch.last_tokens + batch_row, last)
    tl.store(results.counts + batch_row, count)
    tl.store(results.lengths + batch_row, length)
    tl.store(results.num_left + batch_row, left)


@triton.jit(do_not_specialize=["num_rows", "max_walked"])
def _gather_hidden(hidden_states, rows, walk, results, num_rows, max_walked, most, width, stride, BLOCK: tl.constexpr):
    out_row = tl.program_id(0)
    batch_row = out_row // most
    index = out_row % most
    if index >= tl.load(results.counts + batch_row):
        return
    node = 0
    if index > 0:
        node = tl.load(walk.accepted + batch_row.to(tl.int64) * max_walked + index - 1)
    row = tl.load(rows.row_starts + batch_row) + tl.maximum(node, 0)
    row = tl.minimum(tl.maximum(row, 0), num_rows - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(hidden_states + row.to(tl.int64) * stride + column, mask=column < width)
    tl.store(results.hidden + out_row.to(tl.int64) * width + column, values, mask=column < width)


@triton.jit
def _finish_step(batch, results):
    number = tl.load(batch.step) + 1
    tl.debug_barrier()
    tl.store(batch.step, number)
    tl.store(results.stamp, number)


def advance_batch(batch: BatchState, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Commit what the walk emitted; reference_overlap.advance_batch_reference defines it.

    The ``walk`` of an empty batch row is cleared. No tree is deeper than results have room for
    (``max_depth`` of lay_out_rows).
    """
    most = results.new_tokens.shape[1]
    _advance_batch[(len(rows.num_nodes),)](
        batch,
        rows,
        walk,
        results,
        walk.tokens.shape[1],
        most,
        TOKENS=triton.next_power_of_2(most),
        RATE_STEPS=RATE_STEPS,
        num_warps=1,
    )


def gather_hidden(hidden_states: torch.Tensor, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Copy the hidden states that gave the committed tokens; call it after ``advance_batch``.

    Args:
        hidden_states: [rows, width], hidden states of the target's pass; rows are contiguous, dtype
            as ``results.hidden``.

    Raises:
        ValueError: ``hidden_states`` are wider or narrower than ``results.hidden``, or not
            contiguous.
    """
    width = results.hidden.shape[1]
    most = results.new_tokens.shape[1]
    if hidden_states.shape[1] != width or hidden_states.stride(1) != 1:
        raise ValueError(f"hidden states have {hidden_states.shape[1]} elements; there is room for {width}")
    _gather_hidden[(len(rows.num_nodes) * most, triton.cdiv(width, _COPY_BLOCK))](
        hidden_states,
        rows,
        walk,
        results,
        len(hidden_states),
        walk.tokens.shape[1],
        most,
        width,
        hidden_states.stride(0),
        BLOCK=_COPY_BLOCK,
        num_warps=4,
    )


def finish_step(batch: BatchState, results: StepResults) -> None:
    """Count the step and stamp its results: the last launch of a step."""
    _finish_step[(1,)](batch, results, num_warps=1)
