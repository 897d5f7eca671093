# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Top-k, top-p and min-p of one row as one cut: a value, and an id among the ids that equal it.

Exact, without sorting: bisection over integers in the order of float32 values finds each cut value.
A few passes over the vocabulary find how far below the best value the cut can be. If not too many
values are above that, they are gathered, and all further passes read only these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken_kernels.gpu.row_logits import row_logits

NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order_of(value):
    """Return int64 in the order of float32 values (-0.0 just below 0.0)."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def _value_of(order):
    """Return the float32 value of an order."""
    return tl.where(order < 0, order ^ _MAGNITUDE, order).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weights_of(values, largest):
    """Return float64 probabilities, unnormalised: 1 for the largest value, 0 for -inf."""
    return tl.where(values > float("-inf"), tl.exp(values.to(tl.float64) - largest.to(tl.float64)), 0.0)


@triton.jit
def _piece(first, num_gathered, at, workspace, TOKENS: tl.constexpr):
    """Return values and ascending ids of one piece.

    A piece of the gathered values, or of the vocabulary if ``num_gathered`` is -1.
    """
    ids = first + tl.arange(0, TOKENS)
    values = tl.full([TOKENS], float("-inf"), tl.float32)
    if num_gathered >= 0:
        inside = ids < num_gathered
        gathered = at.row.to(tl.int64) * TOKENS + ids
        values = tl.load(workspace.gathered_values + gathered, mask=inside, other=float("-inf"))
        ids = tl.load(workspace.gathered_ids + gathered, mask=inside, other=NO_TOKEN)
    else:
        values = row_logits(first, at, TOKENS)
    return values, ids


@triton.jit
def _tally(threshold, largest, num_gathered, at, workspace, MASS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the number (float64) of values above -inf from ``threshold`` on, and their mass.

    The mass is computed only with MASS.
    """
    number = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    for first in range(0, tl.where(num_gathered >= 0, num_gathered, at.sizes.vocab_limit), TOKENS):
        values, _ = _piece(first, num_gathered, at, workspace, TOKENS)
        counted = (values >= threshold) & (values > float("-inf"))
        number += tl.sum(counted.to(tl.int32), axis=0).to(tl.float64)
        if MASS:
            mass += tl.sum(tl.where(counted, _weights_of(values, largest), 0.0), axis=0)
    return number, mass


@triton.jit
def _bisect(low, high, wanted, largest, num_gathered, at, workspace, MASS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the largest order in [low, high] from which on number or mass is at least ``wanted``.

    Returns ``low`` if there is none.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        number, mass = _tally(_value_of(middle), largest, num_gathered, at, workspace, MASS, TOKENS)
        is_enough = number >= wanted
        if MASS:
            is_enough = mass >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit
def _gather(threshold, at, workspace, TOKENS: tl.constexpr):
    """Gather the row's values above -inf from ``threshold`` on and their ids, at most TOKENS."""
    count = tl.full([], 0, tl.int32)
    for first_id in range(0, at.sizes.vocab_limit, TOKENS):
        values = row_logits(first_id, at, TOKENS)
        kept = (values >= threshold) & (values > float("-inf"))
        place = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        out = at.row.to(tl.int64) * TOKENS + place
        tl.store(workspace.gathered_values + out, values, mask=kept & (place < TOKENS))
        tl.store(workspace.gathered_ids + out, first_id + tl.arange(0, TOKENS), mask=kept & (place < TOKENS))
        count += tl.sum(kept.to(tl.int32), axis=0)
    # Threads read what other threads wrote.
    tl.debug_barrier()
    return tl.minimum(count, TOKENS)


@triton.jit
def _nth_equal(value, wanted, num_gathered, at, workspace, TOKENS: tl.constexpr):
    """Return the id of the ``wanted``-th (from 1) token with this value, in id order."""
    found = tl.full([], NO_TOKEN, tl.int32)
    before = wanted * 0
    for first in range(0, tl.where(num_gathered >= 0, num_gathered, at.sizes.vocab_limit), TOKENS):
        values, ids = _piece(first, num_gathered, at, workspace, TOKENS)
        equal = (values == value).to(tl.int32)
        rank = before + tl.cumsum(equal, axis=0)
        found = tl.minimum(found, tl.min(tl.where((equal > 0) & (rank == wanted), ids, NO_TOKEN), axis=0))
        before += tl.sum(equal, axis=0)
    return found


@triton.jit
def _top_cut(largest, top_k, top_p, at, workspace, TOKENS: tl.constexpr):
    """Return cut value and cut id of top-k (0: off), then top-p (1: off); at least one is on."""
    # How far below the largest value the first cut can be. Top-k decides if it is on; top-p then
    # cuts what top-k kept.
    all_values = tl.full([], -1, tl.int32)
    never = tl.full([], float("-inf"), tl.float32)
    wanted = top_k.to(tl.float64)
    if top_k == 0:
        _, total = _tally(never, largest, all_values, at, workspace, True, TOKENS)
        wanted = top_p * total
    gap = tl.full([], 1.0, tl.float32)
    high = _order_of(largest)
    threshold = largest
    number = tl.full([], 0.0, tl.float64)
    is_enough = wanted <= 0.0
    while (is_enough == 0) & (threshold > float("-inf")):
        gap = gap * 1.5
        threshold = tl.where(gap < 1000.0, largest - gap, never)
        mass = number * 0.0
        if top_k == 0:
            number, mass = _tally(threshold, largest, all_values, at, workspace, True, TOKENS)
            is_enough = mass >= wanted
        else:
            number, mass = _tally(threshold, largest, all_values, at, workspace, False, TOKENS)
            is_enough = number >= wanted
        high = tl.where(is_enough, high, _order_of(threshold))
    num_gathered = all_values
    if number <= TOKENS:
        num_gathered = _gather(threshold, at, workspace, TOKENS)

    order = _order_of(threshold)
    if top_k > 0:
        order = _bisect(order, high, wanted, largest, num_gathered, at, workspace, False, TOKENS)
        high = _order_of(largest)
    cut = _value_of(order)
    cut_id = tl.full([], NO_TOKEN, tl.int32)
    if top_p < 1.0:
        if top_k > 0:
            _, total = _tally(cut, largest, num_gathered, at, workspace, True, TOKENS)
            wanted = top_p * total
        order = _bisect(order, high, wanted, largest, num_gathered, at, workspace, True, TOKENS)
        cut = _value_of(order)
        # Of the values equal to the cut, keep only as many as the mass needs.
        _, above = _tally(_value_of(order + 1), largest, num_gathered, at, workspace, True, TOKENS)
        weight = _weights_of(cut, largest)
        if weight > 0.0:
            needed = tl.maximum(tl.ceil((wanted - above) / weight), 1.0)
            needed = tl.where((needed > 1.0) & (above + (needed - 1.0) * weight >= wanted), needed - 1.0, needed)
            needed = tl.where(above + needed * weight < wanted, needed + 1.0, needed)
            cut_id = _nth_equal(cut, needed.to(tl.int32), num_gathered, at, workspace, TOKENS)
    return cut, cut_id


@triton.jit
def row_cut(at, workspace, TOKENS: tl.constexpr):
    """Return cut value and cut id of a LogitsRow.

    Kept tokens are above the value, or equal it with an id up to the cut id.

    Top-k first, then top-p over what it kept, then min-p over what that kept, as in
    reference_sampling.row_cut.
    """
    largest = tl.full([], float("-inf"), tl.float32)
    for first_id in range(0, at.sizes.vocab_limit, TOKENS):
        values = row_logits(first_id, at, TOKENS)
        largest = tl.maximum(largest, tl.max(values, axis=0))
    cut = tl.full([], float("-inf"), tl.float32)
    cut_id = tl.full([], NO_TOKEN, tl.int32)
    # A row with +inf has no token, whatever is cut.
    if (largest > float("-inf")) & (largest < float("inf")):
        top_k = tl.load(at.state.top_k + at.batch_slot)
        top_k = tl.where((top_k > 0) & (top_k < at.sizes.vocab_limit), top_k, 0)
        top_p = tl.load(at.state.top_p + at.batch_slot)
        if (top_k > 0) | (top_p < 1.0):
            cut, cut_id = _top_cut(largest, top_k, top_p, at, workspace, TOKENS)
        min_p = tl.load(at.state.min_p + at.batch_slot)
        if min_p > 0.0:
            low = _order_of(cut)
            high = _order_of(largest)
            # Find the smallest order whose weight is enough; the largest value's weight is 1.
            while low < high:
                middle = low + (high - low) // 2
                is_enough = _weights_of(_value_of(middle), largest) >= min_p
                high = tl.where(is_enough, middle, high)
                low = tl.where(is_enough, low, middle + 1)
            # If min-p does not move the cut, its id stays.
            cut_id = tl.where(_value_of(low) > cut, NO_TOKEN, cut_id)
            cut = _value_of(low)
    return cut, cut_id
