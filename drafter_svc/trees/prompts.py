"""Learn prompts whose hidden states are in device memory, and plan their passes.

The passes write the prompts' KV entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from drafter_svc.trees.rows import DraftRows, Extension, SentRow, sent_rows
from foretoken.drafting import DraftRequest, TargetInfo
from foretoken.models.batch import ForwardBatch
from foretoken.tree import Int32


class PromptPass(NamedTuple):
    """One pass over prompt rows, without logits.

    Attributes:
        batch: its rows.
        first_hidden: the first row's hidden state, by its row in device memory; the other rows'
            hidden states follow it.
    """

    batch: ForwardBatch
    first_hidden: int


class PromptPasses(NamedTuple):
    """The passes over the prompt rows of one request.

    ``extensions``: the KV entries that they write; these count as written.
    """

    extensions: list[Extension]
    passes: list[PromptPass]


class _Piece(NamedTuple):
    """KV slots [start, stop) of an extension."""

    extension: Extension
    start: int
    stop: int

    @property
    def first_hidden(self) -> int:
        return self.extension.first_hidden + self.start - self.extension.start

    @property
    def last_hidden(self) -> int:
        return self.first_hidden + self.stop - self.start


class PromptRows:
    """Learns the prompt rows of requests.

    Args:
        pass_rows: rows of one pass at most.
    """

    def __init__(self, rows: DraftRows, target: TargetInfo, pass_rows: int) -> None:
        self._rows, self._target, self._pass_rows = rows, target, pass_rows

    def learn(self, request: DraftRequest) -> PromptPasses:
        """Learn all prompt rows of a request, whose rows from ``num_batch_rows`` on they are."""
        extensions: list[Extension] = []
        for sent in _prompt_rows(request):
            sequence = self._rows.learn(sent)
            extension = sequence and self._rows.extend(sent, sequence, self._target.max_model_len)
            if extension:
                extensions.append(extension)
        return PromptPasses(extensions, [self._plan(pieces) for pieces in self._pieces(extensions)])

    def _pieces(self, extensions: list[Extension]) -> Iterator[list[_Piece]]:
        """Yield the pieces of each pass.

        The hidden states of a pass are consecutive. A pass writes no block that an earlier row of
        it holds: KV entries are written in no order, and a block may have changed its owner.
        """
        pieces: list[_Piece] = []
        used, size = 0, self._target.block_size
        held: set[int] = set()
        for extension in extensions:
            start, table = extension.start, extension.sequence.table
            num_blocks = self._rows.num_blocks(extension.stop)
            written = table[start // size : num_blocks].tolist()
            follows = pieces[-1].last_hidden if pieces else 0
            is_apart = self._rows.needs_hidden and follows != extension.first_hidden
            if pieces and (is_apart or not held.isdisjoint(written)):
                yield pieces
                pieces, used, held = [], 0, set()
            while start < extension.stop:
                stop = min(extension.stop, start + self._pass_rows - used)
                pieces.append(_Piece(extension, start, stop))
                used += stop - start
                start = stop
                if used == self._pass_rows:
                    yield pieces
                    pieces, used, held = [], 0, set()
            if pieces and len(extensions) > 1:
                held.update(table[:num_blocks].tolist())
        if pieces:
            yield pieces

    def _plan(self, pieces: list[_Piece]) -> PromptPass:
        size = self._target.block_size
        counts = [stop - start for _, start, stop in pieces]
        total = sum(counts)
        tables = np.zeros((len(pieces), max(self._rows.num_blocks(piece.stop) for piece in pieces)), np.int32)
        positions = np.empty(total, np.int32)
        low = 0
        for seq, (extension, start, stop) in enumerate(pieces):
            num_blocks = self._rows.num_blocks(stop)
            tables[seq, :num_blocks] = extension.sequence.table[:num_blocks]
            positions[low : low + stop - start] = np.arange(start, stop, dtype=np.int32)
            low += stop - start
        seqs: Int32 = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
        batch = ForwardBatch(
            token_ids=np.concatenate([piece.extension.sequence.tokens[piece.start : piece.stop] for piece in pieces]),
            positions=positions,
            kv_slots=tables[seqs, positions // size] * size + positions % size,
            row_seqs=seqs,
            context_lens=positions + 1,
            masks=np.zeros((total, 1), np.uint64),
            tree_starts=np.array([piece.stop for piece in pieces], np.int32),
            block_tables=tables,
            logit_rows=np.empty(0, np.int32),
            context_starts=np.array([piece.extension.sequence.valid_start for piece in pieces], np.int32),
        )
        return PromptPass(batch, pieces[0].first_hidden)


def _prompt_rows(request: DraftRequest) -> list[SentRow]:
    """Return a request's prompt rows, with the places of their hidden states in device memory."""
    step = request.device_step
    assert step is not None
    counts = request.device_hidden[step.num_batch_rows :].tolist()
    first, rows = step.prompt_start, []
    for sent, count in zip(sent_rows(request, step.num_batch_rows), counts, strict=True):
        rows.append(sent._replace(max_nodes=1, first_hidden=first, num_hidden=count))
        first += count
    return rows
