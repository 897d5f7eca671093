"""The values that a verifier and a drafter exchange.

In each step the verifier sends a drafter one request for the whole batch, and gets one batch of
trees.

Every transport (foretoken/transports, drafter.proto) carries these two values. foretoken.drafter
has the calls that a drafter answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.tree import DraftTree, Int32

Float32 = NDArray[np.float32]

# The columns of a request that carries its tokens. Eight-byte columns come first, which aligns all.
ROW_COLUMNS: dict[str, type[Any]] = {
    "salts": np.uint64,
    "seeds": np.uint64,
    "batch_slots": np.int32,
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
# The fields of a row's record.
ROW_DTYPE = np.dtype([*ROW_COLUMNS.items(), ("device_hidden", np.int32)], align=True)
# Ragged columns in the order of their offsets: name of the values, name of the offsets of each
# row's part.
RAGGED_COLUMNS: dict[str, str] = {
    "new_tokens": "new_token_starts",
    "hidden": "hidden_starts",
    "block_ids": "block_starts",
    "prediction": "prediction_starts",
}


def starts_of(*counts: Iterable[int]) -> Int32:
    """Return the offsets of ragged columns, int32 [columns, rows + 1], from their rows' lengths."""
    return np.array([list(accumulate(column, initial=0)) for column in counts], np.int32)


# The target's hidden state after its last norm. A number l >= 0 is the state that enters layer l,
# before any norm; the number of layers is the state that leaves the last layer.
FINAL_NORM = -1
# Up to so many nodes, numbers are looked at one by one: an array costs more to touch than to use.
FEW_NODES = 24


class TreeLimits(NamedTuple):
    """Limits of a tree besides its nodes: edges from the root, and children of one node."""

    max_depth: int
    max_branches: int


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter learns about the target when it is attached. ``max_nodes`` includes the root.

    ``checkpoint`` is the target's folder as the verifier sees it; a drafter on another host may not
    see it. ``checkpoint_hash`` names the checkpoint's files, whatever device and mode run them.
    ``usual_trees`` are the trees that most requests ask for; a drafter may prepare for them.
    """

    checkpoint_hash: str
    vocab_size: int
    max_model_len: int
    max_batch_slots: int
    max_nodes: int
    hidden_size: int = 0
    num_layers: int = 0
    block_size: int = 16
    num_blocks: int = 0
    checkpoint: str = ""
    usual_trees: tuple[TreeLimits, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter needs in its requests, in addition to tokens.

    Attributes:
        captured_layers: numbers of the target's hidden states, in the order of their concatenation;
            see FINAL_NORM.
        num_rerun: positions before the first computed one whose hidden states it needs after a
            prefix hit: 1 for a head that continues from the target's hidden state, D for one of D
            layers, 0 without hidden states.
        blocks: whether its KV cache uses the verifier's block ids.
        weights: whether it uses the target's embedding or output head; ``attach`` gets them if they
            can be shared.
        device: UUID, as CUDA gives it, of the GPU where its model runs; empty: it has no model, or
            it is on the CPU.
        overlaps: whether it can draft from memory of that GPU (foretoken.overlap_memory).
    """

    captured_layers: tuple[int, ...] = ()
    num_rerun: int = 0
    blocks: bool = False
    weights: bool = False
    device: str = ""
    overlaps: bool = False


def _column(name: str) -> Any:
    """Return a property for a row column, which is a view."""
    return property(lambda request: request.rows[name])


def _offsets(index: int) -> Any:
    return property(lambda request: request.starts[index])


class DeviceStep(NamedTuple):
    """The step whose tokens and hidden states are in device memory.

    The trees go there, too (foretoken.overlap_memory).

    The first ``num_batch_rows`` rows of a request are the batch rows of the device memory, in
    order. An empty one has batch slot -1, generation 0 and length 0. None of them has new tokens.

    The rows after them are prompt rows. They have new tokens and blocks as in a request that
    carries its tokens; the hidden states of their last ``device_hidden`` new tokens are consecutive
    rows of the memory's ``prompt_hidden``, row after row of the request. The drafter learns them
    first, so a sequence may have a prompt row and a batch row in the same request.

    Attributes:
        number: number of the step; grows by one from request to request.
        begins: whether the request names the sequences of all batch rows and the shapes of their
            trees anew. Otherwise both are as in the request before, and there are no prompt
            rows. The ``length`` of a sequence that had a batch row in the request before is a lower
            bound, because the drafter may know more; other lengths are exact. They stay the same
            until the sequences are named anew.
        is_last: whether no request follows. The reply then also has the trees; other replies only
            have roots.
        num_batch_rows: rows that are no prompt rows; 0: the step only computes prompts.
        prompt_start: the first row of ``prompt_hidden`` that belongs to the request.
    """

    number: int
    begins: bool
    is_last: bool
    num_batch_rows: int
    prompt_start: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One step's request.

    All arrays have one element a row, in the order of the batch, unless said otherwise.

    Each committed token of a sequence, prompt included, is sent exactly once and in order;
    ``lengths[r]`` counts the tokens up to and including ``new_tokens``. A drafter that missed
    earlier tokens (it attached late, or a request was lost) notices by the length, and drafts from
    what it has. The drafter learns the tokens of a row whose ``max_nodes`` is 1, but drafts nothing
    for it. A request has at most two rows a batch slot: the last tokens of an ended sequence come
    before the batch slot's new sequence. A transport may split a request with many new tokens; its
    parts share the step id.

    ``rows`` holds the row columns, one record of ROW_DTYPE a row. Four columns are ragged: row
    ``r`` has ``values[starts[r]:starts[r + 1]]``. ``starts``, int32 [4, rows + 1], holds their
    offsets in the order of RAGGED_COLUMNS. So a request of one row, as most are, is only a handful
    of arrays.

    Attributes:
        epoch: the verifier's; a reply with another epoch is dropped.
        step_id: grows by at least 1 from request to request; the reply repeats it.
        batch_slots: int32; the sequence's batch slot, stable while it runs.
        generations: int32; a new value means a new sequence in the batch slot: forget the old one.
        lengths: int32; committed tokens including ``new_tokens``; the last one is the root.
        prompt_lengths: int32; the first so many committed tokens are the prompt.
        max_nodes: int32; nodes of the tree at most, root included; 1: do not draft.
        max_depths: int32; edges from the root at most.
        max_branches: int32; children of one node at most, the top-k of EAGLE's trees.
        salts: uint64; digest of the tenant: text learned under one salt is never drafted under
            another.
        seeds: uint64; keys of the noise (foretoken.sampling).
        choice_indices: int32.
        temperatures: float32; 0 is greedy.
        top_ks: int32; 0 is off.
        top_ps: float32; 1 is off.
        min_ps: float32; 0 is off.
        device_hidden: int32; how many of the last new tokens have a hidden state in device memory;
            0 unless it is a prompt row (DeviceStep).
        new_token_starts, new_tokens: int32 [rows + 1], int32 [sum of new tokens].
        hidden_starts, hidden: int32 [rows + 1], float32 [sum, width]; hidden states of the target
            (DrafterNeeds.captured_layers) for the *last* so many new tokens of the row, each from
            the position before the token. The first token of a sequence has none, and hidden states
            may be lost by a prefix hit or a late attachment.
        block_starts, block_ids: int32 [rows + 1], int32 [sum]; ids of the blocks that hold the
            row's new tokens, in logical order; the first is block
            ``(length - new tokens) // block_size`` of the row. Empty for drafters that need none.
        prediction_starts, prediction: int32 [rows + 1], int32 [sum]; tokens that the client expects
            as the output, sent once a sequence and attachment, before or with its first tokens;
            later ones are appended.
        device_step: None: the request carries its tokens. Otherwise its batch rows only carry
            further blocks, in logical order, enough for all that steps write before the next
            request. They follow the blocks of the requests before; where sequences are named anew,
            the blocks that hold ``lengths`` tokens. The tokens count as sent once the step is done.
    """

    epoch: int
    step_id: int
    rows: NDArray[np.void]
    starts: Int32
    new_tokens: Int32
    hidden: Float32
    block_ids: Int32
    prediction: Int32
    device_step: DeviceStep | None = None

    salts, seeds = _column("salts"), _column("seeds")
    batch_slots, generations = _column("batch_slots"), _column("generations")
    lengths, prompt_lengths = _column("lengths"), _column("prompt_lengths")
    max_nodes, max_depths, max_branches = _column("max_nodes"), _column("max_depths"), _column("max_branches")
    choice_indices, temperatures = _column("choice_indices"), _column("temperatures")
    top_ks, top_ps, min_ps = _column("top_ks"), _column("top_ps"), _column("min_ps")
    device_hidden = _column("device_hidden")
    new_token_starts, hidden_starts, block_starts, prediction_starts = (_offsets(i) for i in range(len(RAGGED_COLUMNS)))

    @staticmethod
    def of_columns(epoch: int, step_id: int, columns: Mapping[str, Any]) -> DraftRequest:
        """Return a request of separate columns.

        It needs all ROW_COLUMNS, and values and offsets of all RAGGED_COLUMNS.

        Raises ValueError if they differ in length, KeyError if one is missing.
        """
        rows = np.zeros(len(columns["batch_slots"]), ROW_DTYPE)
        starts = np.empty((len(RAGGED_COLUMNS), len(rows) + 1), np.int32)
        if any(len(columns[name]) != len(rows) for name in ROW_COLUMNS) or any(
            len(columns[name]) != len(rows) + 1 for name in RAGGED_COLUMNS.values()
        ):
            raise ValueError("the columns and offsets of a draft request differ in length")
        for name in ROW_COLUMNS:
            rows[name] = columns[name]
        for index, name in enumerate(RAGGED_COLUMNS.values()):
            starts[index] = columns[name]
        return DraftRequest(epoch, step_id, rows, starts, *(columns[name] for name in RAGGED_COLUMNS))

    @property
    def num_rows(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """The reply: one tree a row, ragged. A row of one node has no draft.

    Attributes:
        node_starts: int32 [rows + 1].
        tokens: int32 [total nodes]; the first of each row is its root.
        parents: int32 [total nodes]; indices within the row.
        scores: float32 [total nodes]; the drafter's estimate of the log-probability that the
            target's text passes through the node, given the root: 0 for a root, never above its
            parent's.
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

    def are_sound(self, roots: Int32, vocab_size: int) -> NDArray[np.bool_]:
        """Return which trees a verifier may run, bool [rows]: their ids, parents, root and scores.

        Their sizes were checked when the reply came.

        ``roots``: int32 [rows]; the root that each row was to have.
        """
        starts = self.node_starts[:-1]
        if not len(starts):
            return np.zeros(0, np.bool_)
        if len(self.tokens) <= FEW_NODES:
            return np.array([self._is_sound(row, root, vocab_size) for row, root in enumerate(roots.tolist())])
        places = np.arange(len(self.tokens)) - np.repeat(starts, np.diff(self.node_starts))
        is_sound = (self.tokens >= 0) & (self.tokens < vocab_size) & ~np.isnan(self.scores)
        is_sound &= (self.parents >= np.where(places == 0, -1, 0)) & (self.parents < places)
        are_sound: NDArray[np.bool_] = np.logical_and.reduceat(is_sound, starts) & (self.tokens[starts] == roots)
        return are_sound

    def _is_sound(self, row: int, root: int, vocab_size: int) -> bool:
        tree = self.tree(row)
        tokens, parents, scores = tree.tokens.tolist(), tree.parents.tolist(), self.row_scores(row).tolist()
        return (
            tokens[0] == root
            and parents[0] == -1
            and all(0 <= parents[node] < node for node in range(1, len(parents)))
            and all(0 <= token < vocab_size for token in tokens)
            and not any(map(math.isnan, scores))
        )

    def tree(self, row: int) -> DraftTree:
        """Return the tree of one row, as views of the batch."""
        low, high = self.node_starts[row : row + 2].tolist()
        return DraftTree(self.tokens[low:high], self.parents[low:high])

    def row_scores(self, row: int) -> Float32:
        """Return the scores of one row's nodes, a view."""
        return self.scores[self.node_starts[row] : self.node_starts[row + 1]]
