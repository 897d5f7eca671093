# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Force walks to a given length, for benchmarks only.

The host's equivalent is verifier_svc.sampling.simulated_acceptance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.overlap_state import StepRows
from foretoken_kernels.sampler_state import FINISH_BROKEN, FINISH_LENGTH, FINISH_NONE, WalkTensors

_NONE = tl.constexpr(FINISH_NONE)
_LENGTH = tl.constexpr(FINISH_LENGTH)
_BROKEN = tl.constexpr(FINISH_BROKEN)


@triton.jit(do_not_specialize=["max_walked"])
def _force_walk(rows, walk, owed, mean, max_walked, NODES: tl.constexpr):
    batch_row = tl.program_id(0)
    count = tl.minimum(tl.load(rows.num_nodes + batch_row), NODES)
    if (count <= 1) | (tl.load(walk.finish + batch_row) >= _BROKEN):
        return
    start = tl.load(rows.row_starts + batch_row)
    node = tl.arange(0, NODES)
    depth = tl.zeros([NODES], tl.int32)
    current = tl.where(node < count, node, 0)
    while tl.max(current, axis=0) > 0:
        above = current > 0
        depth += above.to(tl.int32)
        up = tl.load(rows.parents + start + current, mask=above, other=0)
        current = tl.minimum(tl.maximum(up, 0), tl.maximum(current - 1, 0))
    deepest = tl.max(depth, axis=0)
    end = tl.min(tl.where(depth == deepest, node, NODES), axis=0)

    total = tl.load(owed + batch_row) + mean
    length = total.to(tl.int32)
    tl.store(owed + batch_row, total - length.to(tl.float32))
    length = tl.maximum(tl.minimum(tl.minimum(length, deepest + 1), max_walked), 1)
    at = batch_row.to(tl.int64) * max_walked
    sampled = tl.load(walk.tokens + at + tl.maximum(tl.load(walk.num_walked + batch_row) - 1, 0))
    tl.debug_barrier()
    while end > 0:
        # ``end`` is the node at depth ``deepest``; both go up to the root.
        if deepest < length:
            tl.store(walk.tokens + at + deepest - 1, tl.load(rows.tokens + start + end))
            tl.store(walk.accepted + at + deepest - 1, end)
            tl.store(walk.nodes + at + deepest, end)
        up = tl.load(rows.parents + start + end)
        end = tl.minimum(tl.maximum(up, 0), end - 1)
        deepest -= 1
    tl.debug_barrier()
    max_new = tl.load(rows.max_new + batch_row)
    emitted = tl.minimum(length, max_new)
    tl.store(walk.nodes + at, 0)
    tl.store(walk.tokens + at + length - 1, sampled)
    tl.store(walk.num_walked + batch_row, length)
    tl.store(walk.num_tokens + batch_row, emitted)
    tl.store(walk.num_matched + batch_row, length - 1)
    tl.store(walk.num_accepted + batch_row, tl.minimum(length - 1, emitted))
    tl.store(walk.finish + batch_row, tl.where(emitted == max_new, _LENGTH, _NONE))


def force_walk(rows: StepRows, walk: WalkTensors, owed: torch.Tensor, mean: float, max_width: int) -> None:
    """Replace the walks of trees, except broken ones.

    reference_overlap.force_walk_reference defines it.

    Args:
        owed: float32 [batch_rows]; the fraction of a token that past steps still owe; kept from
            step to step.
        mean: tokens of one step with a tree, including the target's own token.
        max_width: no sequence has more rows.
    """
    _force_walk[(len(rows.num_nodes),)](
        rows,
        walk,
        owed,
        mean,
        walk.tokens.shape[1],
        NODES=max(triton.next_power_of_2(max_width), 2),
        num_warps=1,
    )
