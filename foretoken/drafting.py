"""The contract between a verifier and a drafter: one request a step for the whole batch, one batch of trees back.

Neither side sees transports here (foretoken/arena.py, drafter.proto): the same two values pass through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.tree import DraftTree, Int32


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter learns of the target at attach. ``max_nodes`` counts the root."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_slots: int
    max_nodes: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One step's request. All arrays have one entry a row, in the order of the batch, unless said otherwise.

    A row is told exactly once of each committed token of its sequence, prompt included, in order: ``lengths[r]``
    counts the tokens after this request's ``new_tokens``. If the drafter has not seen the tokens before those (it
    attached late, or a request was lost), it notices by the length and drafts over what it has from now on.
    Tokens of a row whose ``max_nodes`` is 1 are to be learnt, not drafted for. A request has at most two rows a slot:
    the last tokens of a sequence that ended ride beside the slot's new owner. A transport may split a request with many
    new tokens; its parts share the step id.

    Attributes:
        epoch: the verifier's; a reply that carries another is dropped.
        step_id: grows by at least 1 from request to request; stamped on the reply.
        slots: int32; the sequence's slot, stable while it runs.
        generations: int32; how often the slot was given out. A new value means a new sequence: forget the old one.
        lengths: int32; committed tokens including ``new_tokens``; the last one is the root.
        prompt_lengths: int32; the first so many committed tokens are the prompt.
        max_nodes: int32; nodes wanted at most, root included; 1 means none.
        new_token_starts: int32 [rows + 1]; row ``r`` owns ``new_tokens[starts[r]:starts[r + 1]]``.
        new_tokens: int32 [sum of new tokens].
        salts: uint64; digest of the tenant: nothing learnt under one salt is drafted under another.
        seeds: uint64; keys of the noise (foretoken.sampling).
        choice_indices: int32.
        temperatures: float32; 0 is greedy.
    """

    epoch: int
    step_id: int
    slots: Int32
    generations: Int32
    lengths: Int32
    prompt_lengths: Int32
    max_nodes: Int32
    new_token_starts: Int32
    new_tokens: Int32
    salts: NDArray[np.uint64]
    seeds: NDArray[np.uint64]
    choice_indices: Int32
    temperatures: NDArray[np.float32]

    @property
    def num_rows(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """The reply: one tree a row, ragged. A row of one node is a row without a draft.

    Attributes:
        node_starts: int32 [rows + 1].
        tokens: int32 [total nodes]; each row's first is its root.
        parents: int32 [total nodes]; indices within the row.
    """

    epoch: int
    step_id: int
    node_starts: Int32
    tokens: Int32
    parents: Int32

    @property
    def num_rows(self) -> int:
        return len(self.node_starts) - 1

    def tree(self, row: int) -> DraftTree:
        """The tree of one row, as views of the batch."""
        low, high = int(self.node_starts[row]), int(self.node_starts[row + 1])
        return DraftTree(self.tokens[low:high], self.parents[low:high])


class Drafter(Protocol):
    """Proposes trees. A new kind of drafter implements this and touches no other file.

    Calls come from one thread. An exception ends the attachment, never a request.
    """

    @property
    def algorithm(self) -> str:
        """NGRAM, EAGLE3, ..."""
        ...

    def attach(self, target: TargetInfo) -> None:
        """Forget every sequence and prepare for this target. Raises PreconditionError if it does not fit."""
        ...

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Learn the new tokens, then propose a tree for each row that wants one."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Forget the per-sequence state of slots. What was learnt for others to use stays."""
        ...

    def gauges(self) -> dict[str, float]:
        """Drafter-specific figures for metrics, such as ``ngram_nodes``."""
        ...
