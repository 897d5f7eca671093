"""The contract between a verifier and a drafter: one request a step for the whole batch, one batch of trees back.

Neither side sees transports here (foretoken/arena.py, drafter.proto): the same two values pass through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.tree import DraftTree, Int32

if TYPE_CHECKING:
    from foretoken.models.target_weights import TargetWeights

Float32 = NDArray[np.float32]

# One entry a row: column and element type. Columns of eight bytes come first, so that a layout of them is aligned.
ROW_COLUMNS: dict[str, type[Any]] = {
    "salts": np.uint64,
    "seeds": np.uint64,
    "slots": np.int32,
    "generations": np.int32,
    "lengths": np.int32,
    "prompt_lengths": np.int32,
    "max_nodes": np.int32,
    "max_depths": np.int32,
    "max_branches": np.int32,
    "choice_indices": np.int32,
    "top_ks": np.int32,
    "temperatures": np.float32,
    "top_ps": np.float32,
    "min_ps": np.float32,
}
# Ragged columns: values, and the offsets of each row's part.
RAGGED_COLUMNS: dict[str, str] = {
    "new_tokens": "new_token_starts",
    "hidden": "hidden_starts",
    "block_ids": "block_starts",
    "prediction": "prediction_starts",
}


def starts_of(counts: Sequence[int]) -> Int32:
    """The offsets of a ragged column, int32 [rows + 1], from the length of each row's part."""
    return np.cumsum([0, *counts]).astype(np.int32)


# The target's hidden state after its last norm. A number l >= 0 is the state that enters layer l, before any norm; the
# number of layers stands for what leaves the last one.
FINAL_NORM = -1


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter learns of the target at attach. ``max_nodes`` counts the root.

    ``checkpoint`` is the target's folder as the verifier sees it; a drafter on another host may not see it.
    """

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_slots: int
    max_nodes: int
    hidden_size: int = 0
    num_layers: int = 0
    block_size: int = 16
    num_blocks: int = 0
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter wants of its requests, beside tokens.

    Attributes:
        features: hidden states of the target, in the order in which they are concatenated; see FINAL_NORM.
        num_rerun: positions before the first computed one whose features it needs after a prefix hit: 1 for a head
            that goes on from the target's hidden state, D for one of D layers, 0 without features.
        blocks: whether it keeps keys and values under the verifier's block ids.
        weights: whether it uses the target's embedding or output head (``attach`` gets them where they can be shared).
    """

    features: tuple[int, ...] = ()
    num_rerun: int = 0
    blocks: bool = False
    weights: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One step's request. All arrays have one entry a row, in the order of the batch, unless said otherwise.

    A row is told exactly once of each committed token of its sequence, prompt included, in order: ``lengths[r]``
    counts the tokens after this request's ``new_tokens``. If the drafter has not seen the tokens before those (it
    attached late, or a request was lost), it notices by the length and drafts over what it has from now on.
    Tokens of a row whose ``max_nodes`` is 1 are to be learnt, not drafted for. A request has at most two rows a slot:
    the last tokens of a sequence that ended ride beside, and before, the slot's new owner. A transport may split a
    request with many new tokens; its parts share the step id.

    Four columns are ragged: row ``r`` owns ``values[starts[r]:starts[r + 1]]``.

    Attributes:
        epoch: the verifier's; a reply that carries another is dropped.
        step_id: grows by at least 1 from request to request; stamped on the reply.
        slots: int32; the sequence's slot, stable while it runs.
        generations: int32; how often the slot was given out. A new value means a new sequence: forget the old one.
        lengths: int32; committed tokens including ``new_tokens``; the last one is the root.
        prompt_lengths: int32; the first so many committed tokens are the prompt.
        max_nodes: int32; nodes wanted at most, root included; 1 means none.
        max_depths: int32; edges from the root at most.
        max_branches: int32; children of one node at most, the top-k of EAGLE's trees.
        salts: uint64; digest of the tenant: nothing learnt under one salt is drafted under another.
        seeds: uint64; keys of the noise (foretoken.sampling).
        choice_indices: int32.
        temperatures: float32; 0 is greedy.
        top_ks: int32; 0 is off.
        top_ps: float32; 1 is off.
        min_ps: float32; 0 is off.
        new_token_starts, new_tokens: int32 [rows + 1], int32 [sum of new tokens].
        hidden_starts, hidden: int32 [rows + 1], float32 [sum, width]; for each of the row's *last* so many new tokens
            the target's features (DrafterNeeds) at the position before it. A token without is one whose features are
            gone (a prefix hit, a late attachment) or that has none: the first token of a sequence.
        block_starts, block_ids: int32 [rows + 1], int32 [sum]; ids of the cache blocks that hold the positions of the
            row's new tokens, in logical order: the first is block ``(length - new tokens) // block_size`` of the row.
            Empty for drafters that want none.
        prediction_starts, prediction: int32 [rows + 1], int32 [sum]; tokens that the client expects as the output, told
            once a sequence and attachment, before or with its first tokens; later ones are appended.
    """

    epoch: int
    step_id: int
    slots: Int32
    generations: Int32
    lengths: Int32
    prompt_lengths: Int32
    max_nodes: Int32
    max_depths: Int32
    max_branches: Int32
    salts: NDArray[np.uint64]
    seeds: NDArray[np.uint64]
    choice_indices: Int32
    temperatures: Float32
    top_ks: Int32
    top_ps: Float32
    min_ps: Float32
    new_token_starts: Int32
    new_tokens: Int32
    hidden_starts: Int32
    hidden: Float32
    block_starts: Int32
    block_ids: Int32
    prediction_starts: Int32
    prediction: Int32

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
        scores: float32 [total nodes]; the drafter's estimate of the log of the chance that the target's text runs
            through the node, given that it stands at the root: 0 for a root, never above its parent's.
    """

    epoch: int
    step_id: int
    node_starts: Int32
    tokens: Int32
    parents: Int32
    scores: Float32

    @property
    def num_rows(self) -> int:
        return len(self.node_starts) - 1

    def tree(self, row: int) -> DraftTree:
        """The tree of one row, as views of the batch."""
        low, high = int(self.node_starts[row]), int(self.node_starts[row + 1])
        return DraftTree(self.tokens[low:high], self.parents[low:high])

    def row_scores(self, row: int) -> Float32:
        """The scores of one row's nodes, a view."""
        return self.scores[self.node_starts[row] : self.node_starts[row + 1]]


class Drafter(Protocol):
    """Proposes trees. A new kind of drafter implements this and touches no other file.

    Calls come from one thread. An exception ends the attachment, never a request.
    """

    @property
    def algorithm(self) -> str:
        """NGRAM, EAGLE3, ..."""
        ...

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        """What requests for this target must carry. Raises PreconditionError if drafter and target do not fit."""
        ...

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        """Forget every sequence and prepare for this target.

        ``weights``: the target's embedding and head, where they can be shared. Raises PreconditionError if drafter and
        target do not fit.
        """
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
