"""The batch of one forward pass: a flat list of token rows over sequences with paged KV caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Rows of prefill chunks, of plain decode and of draft trees, in one flat list.

    A row attends to two parts of its sequence: to the first ``context_lens[r]`` logical KV slots
    (from ``context_starts`` on), and to the tree nodes whose bits are set in ``masks[r]``, its own
    included. Node i is in logical KV slot ``tree_starts[row_seqs[r]] + i``, and the nodes count as
    logical positions ``context_lens[r], context_lens[r] + 1, ...`` in index order.

    A prefill row at position p has ``context_lens = p + 1`` and an empty mask. Node i of a tree
    whose root is at position p has ``context_lens = p``, ``tree_starts = p`` and the ancestor mask.
    Logical KV slot s of a sequence is KV slot
    ``block_tables[seq, s // block_size] * block_size + s % block_size`` of the cache.

    Attributes:
        token_ids: int32 [rows].
        positions: int32 [rows]; rotary positions.
        kv_slots: int32 [rows]; KV slot that the row's keys and values are written to.
        row_seqs: int32 [rows]; index into ``block_tables``.
        context_lens: int32 [rows].
        masks: uint64 [rows, words].
        tree_starts: int32 [seqs].
        block_tables: int32 [seqs, max_blocks]; elements after a sequence's blocks are 0 and never
            read.
        logit_rows: int32 [wanted]; rows whose logits are wanted, ascending.
        context_starts: int32 [seqs]; logical KV slots before it are never read, because a draft
            model has no KV entries there. None: all zero, as for every target.
    """

    token_ids: Int32
    positions: Int32
    kv_slots: Int32
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
    """Return a batch of consecutive tokens of one sequence, from position ``first`` on.

    It uses the first blocks.

    ``logit_rows``: rows whose logits are wanted; None: all.
    """
    rows = len(token_ids)
    positions = np.arange(first, first + rows, dtype=np.int32)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        kv_slots=positions.copy(),
        row_seqs=np.zeros(rows, np.int32),
        context_lens=positions + 1,
        masks=np.zeros((rows, 1), np.uint64),
        tree_starts=np.zeros(1, np.int32),
        block_tables=np.arange(-(-(first + rows) // block_size), dtype=np.int32)[None],
        logit_rows=np.arange(rows, dtype=np.int32) if logit_rows is None else logit_rows,
    )


def blank_batch(rows: int, seqs: int, blocks: int = 1, block_size: int = 1) -> ForwardBatch:
    """Return a batch that writes no KV entry and wants no logits: it only has a size.

    ``blocks``: of the last row's sequence, all of them block 0. With one
    block, nothing is read either.
    """
    seqs = min(seqs, rows)
    nothing = np.zeros(rows, np.int32)
    context_lens = nothing.copy()
    context_lens[-1] = (blocks - 1) * block_size
    return ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        kv_slots=nothing - 1,
        row_seqs=(np.arange(rows) * seqs // rows).astype(np.int32),
        context_lens=context_lens,
        masks=np.zeros((rows, 1), np.uint64),
        tree_starts=np.zeros(seqs, np.int32),
        block_tables=np.zeros((seqs, blocks), np.int32),
        logit_rows=np.zeros(0, np.int32),
    )


def chains_batch(count: int, length: int, block_size: int, num_blocks: int, first: int = 0) -> ForwardBatch:
    """Return a batch of ``length`` tokens of each of ``count`` sequences.

    The sequences share blocks if there are too few.

    Args:
        first: the position of each sequence's first token; whatever the cache holds comes before.
    """
    per_seq = -(-(first + length) // block_size)
    blocks = (np.arange(count * per_seq, dtype=np.int32) % num_blocks).reshape(count, per_seq)
    seqs = np.repeat(np.arange(count, dtype=np.int32), length)
    positions = np.tile(np.arange(first, first + length, dtype=np.int32), count)
    rows = count * length
    return ForwardBatch(
        token_ids=np.zeros(rows, np.int32),
        positions=positions,
        kv_slots=blocks[seqs, positions // block_size] * block_size + positions % block_size,
        row_seqs=seqs,
        context_lens=positions + 1,
        masks=np.zeros((rows, 1), np.uint64),
        tree_starts=np.zeros(count, np.int32),
        block_tables=blocks,
        logit_rows=np.arange(rows, dtype=np.int32),
    )
