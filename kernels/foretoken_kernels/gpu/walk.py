# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Walk draft trees on the device: from each root along the sampled tokens; commit the path."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.row_logits import batch_slot_of, is_penalized, sample_sizes
from foretoken_kernels.sampler_state import (
    CLOSED,
    FINISH_BROKEN,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_ALLOWED,
    FINISH_STOP,
    NO_SAMPLE,
    NOT_ALLOWED,
    SampleBatch,
    SamplerState,
    WalkTensors,
)

_NODES_AT_ONCE = 128
_NONE: tl.constexpr = tl.constexpr(FINISH_NONE)
_STOP: tl.constexpr = tl.constexpr(FINISH_STOP)
_LENGTH: tl.constexpr = tl.constexpr(FINISH_LENGTH)
_BROKEN: tl.constexpr = tl.constexpr(FINISH_BROKEN)
_FORBIDDEN: tl.constexpr = tl.constexpr(FINISH_NOT_ALLOWED)
_NO_SAMPLE: tl.constexpr = tl.constexpr(NO_SAMPLE)
_NOT_ALLOWED: tl.constexpr = tl.constexpr(NOT_ALLOWED)
_CLOSED: tl.constexpr = tl.constexpr(CLOSED)


@triton.jit(do_not_specialize=["num_rows"])
def _walk_kernel(
    batch,
    state,
    result,
    sizes,
    sampled_ptr,
    num_rows,
    max_tokens,
    UPDATE_STATE: tl.constexpr,
    STOPS: tl.constexpr,
    NODES: tl.constexpr,
):
    seq = tl.program_id(0)
    batch_slot = batch_slot_of(batch, sizes, seq)
    start = tl.minimum(tl.maximum(tl.load(batch.row_starts + seq), 0), num_rows)
    end = tl.minimum(tl.maximum(tl.load(batch.row_starts + seq + 1), start), num_rows)
    num_nodes = end - start
    max_new = tl.load(batch.max_new + seq)
    num_stops = tl.minimum(tl.load(state.num_stops + batch_slot), sizes.max_stops)
    stop_indices = tl.arange(0, STOPS)
    stops = tl.load(
        state.stop_ids + batch_slot * sizes.max_stops + stop_indices, mask=stop_indices < num_stops, other=-1
    )
    counts_tokens = is_penalized(state, batch_slot)
    out = seq.to(tl.int64) * max_tokens

    # A child's index is larger than its parent's, so ``node`` grows and the walk ends; num_nodes
    # means no node.
    node = num_nodes * 0
    stopped = num_nodes * 0
    if batch.mask_rows is not None:
        is_closed = tl.load(batch.mask_rows + start, mask=start < end, other=0) == _CLOSED
        node = tl.where(is_closed, num_nodes, node)
        stopped = tl.where(is_closed, 1, stopped)
    walked = num_nodes * 0
    emitted = num_nodes * 0
    matched = num_nodes * 0
    broken = num_nodes * 0
    while (node < num_nodes) & (walked < max_tokens):
        token = tl.load(sampled_ptr + start + node)
        if (token == _NO_SAMPLE) | (token == _NOT_ALLOWED):
            broken = tl.where(token == _NO_SAMPLE, _BROKEN, _FORBIDDEN)
            node = num_nodes
        else:
            tl.store(result.tokens + out + walked, token)
            tl.store(result.nodes + out + walked, node)
            child = num_nodes
            for base in range(0, num_nodes, NODES):
                others = base + tl.arange(0, NODES)
                inside = (others > 0) & (others < num_nodes)
                parents = tl.load(batch.parents + start + others, mask=inside, other=-1)
                parents = tl.minimum(tl.maximum(parents, 0), others - 1)
                held = tl.load(batch.tokens + start + others, mask=inside, other=-1)
                fits = inside & (parents == node) & (held == token)
                if batch.mask_rows is not None:
                    fits &= tl.load(batch.mask_rows + start + others, mask=inside, other=_CLOSED) != _CLOSED
                child = tl.minimum(child, tl.min(tl.where(fits, others, num_nodes), axis=0))
            if child < num_nodes:
                tl.store(result.accepted + out + matched, child)
                matched += 1
            stopped = tl.max(((stop_indices < num_stops) & (stops == token)).to(tl.int32), axis=0)
            if (stopped == 0) & (walked < max_new):
                emitted += 1
                if UPDATE_STATE and counts_tokens & (token >= 0) & (token < sizes.vocab_size):
                    # Atomic, so that the addition happens once and not in every thread, since all
                    # hold the scalar.
                    tl.atomic_add(state.counts + batch_slot * sizes.vocab_size + token, 1)
                    tl.store(state.seen + batch_slot * sizes.vocab_size + token, 1)
            walked += 1
            node = tl.where(stopped == 0, child, num_nodes)

    is_full = (emitted >= max_new) & (walked > 0)
    finish = tl.where(stopped > 0, _STOP, tl.where(broken > 0, broken, _NONE))
    finish = tl.where(is_full, _LENGTH, finish)
    tl.store(result.num_walked + seq, walked)
    tl.store(result.num_tokens + seq, emitted)
    tl.store(result.num_matched + seq, matched)
    tl.store(result.num_accepted + seq, tl.minimum(matched, emitted))
    tl.store(result.finish + seq, finish)


def walk(
    batch: SampleBatch, sampled: torch.Tensor, state: SamplerState, result: WalkTensors, update_state: bool = True
) -> None:
    """Find the tokens that each sequence commits; reference_sampling.walk_reference defines it.

    Args:
        sampled: int32 [rows], from ``sample_rows``.
        result: written, one row for each sequence of ``batch``.
        update_state: whether to add the emitted tokens to ``counts`` and ``seen`` of batch slots
            with penalties.
    """
    num_seqs = batch.batch_slots.shape[0]
    if num_seqs == 0:
        return
    sizes = sample_sizes(batch, state)
    _walk_kernel[(num_seqs,)](
        batch,
        state,
        result,
        sizes,
        sampled,
        batch.tokens.shape[0],
        result.tokens.shape[1],
        UPDATE_STATE=update_state,
        STOPS=triton.next_power_of_2(max(sizes.max_stops, 1)),
        NODES=_NODES_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,
    )
