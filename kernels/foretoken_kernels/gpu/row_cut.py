# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Top-k, top-p and min-p of one row as one cut: a value, and an id among those that equal it.

Exact and without sorting: each cut value is found by bisection over the integers that order as float32 values do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken_kernels.gpu.row_logits import row_logits

NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order_of(value):
    """int64 that orders as float32 does (-0.0 just below 0.0)."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def _value_of(order):
    """The float32 value of an order."""
    return tl.where(order < 0, order ^ _MAGNITUDE, order).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weights_of(values, largest):
    """float64 probabilities, unnormalised: 1 for the largest value, 0 for -inf."""
    return tl.where(values > float("-inf"), tl.exp(values.to(tl.float64) - largest.to(tl.float64)), 0.0)


@triton.jit
def _tally(
    threshold, largest, batch, state, sizes, row, start, slot, masks_stops, KIND: tl.constexpr, TOKENS: tl.constexpr
):
    """Of the row's values from ``threshold`` on the largest, the number or the mass; float64."""
    total = tl.full([], 0.0, tl.float64)
    if KIND == "largest":
        total = tl.full([], float("-inf"), tl.float64)
    for first_id in range(0, sizes.vocab_limit, TOKENS):
        values = row_logits(first_id, batch, state, sizes, row, start, slot, masks_stops, TOKENS)
        if KIND == "largest":
            total = tl.maximum(total, tl.max(values, axis=0).to(tl.float64))
        elif KIND == "number":
            total += tl.sum((values >= threshold).to(tl.int32), axis=0).to(tl.float64)
        else:
            total += tl.sum(tl.where(values >= threshold, _weights_of(values, largest), 0.0), axis=0)
    return total


@triton.jit
def _bisect(
    low,
    high,
    wanted,
    largest,
    batch,
    state,
    sizes,
    row,
    start,
    slot,
    masks_stops,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Largest order in [low, high] from whose value on the tally is at least ``wanted``; ``low`` if none is."""
    while low < high:
        middle = low + (high - low + 1) // 2
        tally = _tally(_value_of(middle), largest, batch, state, sizes, row, start, slot, masks_stops, KIND, TOKENS)
        is_enough = tally >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit
def _nth_equal(value, wanted, batch, state, sizes, row, start, slot, masks_stops, TOKENS: tl.constexpr):
    """The id of the ``wanted``-th (from 1) token whose value this is, in id order."""
    found = tl.full([], NO_TOKEN, tl.int32)
    before = wanted * 0
    for first_id in range(0, sizes.vocab_limit, TOKENS):
        values = row_logits(first_id, batch, state, sizes, row, start, slot, masks_stops, TOKENS)
        equal = (values == value).to(tl.int32)
        rank = before + tl.cumsum(equal, axis=0)
        ids = first_id + tl.arange(0, TOKENS)
        found = tl.minimum(found, tl.min(tl.where((equal > 0) & (rank == wanted), ids, NO_TOKEN), axis=0))
        before += tl.sum(equal, axis=0)
    return found


@triton.jit
def row_cut(batch, state, sizes, row, start, slot, masks_stops, TOKENS: tl.constexpr):
    """Cut value and cut id: what is kept lies above the value, or equals it and has no larger id.

    Top-k first, then top-p over what it kept, then min-p over what that kept, as reference_sampling.row_cut does.
    """
    never = tl.full([], float("-inf"), tl.float32)
    largest = _tally(never, never, batch, state, sizes, row, start, slot, masks_stops, "largest", TOKENS).to(tl.float32)
    cut = never
    cut_id = tl.full([], NO_TOKEN, tl.int32)
    if largest > float("-inf"):
        high = _order_of(largest)
        top_k = tl.load(state.top_k + slot)
        if (top_k > 0) & (top_k < sizes.vocab_limit):
            wanted = top_k.to(tl.float64)
            order = _bisect(
                _order_of(never),
                high,
                wanted,
                largest,
                batch,
                state,
                sizes,
                row,
                start,
                slot,
                masks_stops,
                "number",
                TOKENS,
            )
            cut = _value_of(order)

        top_p = tl.load(state.top_p + slot)
        if top_p < 1.0:
            low = _order_of(cut)
            wanted = top_p * _tally(cut, largest, batch, state, sizes, row, start, slot, masks_stops, "mass", TOKENS)
            order = _bisect(
                low, high, wanted, largest, batch, state, sizes, row, start, slot, masks_stops, "mass", TOKENS
            )
            cut = _value_of(order)
            # Of the values at the cut only as many as the mass needs.
            above = tl.full([], 0.0, tl.float64)
            if order < high:
                above = _tally(
                    _value_of(order + 1), largest, batch, state, sizes, row, start, slot, masks_stops, "mass", TOKENS
                )
            weight = _weights_of(cut, largest)
            if weight > 0.0:
                needed = tl.maximum(tl.ceil((wanted - above) / weight), 1.0)
                needed = tl.where((needed > 1.0) & (above + (needed - 1.0) * weight >= wanted), needed - 1.0, needed)
                needed = tl.where(above + needed * weight < wanted, needed + 1.0, needed)
                cut_id = _nth_equal(
                    cut, needed.to(tl.int32), batch, state, sizes, row, start, slot, masks_stops, TOKENS
                )

        min_p = tl.load(state.min_p + slot)
        if min_p > 0.0:
            low = _order_of(cut)
            top = high
            # Smallest order whose weight is enough; the largest value's is 1.
            while low < top:
                middle = low + (top - low) // 2
                is_enough = _weights_of(_value_of(middle), largest) >= min_p
                top = tl.where(is_enough, middle, top)
                low = tl.where(is_enough, low, middle + 1)
            # A cut that stays where it was keeps its id.
            cut_id = tl.where(_value_of(low) > cut, NO_TOKEN, cut_id)
            cut = _value_of(low)
    return cut, cut_id
