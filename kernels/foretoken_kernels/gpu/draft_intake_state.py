"""Device tensors of a draft's intake: the drafter's state of each sequence, and what a step added.

All are int32. ``batch_rows`` bounds the sequences of a step, ``tokens`` the tokens that it commits
for one sequence. The pass over new tokens has ``batch_rows * tokens`` rows: row
``batch_row * tokens + j`` is token j of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# LENGTH, in DraftTrees.requests, of a batch row whose length is unknown: no step continues from it.
NO_LENGTH = -1


class DraftBatchState(NamedTuple):
    """The drafter's state of each sequence.

    Attributes:
        number: [1]; number of the next step.
        max_nodes: [batch_rows]; nodes of a tree, root included; 0: report the sequence's tokens and
            do nothing else.
        requests: [batch_rows, NUM_COLUMNS] of DraftTrees; LENGTH is the length after the last step.
        block_tables: [batch_rows, blocks]; -1 where there is no block yet.
    """

    number: torch.Tensor
    max_nodes: torch.Tensor
    requests: torch.Tensor
    block_tables: torch.Tensor


class IntakeRows(NamedTuple):
    """Rows of a pass over new tokens.

    A row without a token writes no KV entry and attends to nothing.

    Attributes:
        token_ids, positions, kv_slots, context_lens: [batch_rows * tokens].
        logit_rows: [batch_rows]; each sequence's last row with a token, or its first row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    logit_rows: torch.Tensor


class TakenStep(NamedTuple):
    """What the host reads later.

    Attributes:
        counts: [batch_rows]; new tokens; 0 also if the step was not the expected one or the count
            is impossible.
        lengths: [batch_rows]; as the step reported.
        is_written: [batch_rows]; 1: the KV entries of all new tokens were written.
        tokens: [batch_rows, tokens]; zeros after the last one.
    """

    counts: torch.Tensor
    lengths: torch.Tensor
    is_written: torch.Tensor
    tokens: torch.Tensor
