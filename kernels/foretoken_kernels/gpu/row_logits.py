# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A row's logits after all per-token operations: bias, penalties, masks, temperature."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from foretoken_kernels.sampler_state import SampleBatch, SamplerState


class SampleSizes(NamedTuple):
    """Sizes that are the same in each step; a kernel is compiled again for other ones.

    The numbers of rows and sequences are not among them.
    """

    max_batch_slots: int
    vocab_size: int
    vocab_limit: int
    max_bias: int
    max_stops: int
    row_stride: int
    mask_words: int


def sample_sizes(batch: SampleBatch, state: SamplerState) -> SampleSizes:
    """Return the sizes of a batch and a state."""
    return SampleSizes(
        max_batch_slots=state.counts.shape[0],
        vocab_size=state.counts.shape[1],
        vocab_limit=min(batch.vocab_limit, state.counts.shape[1]),
        max_bias=state.bias_ids.shape[1],
        max_stops=state.stop_ids.shape[1],
        row_stride=batch.logits.stride(0),
        mask_words=0 if batch.mask_bits is None else batch.mask_bits.stride(0),
    )


@triton.jit
def batch_slot_of(batch, sizes, seq):
    """Return the sequence's batch slot, int64."""
    return tl.minimum(tl.maximum(tl.load(batch.batch_slots + seq), 0), sizes.max_batch_slots - 1).to(tl.int64)


@triton.jit
def parent_of(batch, start, node):
    """Return a node's parent in the tree whose root is row ``start``; always less than ``node``.

    ``node`` must not be the root.
    """
    return tl.minimum(tl.maximum(tl.load(batch.parents + start + node), 0), node - 1)


@triton.jit
def is_penalized(state, batch_slot):
    """Return whether the batch slot's penalties change anything."""
    repetition = tl.load(state.repetition + batch_slot)
    return (
        (repetition != 1.0)
        | (tl.load(state.frequency + batch_slot) != 0.0)
        | (tl.load(state.presence + batch_slot) != 0.0)
    )


@triton.jit
def raw_logits(first_id, batch, sizes, row, limit, TOKENS: tl.constexpr):
    """Return [TOKENS] raw logits from ``first_id`` on, -inf from ``limit`` on."""
    ids = first_id + tl.arange(0, TOKENS)
    logits = batch.logits + row.to(tl.int64) * sizes.row_stride
    return tl.load(logits + ids, mask=ids < limit, other=float("-inf"))


class LogitsRow(NamedTuple):
    """One row of a batch, as kernels pass it on.

    Attributes:
        row, start: the node's row and its root's row.
        masks_stops: whether too few tokens are out for a stop token.
    """

    batch: Any
    state: Any
    sizes: Any
    row: Any
    start: Any
    batch_slot: Any
    masks_stops: Any


@triton.jit
def row_logits(first_id, at, TOKENS: tl.constexpr):
    """Return a LogitsRow's processed logits from ``first_id`` on, float32 [TOKENS].

    They are -inf from ``vocab_limit`` on.

    They are divided by the temperature if it is above 0.
    """
    raw = raw_logits(first_id, at.batch, at.sizes, at.row, at.sizes.vocab_limit, TOKENS)
    return processed_logits(
        raw, first_id, at.batch, at.state, at.sizes, at.start, at.row - at.start, at.batch_slot, at.masks_stops, TOKENS
    )


@triton.jit
def processed_logits(raw, first_id, batch, state, sizes, start, node, batch_slot, masks_stops, TOKENS: tl.constexpr):
    """Process raw logits of a node, in the tree with root row ``start``, as row_logits does."""
    ids = first_id + tl.arange(0, TOKENS)
    inside = ids < sizes.vocab_limit
    values = raw.to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))

    num_bias = tl.minimum(tl.load(state.num_bias + batch_slot), sizes.max_bias)
    for index in range(num_bias):
        biased = tl.load(state.bias_ids + batch_slot * sizes.max_bias + index)
        if (biased >= first_id) & (biased < first_id + TOKENS):
            bias = tl.load(state.bias_values + batch_slot * sizes.max_bias + index)
            values = tl.where(ids == biased, values + bias, values)

    if is_penalized(state, batch_slot):
        counts = tl.load(state.counts + batch_slot * sizes.vocab_size + ids, mask=inside, other=0)
        seen = tl.load(state.seen + batch_slot * sizes.vocab_size + ids, mask=inside, other=0).to(tl.int32)
        # The node's own token is on its path; the root's token is already in prompt or output.
        ancestor = node
        while ancestor > 0:
            counts += (ids == tl.load(batch.tokens + start + ancestor)).to(tl.int32)
            ancestor = parent_of(batch, start, ancestor)
        repetition = tl.load(state.repetition + batch_slot)
        repeated = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where((seen != 0) | (counts > 0), repeated, values)
        frequency = tl.load(state.frequency + batch_slot)
        penalized = (values - frequency * counts.to(tl.float32)) - tl.load(state.presence + batch_slot)
        values = tl.where(counts > 0, penalized, values)

    if masks_stops:
        num_stops = tl.minimum(tl.load(state.num_stops + batch_slot), sizes.max_stops)
        for index in range(num_stops):
            stop = tl.load(state.stop_ids + batch_slot * sizes.max_stops + index)
            values = tl.where(ids == stop, float("-inf"), values)

    if batch.mask_rows is not None:
        mask_row = tl.load(batch.mask_rows + start + node)
        if mask_row >= 0:
            words = batch.mask_bits + mask_row.to(tl.int64) * sizes.mask_words
            word = tl.load(words + ids // 32, mask=inside, other=0)
            values = tl.where((word >> (ids % 32)) & 1 != 0, values, float("-inf"))

    temperature = tl.load(state.temperature + batch_slot)
    if temperature > 0.0:
        values = tl.div_rn(values, temperature)
    # Even if a bias or penalty was garbage: a NaN cannot be sampled.
    return tl.where(inside & (values == values), values, float("-inf"))
