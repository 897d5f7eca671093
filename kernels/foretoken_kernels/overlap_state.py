"""Tensors that an overlapped step keeps on the device: its sequences, their trees, their results.

A sequence keeps its batch row from the step in which it joins to its end. ``batch_rows`` is their
number. reference_overlap.py defines the operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# NO_KV_SLOT: a row that writes no KV entry. NO_NODE: token and parent of a row without a node; no
# sampled token equals it.
NO_KV_SLOT = -1
NO_NODE = -2
# Scores, which are logarithms of chances, are compared in steps of 1/SCORE_STEPS,
# with so many bits: to some -16.
SCORE_STEPS = 256
SCORE_BITS = 12
# Where rows are shared, a sequence's chances are divided by this power of its rate. 2: the sum of
# all sequences' times for a token is least (minimum potential delay; Massoulie and Roberts, 1999).
# The logarithm is bounded.
FAIRNESS = 2.0
MOST_FAIRNESS = 2.0
# A rate is the mean of the latest steps, of so many at most; all rates' mean
# counts for so many steps more.
RATE_STEPS = 64
RATE_TRUST = 8


class BatchState(NamedTuple):
    """The sequences as the last step left them. int32 [batch_rows], except ``step`` and ``rates``.

    Attributes:
        batch_slots: rows of the SamplerState.
        lengths: committed tokens; the last one is the root.
        num_left: tokens that may still be emitted; 0: the sequence has ended, or the batch row is
            empty.
        num_outputs: output tokens.
        last_tokens: the roots.
        joined: the number of the step before the sequence's first: a tree that was drafted after
            that step, or before, was drafted for another sequence.
        rates: float32 [batch_rows]; tokens a step since then, most weight
            on the latest RATE_STEPS steps.
        step: int32 [1]; number of the last step.
    """

    batch_slots: torch.Tensor
    lengths: torch.Tensor
    num_left: torch.Tensor
    num_outputs: torch.Tensor
    last_tokens: torch.Tensor
    joined: torch.Tensor
    rates: torch.Tensor
    step: torch.Tensor


class Joining(NamedTuple):
    """The sequences that join before a step. int32 [batch_rows].

    Attributes:
        joins: 1 for a batch row that is taken now, else 0.
        batch_slots, lengths, num_left, num_outputs, last_tokens, joined: as in BatchState, for
            these sequences.
    """

    joins: torch.Tensor
    batch_slots: torch.Tensor
    lengths: torch.Tensor
    num_left: torch.Tensor
    num_outputs: torch.Tensor
    last_tokens: torch.Tensor
    joined: torch.Tensor


class DraftedTrees(NamedTuple):
    """Trees that a drafter wrote, or that the host sent; their contents are not trusted.

    Attributes:
        stamp: int32 [1]; the trees are complete if it equals the batch's ``step``.
        num_nodes: int32 [batch_rows]; root included.
        tokens, parents: int32 [batch_rows, nodes]; a parent's index is below its child's.
    """

    stamp: torch.Tensor
    num_nodes: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor


class StepRows(NamedTuple):
    """The rows of one step, for the target's pass and for sampler and walk (SampleBatch). int32.

    The rows of a sequence go from ``row_starts[batch_row]`` to the start of the next batch row. A
    row without a node has no KV slot, sequence or context.

    Attributes:
        row_starts: [batch_rows + 1]; read. The host or ``share_rows`` writes it.
        token_ids, positions, kv_slots, context_lens: [rows].
        masks: int64 [rows, words]; bits of the node and its ancestors, without the root.
        tree_starts: [batch_rows]; the root's logical KV slot; node i has the i-th KV slot after it.
        row_seqs: [rows]; the batch row, or -1.
        tokens, parents: [rows]; NO_NODE (-2) where there is no node; no sampled token equals it.
        sample_positions: [batch_rows]; position of the token that is sampled at the root.
        num_outputs: [batch_rows].
        max_new: [batch_rows]; at least 1.
        num_nodes: [batch_rows]; nodes of the tree; 0 in an empty batch row.
    """

    row_starts: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    masks: torch.Tensor
    tree_starts: torch.Tensor
    row_seqs: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    sample_positions: torch.Tensor
    num_outputs: torch.Tensor
    max_new: torch.Tensor
    num_nodes: torch.Tensor


class StepResults(NamedTuple):
    """Results of a step for the drafter that drafts after it.

    Attributes:
        stamp: int32 [1]; the step's number, written after all other fields.
        counts: int32 [batch_rows]; committed tokens.
        lengths, num_left: int32 [batch_rows]; as in BatchState, after the step.
        new_tokens: int32 [batch_rows, tokens]; the first ``counts`` of each.
        hidden: [batch_rows * tokens, width]; row ``batch_row * tokens + j``: the hidden state that
            gave token j.
    """

    stamp: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    num_left: torch.Tensor
    new_tokens: torch.Tensor
    hidden: torch.Tensor


def new_batch_state(num_batch_rows: int, device: torch.device | str) -> BatchState:
    """Return empty batch rows; no step has run."""

    def zeros(name: str) -> torch.Tensor:
        dtype = torch.float32 if name == "rates" else torch.int32
        return torch.zeros(1 if name == "step" else num_batch_rows, dtype=dtype, device=device)

    return BatchState(**{name: zeros(name) for name in BatchState._fields})
