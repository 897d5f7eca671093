"""The n-gram drafter: drafts what the client predicted, or what followed the same tokens earlier.

It searches the row's own text, its tenant's history and the corpora that the operator added. Owns
the arrays; the loops over them are compiled (trie.py, tree.py). Needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drafter_svc.ngram.candidates import new_scratch
from drafter_svc.ngram.corpora import CorpusStore
from drafter_svc.ngram.sequences import BATCH_SLOT_OF, GENERATION, NUM_COLUMNS, new_sequences
from drafter_svc.ngram.settings import NgramSettings
from drafter_svc.ngram.tree import Drafted, SentRows, draft_rows
from drafter_svc.ngram.trie import NUM_EVICTIONS, NUM_NODES, new_trie
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError

if TYPE_CHECKING:
    from drafter_svc.config import DrafterSettings
    from foretoken.models.target_weights import TargetWeights


def make_drafter(settings: DrafterSettings) -> NgramDrafter:
    """Make the drafter, compiled and attached to a small target: no request waits for it."""
    drafter = NgramDrafter(settings.options["ngram"])
    drafter.attach(TargetInfo(checkpoint_hash="", vocab_size=2, max_model_len=2, max_batch_slots=1, max_nodes=2), None)
    return drafter


class NgramDrafter:
    """A ``foretoken.drafter.Drafter`` that holds corpora.

    A tenant's history and the corpora outlive sequences, and attachments to the same target.
    Memory: 46 bytes a node of ``capacity`` (44 of them are touched as the trie fills); for each
    batch slot 8 bytes a token of its longest sequence and 4 a token of its longest prediction; 8
    bytes a token of the corpora.

    The constructor compiles, once per installation (10 to 20 s), or loads the cached code (0.3 s),
    so that an attachment does not wait. The cache is next to the source files, or per user if they
    are read-only.
    """

    algorithm = "NGRAM"

    def __init__(self, settings: NgramSettings) -> None:
        self._settings = settings
        # A window and the token that follows it.
        self._depth = settings.max_match_window_size + 1
        self._trie = new_trie(settings.capacity)
        # For all tenants. Any thread may change them.
        self.corpora = CorpusStore(settings.external_corpus_max_tokens, settings.max_match_window_size)
        self._target: TargetInfo | None = None
        self._sequences = new_sequences(0, 1, self._depth)
        self._scratch = new_scratch(1, 1, self._depth)
        self._options = self._make_options(1)
        self._num_drafted_rows = 0
        self._num_rows = 0
        self._warm_up()

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        """Return needs of tokens only.

        Raises PreconditionError for a target without tokens, batch slots or nodes.
        """
        if min(target.vocab_size, target.max_model_len, target.max_batch_slots, target.max_nodes) < 1:
            raise PreconditionError("the n-gram drafter needs a target with tokens, a context, batch slots and nodes")
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        """Forget every sequence and, if the target is another one, history and corpora too.

        Raises:
            PreconditionError: the target has no tokens, batch slots or nodes.
        """
        self.needs(target)
        if self._target is not None and self._target.checkpoint_hash != target.checkpoint_hash:
            self._trie = new_trie(self._settings.capacity)
            self.corpora.clear()
        self._target = target
        self._sequences = new_sequences(target.max_batch_slots, target.max_model_len, self._depth)
        self._scratch = new_scratch(target.max_nodes, self._settings.max_bfs_breadth, self._depth)
        self._options = self._make_options(target.vocab_size)

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Learn the new tokens and propose a tree for each row that wants one: one compiled call.

        Does not learn tokens outside the vocabulary, nor n-grams across them.
        """
        rows = request.num_rows
        # In the order of BATCH_SLOT_OF and the names after it. One array, because numba unboxes
        # each argument.
        columns = np.array(
            (
                request.batch_slots,
                request.generations,
                request.lengths,
                request.max_nodes,
                request.salts.view(np.int64),
                request.prompt_lengths,
                request.max_depths,
                request.max_branches,
            ),
            np.int64,
        )
        # Writable copies: an array of another layout, or a read-only one, is another type to numba,
        # which would compile again.
        sent = SentRows(
            np.ascontiguousarray(columns.T),
            np.array(request.new_token_starts, np.int32),
            np.array(request.new_tokens, np.int32),
            np.array(request.prediction_starts, np.int32),
            np.array(request.prediction, np.int32),
        )
        most = rows * len(self._scratch.grown)
        drafted = Drafted(
            np.empty(rows + 1, np.int32), np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.float32)
        )
        self._num_rows += rows
        self._num_drafted_rows += draft_rows(
            self._trie, self.corpora.index, self._sequences, self._scratch, self._options, sent, drafted
        )
        total = int(drafted.node_starts[rows])
        return DraftBatch(
            request.epoch,
            request.step_id,
            drafted.node_starts,
            drafted.tokens[:total],
            drafted.parents[:total],
            drafted.scores[:total],
        )

    def release(self, batch_slots: Sequence[int]) -> None:
        """Forget the text of batch slots; their tenants' history stays."""
        for batch_slot in batch_slots:
            if 0 <= batch_slot < len(self._sequences.state):
                # The next sequence of the batch slot starts anew.
                self._sequences.state[batch_slot, GENERATION] = -1

    def gauges(self) -> dict[str, float]:
        """Return the sizes of trie and corpora, and how many rows were drafted for."""
        counters = self._trie.counters
        return {
            "ngram_nodes": float(counters[NUM_NODES]),
            "ngram_capacity": float(self._settings.capacity),
            "ngram_evictions": float(counters[NUM_EVICTIONS]),
            "ngram_external_tokens": float(self.corpora.num_tokens),
            "ngram_rows": float(self._num_rows),
            "ngram_drafted_rows": float(self._num_drafted_rows),
        }

    def _make_options(self, vocab_size: int) -> NDArray[np.int64]:
        """Return int64 [6], in the order of VOCAB_SIZE and the names after it."""
        return np.array(
            [
                vocab_size,
                self._settings.min_match_window_size,
                self._settings.max_match_window_size,
                self._settings.min_bfs_breadth,
                self._settings.max_bfs_breadth,
                self._settings.order == "frequency",
            ],
            np.int64,
        )

    def _warm_up(self) -> None:
        """Compile the function by calling it once on small arrays; this takes many seconds."""
        starts = np.array([0, 1], np.int32)
        columns = np.ones((1, NUM_COLUMNS), np.int64)
        columns[:, BATCH_SLOT_OF] = 0
        one = np.ones(1, np.int32)
        draft_rows(
            new_trie(64),
            self.corpora.index,
            new_sequences(1, 4, self._depth),
            new_scratch(2, self._settings.max_bfs_breadth, self._depth),
            self._options,
            SentRows(columns, starts, one, starts, one),
            Drafted(np.empty(2, np.int32), np.empty(2, np.int32), np.empty(2, np.int32), np.empty(2, np.float32)),
        )
