"""Tensors of the device sampler and the walk: rules of requests, rows of a step, result of a step.

All of them live on the device and are allocated once, so that a step can be captured as a graph.
reference_sampling.py defines the operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# WalkTensors.finish
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_BROKEN, FINISH_NOT_ALLOWED = 0, 1, 2, 3, 4
# Returned instead of a token for a row whose logits are broken: one is NaN or +inf, or none may be
# sampled.
NO_SAMPLE = -2
# Returned for a row whose logits are sound, but whose mask leaves no token with one above -inf.
NOT_ALLOWED = -3
# SampleBatch.mask_rows of a row without a mask, and of a node that no walk may enter. A sequence
# whose root is closed has ended.
NO_MASK, CLOSED = -1, -2


class SamplerState(NamedTuple):
    """The sampling rules of the request in each batch slot, and the token counts for penalties.

    ``batch_slots`` is the number of batch slots.

    Attributes:
        temperature: float32 [batch_slots]; 0 is greedy.
        top_k: int32 [batch_slots]; 0 is off.
        top_p: float64 [batch_slots]; 1 is off. Not float32, because it is compared with a
            float64 sum.
        min_p: float64 [batch_slots]; 0 is off.
        repetition, frequency, presence: float32 [batch_slots]; 1, 0 and 0 together switch the
            counts off.
        seed_low, seed_high: int64 [batch_slots]; the noise key's words, in [0, 2**32).
        choice: int32 [batch_slots]; the choice index.
        min_tokens: int32 [batch_slots]; stop tokens are masked until so many tokens are out.
        num_bias: int32 [batch_slots].
        bias_ids, bias_values: int32, float32 [batch_slots, max_bias]; distinct ids; only the first
            ``num_bias`` count.
        num_stops: int32 [batch_slots].
        stop_ids: int32 [batch_slots, max_stops]; includes the model's stop tokens, unless the
            request ignores them.
        counts: int32 [batch_slots, vocab]; how often a token stands in the output.
        seen: int8 [batch_slots, vocab]; 1 for the tokens of prompt and output.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    choice: torch.Tensor
    min_tokens: torch.Tensor
    num_bias: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    num_stops: torch.Tensor
    stop_ids: torch.Tensor
    counts: torch.Tensor
    seen: torch.Tensor


class SampleBatch(NamedTuple):
    """One step's node rows: a sequence's nodes are contiguous, its root comes first.

    Attributes:
        logits: float32 or bfloat16 [rows, vocab], raw; a row is contiguous.
        row_seqs: int32 [rows]; the row's sequence in this step; -1: skip the row.
        row_starts: int32 [seqs + 1]; a sequence without rows is skipped.
        tokens: int32 [rows]; each node's token; the root's is the last committed one.
        parents: int32 [rows]; node index within the sequence, less than the node's own; the root's
            is -1.
        batch_slots: int32 [seqs]; batch slot: the sequence's row of the SamplerState.
        positions: int32 [seqs]; index in prompt + output of the token that is sampled at the root.
        num_outputs: int32 [seqs]; output tokens before that one.
        max_new: int32 [seqs]; tokens that may still be emitted, at least 1.
        vocab_limit: ids below this may be sampled.
        mask_rows: int32 [rows]; the row of ``mask_bits`` that masks this one, NO_MASK or CLOSED.
            None: no row has a mask.
        mask_bits: int32 [any, words]; bit ``id % 32`` of word ``id // 32`` is set if the token may
            be sampled; there is a word for each id below ``vocab_limit``.
    """

    logits: torch.Tensor
    row_seqs: torch.Tensor
    row_starts: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    batch_slots: torch.Tensor
    positions: torch.Tensor
    num_outputs: torch.Tensor
    max_new: torch.Tensor
    vocab_limit: int
    mask_rows: torch.Tensor | None = None
    mask_bits: torch.Tensor | None = None


class WalkTensors(NamedTuple):
    """What a step commits, one row a sequence. Elements beyond the counts are left as they were.

    Attributes:
        num_walked: int32 [seqs]; tokens sampled during the walk, before trimming.
        num_tokens: int32 [seqs]; how many of them, from the first on, are emitted: neither a stop
            token nor past ``max_new``.
        tokens: int32 [seqs, depth]; all ``num_walked`` tokens; after a stop the last one is the
            stop token.
        nodes: int32 [seqs, depth]; the node whose row gave the token.
        num_matched: int32 [seqs]; tree nodes that hold the sampled tokens, before trimming.
        num_accepted: int32 [seqs]; how many of them, from the first on, are committed.
        accepted: int32 [seqs, depth]; all ``num_matched`` nodes.
        finish: int32 [seqs]; a FINISH. BROKEN, NOT_ALLOWED: a row on the path gave NO_SAMPLE or
            NOT_ALLOWED, which is not among the tokens.
    """

    num_walked: torch.Tensor
    num_tokens: torch.Tensor
    tokens: torch.Tensor
    nodes: torch.Tensor
    num_matched: torch.Tensor
    num_accepted: torch.Tensor
    accepted: torch.Tensor
    finish: torch.Tensor


def new_sampler_state(
    max_batch_slots: int, vocab_size: int, max_bias: int, max_stops: int, device: torch.device | str
) -> SamplerState:
    """Return batch slots with temperature 1, no other rule, and no token seen."""

    def full(value: float, dtype: torch.dtype, *width: int) -> torch.Tensor:
        return torch.full((max_batch_slots, *width), value, dtype=dtype, device=device)

    return SamplerState(
        temperature=full(1, torch.float32),
        top_k=full(0, torch.int32),
        top_p=full(1, torch.float64),
        min_p=full(0, torch.float64),
        repetition=full(1, torch.float32),
        frequency=full(0, torch.float32),
        presence=full(0, torch.float32),
        seed_low=full(0, torch.int64),
        seed_high=full(0, torch.int64),
        choice=full(0, torch.int32),
        min_tokens=full(0, torch.int32),
        num_bias=full(0, torch.int32),
        bias_ids=full(0, torch.int32, max_bias),
        bias_values=full(0, torch.float32, max_bias),
        num_stops=full(0, torch.int32),
        stop_ids=full(0, torch.int32, max_stops),
        counts=full(0, torch.int32, vocab_size),
        seen=full(0, torch.int8, vocab_size),
    )


def reset_batch_slots(
    state: SamplerState,
    batch_slots: torch.Tensor,
    prompt_ids: torch.Tensor,
    prompt_batch_slots: torch.Tensor,
    output_ids: torch.Tensor,
    output_batch_slots: torch.Tensor,
) -> None:
    """Set ``counts`` and ``seen`` of some batch slots from their prompts and outputs.

    Args:
        batch_slots: int64 [n]; batch slots.
        prompt_ids, prompt_batch_slots: int64 [prompt tokens of all]; each token and its batch slot.
        output_ids, output_batch_slots: int64 [output tokens of all]; each token and its batch slot.
    """
    vocab_size = state.counts.shape[1]
    state.counts.index_fill_(0, batch_slots, 0)
    state.seen.index_fill_(0, batch_slots, 0)
    outputs = output_batch_slots * vocab_size + output_ids
    state.counts.view(-1).scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
    state.seen.view(-1).index_fill_(0, outputs, 1)
    state.seen.view(-1).index_fill_(0, prompt_batch_slots * vocab_size + prompt_ids, 1)
