"""A batch as attention planned on the host takes it.

It has queries by sequence, blocks, and packed masks.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch, Int32
from foretoken.models.device_batch import Runs

# A run of more rows that all see one stretch of KV slots is a prompt's. Such runs have kernels with
# larger tiles, and writing a mask would take longer than computing the rows.
_PROMPT_ROWS = 64


class PackedMasks(NamedTuple):
    """The KV slots that each row of each sequence sees.

    Attributes:
        bits: uint8 [bytes]; bit i % 8 of a sequence's byte i // 8, where i = row * length + logical
            KV slot, is set if the row sees the KV slot.
        starts: int32 [seqs + 1]; first byte of each sequence.
    """

    bits: NDArray[np.uint8]
    starts: Int32


class PlannedRows(NamedTuple):
    """Rows ``first`` up to ``end`` of a batch, one sequence for each run of rows.

    Attributes:
        is_prompt: whether every sequence has many rows and no mask.
        row_starts: int32 [seqs + 1]; first row of each sequence, counted from ``first``.
        block_starts: int32 [seqs + 1]; first element of each sequence in ``blocks``.
        blocks: int32 [block_starts[-1]]; blocks of the KV cache.
        last_block_lens: int32 [seqs]; KV slots that are read of the last block, from 1 to the block
            size.
        lengths: int32 [seqs]; KV slots that are read. This pass or an earlier one has written them.
        masks: None: a sequence's last row sees all its KV slots, and each row before it one less.
    """

    first: int
    end: int
    is_prompt: bool
    row_starts: Int32
    block_starts: Int32
    blocks: Int32
    last_block_lens: Int32
    lengths: Int32
    masks: PackedMasks | None


def planned_rows(batch: ForwardBatch, runs: Runs, block_size: int, most: int) -> list[PlannedRows]:
    """Divide the rows of a batch, in order, into stretches of prompts and of other rows.

    If there were more than ``most`` stretches, all rows become one that is not a prompt's.

    Raises:
        ValueError: the batch has a context that does not begin at the first KV slot.
    """
    if batch.context_starts is not None and batch.context_starts.any():
        raise ValueError("a plan reads every context from its first KV slot on")
    ends, is_stretch = _seen(batch)
    # Whether a row sees one KV slot more than the row before.
    follows = is_stretch.copy()
    follows[1:] &= ends[1:] == ends[:-1] + 1
    follows[runs.starts[:-1]] = is_stretch[runs.starts[:-1]]
    is_causal = np.logical_and.reduceat(follows, runs.starts[:-1])
    is_prompt = is_causal & (np.diff(runs.starts) > _PROMPT_ROWS)
    if 1 + np.count_nonzero(np.diff(is_prompt)) > most:
        is_prompt[:] = False
    planned = []
    for prompts, group in groupby(range(len(runs.seqs)), lambda run: bool(is_prompt[run])):
        members = list(group)
        part = slice(members[0], members[-1] + 1)
        planned.append(
            _planned(batch, runs, part, prompts, ends, has_masks=not is_causal[part].all(), block_size=block_size)
        )
    return planned


def _seen(batch: ForwardBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the end of the KV slots that each row sees.

    Also return whether the row sees all KV slots before that end.
    """
    ends = batch.context_lens.astype(np.int64)
    is_stretch = np.ones(len(ends), np.bool_)
    rows = np.flatnonzero(batch.masks.any(1))
    if len(rows):
        bits = _bits(batch.masks[rows])
        contexts = ends[rows, None]
        kv_slots = batch.tree_starts[batch.row_seqs[rows], None] + np.arange(bits.shape[1])
        ends[rows] = np.where(bits, kv_slots + 1, contexts).max(1)
        is_stretch[rows] = ends[rows] - contexts[:, 0] == bits.sum(1)
    return ends, is_stretch


def _bits(masks: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Unpack [rows, words] to [rows, 64 * words], least significant bits first."""
    little = np.ascontiguousarray(masks, "<u8").view(np.uint8)
    return np.unpackbits(little, axis=1, bitorder="little").astype(np.bool_)


def _planned(
    batch: ForwardBatch,
    runs: Runs,
    part: slice,
    is_prompt: bool,
    ends: NDArray[np.int64],
    *,
    has_masks: bool,
    block_size: int,
) -> PlannedRows:
    """Return the rows of the runs ``part``."""
    first, end = int(runs.starts[part.start]), int(runs.starts[part.stop])
    row_starts = runs.starts[part.start : part.stop + 1] - first
    lengths = np.maximum.reduceat(ends[first:end], row_starts[:-1])
    counts = -(-lengths // block_size)
    blocks = [batch.block_tables[seq, :count] for seq, count in zip(runs.seqs[part], counts, strict=True)]
    return PlannedRows(
        first=first,
        end=end,
        is_prompt=is_prompt,
        row_starts=row_starts.astype(np.int32),
        block_starts=_starts(counts),
        blocks=np.concatenate(blocks),
        last_block_lens=(lengths - (counts - 1) * block_size).astype(np.int32),
        lengths=lengths.astype(np.int32),
        masks=_packed(batch, first, row_starts, lengths) if has_masks else None,
    )


def _packed(batch: ForwardBatch, first: int, row_starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> PackedMasks:
    """Set all bits, then clear the few after the context that all rows share.

    Most bits stay set.
    """
    rows = slice(first, first + int(row_starts[-1]))
    counts = np.diff(row_starts)
    starts = _starts(-(-counts * lengths // 8))
    packed = np.full(starts[-1], 255, np.uint8)
    seq = np.repeat(np.arange(len(counts)), counts)
    contexts = batch.context_lens[rows].astype(np.int64)
    shared = np.minimum.reduceat(contexts, row_starts[:-1])
    kv_slots = shared[seq, None] + np.arange((lengths - shared).max())
    node = kv_slots - batch.tree_starts[batch.row_seqs[rows], None]
    bits = _bits(batch.masks[rows])
    on_path = np.take_along_axis(bits, node.clip(0, bits.shape[1] - 1), 1) & (node >= 0) & (node < bits.shape[1])
    hidden = (kv_slots >= contexts[:, None]) & ~on_path & (kv_slots < lengths[seq, None])
    row_bits = 8 * starts[seq].astype(np.int64) + (np.arange(len(seq)) - row_starts[seq]) * lengths[seq]
    cleared = (row_bits[:, None] + kv_slots)[hidden]
    # Each bit occurs once, so subtracting it clears it, which is faster than masking.
    np.subtract.at(packed, cleared >> 3, (1 << (cleared & 7)).astype(np.uint8))
    return PackedMasks(packed, starts)


def _starts(counts: NDArray[np.int64]) -> Int32:
    """Return int32 [len(counts) + 1]: the start of each part, then the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int32)
