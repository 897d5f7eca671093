# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Divide the rows of an overlapped step among its sequences.

The best drafted nodes of the batch get them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.overlap_state import (
    FAIRNESS,
    MOST_FAIRNESS,
    RATE_STEPS,
    RATE_TRUST,
    SCORE_BITS,
    SCORE_STEPS,
    BatchState,
    DraftedTrees,
)

_FAIRNESS, _MOST_FAIRNESS = tl.constexpr(FAIRNESS), tl.constexpr(MOST_FAIRNESS)
_RATE_STEPS, _RATE_TRUST = tl.constexpr(RATE_STEPS), tl.constexpr(RATE_TRUST)


@triton.jit(do_not_specialize=["num_batch_rows", "num_rows"])
def _share_rows(
    batch,
    drafted,
    found,
    scores,
    widths,
    row_starts,
    walk_starts,
    num_batch_rows,
    num_rows,
    stride,
    BATCH_ROWS: tl.constexpr,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
):
    worst: tl.constexpr = (1 << BITS) - 1
    batch_row = tl.arange(0, BATCH_ROWS)
    node = tl.arange(0, NODES)
    is_batch_row = batch_row < num_batch_rows
    width = tl.maximum(tl.load(widths + batch_row, mask=is_batch_row, other=0), 0)
    step = tl.load(batch.step)
    num_found = tl.load(found.num_nodes + batch_row, mask=is_batch_row, other=0)
    is_found = (tl.load(found.stamp) == step) & (num_found > 1)
    joined = tl.load(batch.joined + batch_row, mask=is_batch_row, other=0)
    is_drafted = (tl.load(drafted.stamp) == step) & (step > joined)
    num_drafted = tl.load(drafted.num_nodes + batch_row, mask=is_batch_row, other=0)
    count = tl.where(is_found, num_found, tl.where(is_drafted, num_drafted, 1))
    num_left = tl.load(batch.num_left + batch_row, mask=is_batch_row, other=0)
    count = tl.minimum(count, num_left)

    # How far ahead of the others each sequence is, as the logarithm of its rate over theirs.
    num_steps = tl.minimum(tl.maximum(step - joined, 0), _RATE_STEPS)
    num_steps = tl.where((width > 0) & (num_left > 0), num_steps, 0).to(tl.float32)
    rate = tl.load(batch.rates + batch_row, mask=is_batch_row, other=0.0)
    mean = tl.sum(rate * num_steps, axis=0) / tl.maximum(tl.sum(num_steps, axis=0), 1.0)
    mean = tl.maximum(mean, 1.0)
    own = (rate * num_steps + _RATE_TRUST * mean) / (num_steps + _RATE_TRUST)
    ahead = tl.minimum(tl.maximum(_FAIRNESS * tl.log(own / mean), -_MOST_FAIRNESS), _MOST_FAIRNESS)

    is_place = (node > 0)[None, :] & (node[None, :] < width[:, None])
    is_node = is_place & (node[None, :] < count[:, None])
    has_score = is_node & (node < stride)[None, :] & (is_found == 0)[:, None]
    score = tl.load(scores + batch_row.to(tl.int64)[:, None] * stride + node[None, :], mask=has_score, other=0.0)
    # Scores are not trusted: NaN is no number above a bound.
    is_good = score * STEPS > -(worst - 1)
    behind = -tl.minimum(score, 0.0) + (ahead + _MOST_FAIRNESS)[:, None]
    key = tl.where(is_good, tl.minimum((behind * STEPS).to(tl.int32), worst - 1), worst - 1)
    key = tl.where(is_node, tl.where(has_score, key, 0), worst)

    quota = tl.minimum(num_rows, tl.sum(width, axis=0)) - tl.sum((width > 0).to(tl.int32), axis=0)
    # The largest key that has at most `quota` places before it.
    bound = tl.sum(width, axis=0) * 0
    for bit in tl.static_range(BITS):
        higher = bound | (1 << (BITS - 1 - bit))
        num_before = tl.sum(tl.sum((is_place & (key < higher)).to(tl.int32), axis=1), axis=0)
        bound = tl.where(num_before <= quota, higher, bound)
    is_sure = (is_place & (key < bound)).to(tl.int32)
    is_even = (is_place & (key == bound)).to(tl.int32)
    # Of equal ones the first: lower batch rows, and in a tree lower nodes.
    left = quota - tl.sum(tl.sum(is_sure, axis=1), axis=0)
    num_even = tl.sum(is_even, axis=1)
    rank = (tl.cumsum(num_even, axis=0) - num_even)[:, None] + tl.cumsum(is_even, axis=1) - is_even
    taken = is_sure + is_even * (rank < left).to(tl.int32)
    ends = tl.cumsum((width > 0).to(tl.int32) + tl.sum(taken, axis=1), axis=0)
    for_first = tl.arange(0, 1)
    tl.store(row_starts + for_first, for_first)
    tl.store(walk_starts + for_first, for_first)
    tl.store(row_starts + 1 + batch_row, ends, mask=is_batch_row)
    tl.store(walk_starts + 1 + batch_row, ends, mask=is_batch_row)


def share_rows(
    batch: BatchState,
    drafted: DraftedTrees,
    found: DraftedTrees,
    scores: torch.Tensor,
    widths: torch.Tensor,
    row_starts: torch.Tensor,
    walk_starts: torch.Tensor,
    *,
    num_rows: int,
    max_width: int,
) -> None:
    """Write ``row_starts`` and its copy; reference_overlap.share_rows_reference defines it.

    Each batch row with a width gets a row for its root. The other rows go to the nodes with the
    best scores of the whole batch; a sequence that was slower than the others so far counts more.
    The nodes of a tree get their rows in order, so trees must be chains whose scores fall.

    Args:
        drafted: the trees of the drafter on this device.
        found: trees from the host; their nodes come before all drafted ones.
        scores: float32 [batch_rows, nodes] of the drafted trees; not trusted.
        widths: int32 [batch_rows]; most rows of each sequence; 0: the batch row is empty.
        row_starts, walk_starts: int32 [batch_rows + 1].
        num_rows: rows to divide, at least one for each batch row with a width.
        max_width: no width is larger.
    """
    num_batch_rows = len(widths)
    _share_rows[(1,)](
        batch,
        drafted,
        found,
        scores,
        widths,
        row_starts,
        walk_starts,
        num_batch_rows,
        num_rows,
        scores.shape[1],
        BATCH_ROWS=max(triton.next_power_of_2(num_batch_rows), 2),
        NODES=max(triton.next_power_of_2(max_width), 2),
        STEPS=SCORE_STEPS,
        BITS=SCORE_BITS,
        num_warps=8,
    )
