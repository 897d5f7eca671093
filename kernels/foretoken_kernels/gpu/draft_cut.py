# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Top-k, top-p and min-p of drafts' logits as one cut a row: the lowest value that may be drafted.

The filters are the sampler's, but all values equal to the last one kept are kept. Otherwise exact,
without sorting: bisection over integers in the order of float32 values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_keys import NEVER, children_of, finite_flag, order_of, temperature_of
from foretoken_kernels.gpu.draft_tree_state import DraftTrees

# Ids that a row's program processes at a time.
STEP = 8192

_TOP_K = tl.constexpr(state.TOP_K)
_TOP_P = tl.constexpr(state.TOP_P)
_MIN_P = tl.constexpr(state.MIN_P)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)
_LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _values(row_logits, first, temperature, vocab_limit, STEP: tl.constexpr):
    ids = first + tl.arange(0, STEP)
    values = tl.load(row_logits + ids, mask=ids < vocab_limit, other=NEVER).to(tl.float32)
    return tl.div_rn(tl.where(values == values, values, NEVER), tl.zeros([STEP], tl.float32) + temperature)


@triton.jit
def _tally(row_logits, least, largest, temperature, vocab_limit, IS_MASS: tl.constexpr, STEP: tl.constexpr):
    """Count the values above -inf whose order is at least ``least``, or add up their mass."""
    totals = tl.zeros([STEP], tl.float32)
    for first in range(0, vocab_limit, STEP):
        values = _values(row_logits, first, temperature, vocab_limit, STEP)
        counts = (values > NEVER) & (order_of(values).to(tl.int64) >= least)
        if IS_MASS:
            totals += tl.where(counts, tl.exp(tl.where(counts, values - largest, 0.0)), 0.0)
        else:
            totals += tl.where(counts, 1.0, 0.0)
    return tl.sum(totals, axis=0)


@triton.jit
def _bisect(
    row_logits, least, most, wanted, largest, temperature, vocab_limit, IS_MASS: tl.constexpr, STEP: tl.constexpr
):
    """Return the highest order in [least, most] from which on count or mass is at least ``wanted``.

    Returns ``least`` if there is none.
    """
    for _ in range(32):
        middle = (least + most + 1) >> 1
        is_low = _tally(row_logits, middle, largest, temperature, vocab_limit, IS_MASS, STEP) >= wanted
        least = tl.where(is_low, middle, least)
        # Once ``least`` and ``most`` are equal, they stay.
        most = tl.maximum(tl.where(is_low, most, middle - 1), least)
    return least


@triton.jit(do_not_specialize=["fed_stride", "level"])
def _cut_row(
    requests,
    fed_counts,
    fed_stride,
    logits,
    logits_stride,
    out_cuts,
    vocab_limit,
    level,
    IS_ROOT: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0)
    tree = row if IS_ROOT else row // K
    request = requests + tree * _NUM_COLUMNS
    top_k = tl.load(request + _TOP_K)
    top_p = tl.load(request + _TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(request + _MIN_P).to(tl.float32, bitcast=True)
    has_top_k = (top_k > 0) & (top_k < vocab_limit)
    temperature = temperature_of(requests, tree)
    is_drawn = (temperature > 0.0) & (
        children_of(requests, fed_counts, fed_stride, tree, row % K, level, IS_ROOT, K) > 0
    )
    tl.store(out_cuts + row, NEVER)
    if is_drawn & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        row_logits = logits + row.to(tl.int64) * logits_stride
        best = tl.full([STEP], NEVER, tl.float32)
        for first in range(0, vocab_limit, STEP):
            best = tl.maximum(best, _values(row_logits, first, temperature, vocab_limit, STEP))
        largest = tl.max(best, axis=0)
        # A row without a finite maximum has no children anyway.
        if finite_flag(largest) != 0:
            most = order_of(largest).to(tl.int64)
            least = most * 0 - 0x80000000
            if has_top_k:
                wanted = top_k.to(tl.float32)
                least = _bisect(row_logits, least, most, wanted, largest, temperature, vocab_limit, False, STEP)
            if top_p < 1.0:
                mass = _tally(row_logits, least, largest, temperature, vocab_limit, True, STEP)
                wanted = mass * top_p
                least = _bisect(row_logits, least, most, wanted, largest, temperature, vocab_limit, True, STEP)
            order = least.to(tl.int32)
            cut = (order ^ ((order >> 31) & _LOW_BITS)).to(tl.float32, bitcast=True)
            # With fewer values than asked for, the result is the lowest order of all, which is a
            # NaN's.
            cut = tl.where(cut == cut, cut, NEVER)
            if min_p > 0.0:
                cut = tl.maximum(cut, largest + tl.log(min_p))
            tl.store(out_cuts + row, cut)


def find_cuts(trees: DraftTrees, logits: torch.Tensor, level: int, cuts: torch.Tensor, vocab_limit: int) -> None:
    """Write the lowest logit over temperature that each row may draft.

    It is -inf for a row without a filter or without a temperature.

    Args:
        logits, level, vocab_limit: as for gpu.draft_children.offer_children.
        cuts: float32 [rows]; written.
    """
    num_trees = trees.requests.shape[0]
    kernel: Any = _cut_row
    kernel[(num_trees if level == 0 else num_trees * trees.max_branches,)](
        trees.requests,
        trees.fed_counts,
        trees.fed_counts.stride(0),
        logits,
        logits.stride(0),
        cuts,
        vocab_limit,
        level,
        IS_ROOT=level == 0,
        K=trees.max_branches,
        STEP=min(STEP, triton.next_power_of_2(vocab_limit)),
        num_warps=16,
    )
