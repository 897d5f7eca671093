"""What one forward pass runs over: a flat, ragged list of token rows over paged sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Prefill chunks, root-only rows and tree nodes alike, in one flat list.

    A row attends to two runs of its own sequence's slots: the first ``context_lens[r]`` logical slots, all of them
    (from ``context_starts`` on), and behind ``tree_starts[row_seqs[r]]`` those nodes whose bit is set in ``masks[r]``
    (its own among them), which count as logical positions ``context_lens[r], context_lens[r] + 1, ...`` in index
    order. A prefill row at position p is ``context_lens = p + 1`` with an empty mask; node i of a tree whose root is
    at position p is ``context_lens = p``, ``tree_starts = p`` and the ancestor mask. "Logical slot" s of a sequence is
    slot ``block_tables[seq, s // block_size] * block_size + s % block_size`` of the cache.

    Attributes:
        token_ids: int32 [rows].
        positions: int32 [rows]; rotary positions.
        slot_mapping: int32 [rows]; cache slot that this row's keys and values are written to.
        row_seqs: int32 [rows]; index into ``block_tables``.
        context_lens: int32 [rows].
        masks: uint64 [rows, words].
        tree_starts: int32 [seqs].
        block_tables: int32 [seqs, max_blocks]; entries past a sequence's blocks are 0 and never read.
        logit_rows: int32 [wanted]; rows whose logits are wanted, ascending.
        context_starts: int32 [seqs]; logical slots before it are never read: a draft model has no entries there. None:
            all zero, as for every target.
    """

    token_ids: Int32
    positions: Int32
    slot_mapping: Int32
    row_seqs: Int32
    context_lens: Int32
    masks: NDArray[np.uint64]
    tree_starts: Int32
    block_tables: Int32
    logit_rows: Int32
    context_starts: Int32 | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def chain_batch(token_ids: Int32, first: int, block_size: int, logit_rows: Int32 | None = None) -> ForwardBatch:
    """Consecutive tokens of one sequence, from position ``first`` on, whose cache is the first blocks there are.

    ``logit_rows``: rows whose logits are wanted; None: all.
    """
    rows = len(token_ids)
    positions = np.arange(first, first + rows, dtype=np.int32)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions.copy(),
        row_seqs=np.zeros(rows, np.int32),
        context_lens=positions + 1,
        masks=np.zeros((rows, 1), np.uint64),
        tree_starts=np.zeros(1, np.int32),
        block_tables=np.arange(-(-(first + rows) // block_size), dtype=np.int32)[None],
        logit_rows=np.arange(rows, dtype=np.int32) if logit_rows is None else logit_rows,
    )


def chains_batch(count: int, length: int, block_size: int, num_blocks: int) -> ForwardBatch:
    """The first ``length`` tokens of each of ``count`` sequences: a decode step's rows. Blocks come again where
    there are too few."""
    per_seq = -(-length // block_size)
    blocks = (np.arange(count * per_seq, dtype=np.int32) % num_blocks).reshape(count, per_seq)
    seqs = np.repeat(np.arange(count, dtype=np.int32), length)
    positions = np.tile(np.arange(length, dtype=np.int32), count)
    rows = count * length
    return ForwardBatch(
        token_ids=np.zeros(rows, np.int32),
        positions=positions,
        slot_mapping=blocks[seqs, positions // block_size] * block_size + positions % block_size,
        row_seqs=seqs,
        context_lens=positions + 1,
        masks=np.zeros((rows, 1), np.uint64),
        tree_starts=np.zeros(count, np.int32),
        block_tables=blocks,
        logit_rows=np.arange(rows, dtype=np.int32),
    )
