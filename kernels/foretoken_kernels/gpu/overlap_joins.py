# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Seat sequences that join between two overlapped steps."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken_kernels.overlap_state import Joining, Seats

_BLOCK = 128


@triton.jit(do_not_specialize=["num_seats"])
def _join_seats(seats, joining, num_seats, BLOCK: tl.constexpr):
    seat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    joins = tl.load(joining.joins + seat, mask=seat < num_seats, other=0) > 0
    tl.store(seats.slots + seat, tl.load(joining.slots + seat, mask=joins), mask=joins)
    tl.store(seats.lengths + seat, tl.load(joining.lengths + seat, mask=joins), mask=joins)
    tl.store(seats.num_left + seat, tl.load(joining.num_left + seat, mask=joins), mask=joins)
    tl.store(seats.num_outputs + seat, tl.load(joining.num_outputs + seat, mask=joins), mask=joins)
    tl.store(seats.last_tokens + seat, tl.load(joining.last_tokens + seat, mask=joins), mask=joins)
    tl.store(seats.joined + seat, tl.load(joining.joined + seat, mask=joins), mask=joins)
    tl.store(seats.rates + seat, tl.zeros((BLOCK,), tl.float32), mask=joins)


def join_seats(seats: Seats, joining: Joining) -> None:
    """Seat the sequences that join; reference_overlap.join_seats_reference defines it."""
    num_seats = len(joining.joins)
    _join_seats[(triton.cdiv(num_seats, _BLOCK),)](seats, joining, num_seats, BLOCK=_BLOCK, num_warps=4)
