# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Finish an overlapped step: advance its seats and lay out its results for a drafter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.overlap_state import RATE_STEPS, Seats, StepResults, StepRows
from foretoken_kernels.sampler_state import FINISH_NONE, WalkTensors

_COPY_BLOCK = 2048
_NONE = tl.constexpr(FINISH_NONE)


@triton.jit(do_not_specialize=["max_walked"])
def _advance_seats(seats, rows, walk, results, max_walked, most, TOKENS: tl.constexpr, RATE_STEPS: tl.constexpr):
    seat = tl.program_id(0)
    sits = tl.load(rows.num_nodes + seat) > 0
    count = tl.minimum(tl.maximum(tl.load(walk.num_tokens + seat), 0), tl.minimum(max_walked, most))
    count = tl.where(sits, count, 0)
    finish = tl.load(walk.finish + seat)
    if sits == 0:
        tl.store(walk.num_walked + seat, 0)
        tl.store(walk.num_tokens + seat, 0)
        tl.store(walk.num_matched + seat, 0)
        tl.store(walk.num_accepted + seat, 0)
        tl.store(walk.finish + seat, _NONE)
    length = tl.load(seats.lengths + seat) + count
    left = tl.where(sits & (finish == _NONE), tl.load(seats.num_left + seat) - count, 0)
    num_outputs = tl.load(seats.num_outputs + seat) + count
    num_steps = tl.load(seats.step) - tl.load(seats.joined + seat) + 1
    rate = tl.load(seats.rates + seat)
    rate += (count.to(tl.float32) - rate) / tl.minimum(tl.maximum(num_steps, 1), RATE_STEPS).to(tl.float32)
    token = tl.arange(0, TOKENS)
    is_new = token < count
    tokens = tl.load(walk.tokens + seat.to(tl.int64) * max_walked + token, mask=is_new, other=0)
    tl.store(results.new_tokens + seat.to(tl.int64) * most + token, tokens, mask=is_new)
    last = tl.sum(tl.where(token == count - 1, tokens, 0), axis=0)
    last = tl.where(count > 0, last, tl.load(seats.last_tokens + seat))
    # All threads have read what is overwritten now.
    tl.debug_barrier()
    tl.store(seats.lengths + seat, length)
    tl.store(seats.num_left + seat, left)
    tl.store(seats.rates + seat, rate, mask=sits)
    tl.store(seats.num_outputs + seat, num_outputs)
    tl.store(seats.last_tokens + seat, last)
    tl.store(results.counts + seat, count)
    tl.store(results.lengths + seat, length)
    tl.store(results.num_left + seat, left)


@triton.jit(do_not_specialize=["num_rows", "max_walked"])
def _gather_hidden(features, rows, walk, results, num_rows, max_walked, most, width, stride, BLOCK: tl.constexpr):
    out_row = tl.program_id(0)
    seat = out_row // most
    index = out_row % most
    if index >= tl.load(results.counts + seat):
        return
    node = 0
    if index > 0:
        node = tl.load(walk.accepted + seat.to(tl.int64) * max_walked + index - 1)
    row = tl.load(rows.row_starts + seat) + tl.maximum(node, 0)
    row = tl.minimum(tl.maximum(row, 0), num_rows - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(features + row.to(tl.int64) * stride + column, mask=column < width)
    tl.store(results.hidden + out_row.to(tl.int64) * width + column, values, mask=column < width)


@triton.jit
def _finish_step(seats, results):
    number = tl.load(seats.step) + 1
    tl.debug_barrier()
    tl.store(seats.step, number)
    tl.store(results.stamp, number)


def advance_seats(seats: Seats, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Commit what the walk emitted; reference_overlap.advance_seats_reference defines it.

    The ``walk`` of an empty seat is cleared. No tree is deeper than results have room for
    (``max_depth`` of lay_out_rows).
    """
    most = results.new_tokens.shape[1]
    _advance_seats[(len(rows.num_nodes),)](
        seats,
        rows,
        walk,
        results,
        walk.tokens.shape[1],
        most,
        TOKENS=triton.next_power_of_2(most),
        RATE_STEPS=RATE_STEPS,
        num_warps=1,
    )


def gather_hidden(features: torch.Tensor, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Copy the hidden states that gave the committed tokens; call it after ``advance_seats``.

    Args:
        features: [rows, width], hidden states of the target's pass; rows are contiguous, dtype as
            ``results.hidden``.
    """
    width = results.hidden.shape[1]
    most = results.new_tokens.shape[1]
    if features.shape[1] != width or features.stride(1) != 1:
        raise ValueError(f"hidden states have {features.shape[1]} elements; there is room for {width}")
    _gather_hidden[(len(rows.num_nodes) * most, triton.cdiv(width, _COPY_BLOCK))](
        features,
        rows,
        walk,
        results,
        len(features),
        walk.tokens.shape[1],
        most,
        width,
        features.stride(0),
        BLOCK=_COPY_BLOCK,
        num_warps=4,
    )


def finish_step(seats: Seats, results: StepResults) -> None:
    """Count the step and stamp its results: the last launch of a step."""
    _finish_step[(1,)](seats, results, num_warps=1)
