"""The device tensors of a draft's intake: what the drafter knows of a step's sequences, and what comes of the step.

All are int32. ``seats`` and ``tokens`` bound the sequences of a step and the tokens that it commits for one of them;
the rows of the pass over new tokens are ``seats * tokens``: row ``seat * tokens + j`` is token j of a seat.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# DraftTrees.requests' LENGTH of a seat of which nothing is known: no step goes on from it.
NO_LENGTH = -1


class DraftSeats(NamedTuple):
    """What the drafter knows of the sequences.

    Attributes:
        number: [1]; of the step that comes next.
        max_nodes: [seats]; of a tree, the root counted; 0: the seat's tokens are reported, and nothing else is done.
        requests: [seats, NUM_COLUMNS] of DraftTrees; LENGTH is that of the step before.
        block_tables: [seats, blocks]; -1 where there is no block yet.
    """

    number: torch.Tensor
    max_nodes: torch.Tensor
    requests: torch.Tensor
    block_tables: torch.Tensor


class IntakeRows(NamedTuple):
    """The rows of a pass over new tokens. One without a token writes no entry and sees nothing.

    Attributes:
        token_ids, positions, slot_mapping, context_lens: [seats * tokens].
        logit_rows: [seats]; each seat's last row with a token, or its first row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    logit_rows: torch.Tensor


class TakenStep(NamedTuple):
    """What the host is told of it later.

    Attributes:
        counts: [seats]; 0 also if the step was not the expected one, or the count cannot be.
        lengths: [seats]; as the step said.
        is_written: [seats]; 1: the entries of all new tokens were written.
        tokens: [seats, tokens]; zeros behind the last one.
    """

    counts: torch.Tensor
    lengths: torch.Tensor
    is_written: torch.Tensor
    tokens: torch.Tensor
