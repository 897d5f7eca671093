"""Attention of ragged token rows, tree nodes included, over paged keys and values.

foretoken_kernels.reference defines it. A program processes a tile of one sequence's rows, the query
heads that share one key head, and a part (split) of the keys that the tile sees, with a running
softmax (FlashAttention-2, arXiv 2307.08691). Few sequences would leave most of a GPU idle, so long
contexts are split over programs. The program that finishes last adds up the splits of its tile
(Flash-Decoding's second kernel, without the second launch). It adds them in their order, so equal
launches give equal bits.

The keys of a tile are numbered so that the tree comes first: key k < bits is logical KV slot
tree_start + k, any other key is logical KV slot context_start + (k - bits). So mask bits have fixed
places in a block of keys, only the blocks with mask bits pay for the bit test, and a small tree
shares its block with the first keys of the context. A short launch takes as long as its chain of
waits, so there one loop processes all blocks, and the tree's block is prefetched like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.attention_parts import attend, bit_length, gather, kv_slots_of, low_bits, write

# Warps that keep a GPU of 132 multiprocessors busy, eight on each; these kernels have registers for
# no more.
_WARPS = 1024
# A workspace has room for the largest number of splits of this many rows; more rows get fewer
# splits.
_SPLIT_ROWS = 64
# Adding splits up takes as long as 256 keys (about 3 us on an H200), so a split of fewer keys does
# not pay.
_LEAST_KEYS = 256
# Most keys of a block table for one loop over tree and context. On an H200 one loop gains 1.5 us at
# 320 keys, nothing at 1,500, and loses 5% at 4,096. The limit is 2,048 tokens plus the tree's own
# blocks and bits.
_ONE_LOOP_KEYS = 2560
# Programs that may share the keys of a small tree in a longer table, even if they are too many to run
# side by side. Otherwise the sequences whose programs begin last keep most multiprocessors waiting.
# On an H200, 36 sequences of 8,500 tokens with 4 rows each take 398 us instead of 487 with two, and
# 64 take 577 instead of 564. With four, 36 take 362 and 64 take 608. In tiles for 16 rows two gain as
# often as they lose.
_LONG_SPLITS = 2
# Most rows of one sequence that may be a tree; more rows are a prompt's.
_MOST_TREE_ROWS = 64
# Elements of partial sums that a program loads at a time while it adds them up.
_MERGED_ELEMENTS = 8192
_LOG2_E = 1.4426950408889634

# These arguments change from batch to batch; a value of 1 or a multiple of 16 is not worth another
# compilation.
jit_kernel: Callable[[Any], Any] = triton.jit(do_not_specialize=["rows", "max_blocks", "seq_tiles", "splits"])


class Workspace(NamedTuple):
    """Partial results of one launch's splits. Launches that may overlap need one each.

    Attributes:
        sums: float32 [splits, split_rows, num_heads, head_dim]; values weighted by exp2(score -
            maximum).
        maxima: float32 [splits, split_rows, num_heads]; scores in units of log 2.
        weights: float32 [splits, split_rows, num_heads]; the sum of the weights.
        arrived: int32 [max_rows, num_kv_heads]; finished splits of the tile that begins at this
            row. Zero between launches.
    """

    sums: torch.Tensor
    maxima: torch.Tensor
    weights: torch.Tensor
    arrived: torch.Tensor


class _Tile(NamedTuple):
    """Rows and keys of a program, and its launch settings.

    Attributes:
        one_loop: whether one loop processes tree and context.
        splits: how many programs share the keys, if there are enough, even where they are too many
            to run side by side.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    one_loop: bool = False
    splits: int = 1


def _tile(
    seqs: int, max_seq_rows: int, num_kv_heads: int, group: int, head_dim: int, wide: bool, most_keys: int
) -> _Tile:
    """Choose how many rows and keys a program processes at a time.

    The left operand of a matrix product is (rows x query heads of one key head), and a tensor core
    takes at least 16 rows of it: one decode row of four heads costs as much as four rows. More rows
    than the sequence has would only cost registers; 128 rows of 128 columns are what eight warps
    can hold. Larger tiles read keys less often. But most of a block's time is waiting, for memory
    and for one operation after the other, and programs wait side by side: so a tile is halved while
    the launch has too few warps for the GPU. With few rows, a block has 128 keys, loaded at once.
    The largest tile is alone on its multiprocessor, so five stages, two of them for block table
    entries, load two blocks ahead. float32 (``wide``) does not use tensor cores, so its tiles are
    small.

    For trees, half of the largest tile is faster: on an H200, in short tables 19.4 us instead of
    21.5 for 16 x 32 rows, when masks cost more; in long ones 475 instead of 542 for 36 sequences of
    8,500 tokens with 4 rows each, where they may have 32.

    One loop for all keys saves small launches with trees a wait; they also get twice the warps
    where there is room. It computes more for each key, so long contexts do not use it.

    Args:
        most_keys: most keys of a sequence.
    """
    heads = triton.next_power_of_2(group)
    long_heads = head_dim > 128
    most = 16 if wide else 64 if long_heads else 128
    products = max(min(triton.next_power_of_2(max_seq_rows) * heads, most), 16)
    while True:
        rows = max(products // heads, 1)
        num_warps = 8 if rows * heads > (32 if long_heads else 64) else 4
        programs = seqs * triton.cdiv(max_seq_rows, rows) * num_kv_heads
        if products == 16 or rows == 1 or programs * num_warps >= _WARPS:
            break
        products //= 2
    is_short, is_tree = most_keys <= _ONE_LOOP_KEYS, max_seq_rows <= _MOST_TREE_ROWS
    one_loop = is_short and max_seq_rows > 1 and rows * heads <= 32
    if wide:
        return _Tile(rows, 64 if one_loop else 32, 4, 1, one_loop)
    if rows * heads <= 32:
        if one_loop and programs * 8 <= _WARPS:
            num_warps = 8
        splits = _LONG_SPLITS if is_tree and not is_short else 1
        return _Tile(rows, 64 if long_heads else 128, num_warps, 3, one_loop, splits)
    if is_tree and rows > 1 and rows * heads == 128:
        return _Tile(rows // 2, 64, 4, 5 if is_short else 3, is_short)
    return _Tile(rows, 64, num_warps, 5 if rows * heads == 128 else 3)


def _num_splits(rows: int, least: int, warps: int, most_keys: int, workspace: Workspace) -> int:
    """Return how many programs may share the keys of a tile.

    Args:
        least: as many as these, whatever runs side by side.
        warps: warps of a launch without splits.
    """
    most, split_rows = workspace.sums.shape[:2]
    side_by_side = max(_WARPS // warps, least)
    return max(min(most, side_by_side, most_keys // _LEAST_KEYS, most * split_rows // rows), 1)


def _constants(
    tile: _Tile,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    half_words: int,
    splits: int,
    wide: bool,
) -> dict[str, int]:
    """Return the kernel's compile-time constants.

    Args:
        splits: 1, or a power of two that is at least any launch's number of splits.
    """
    group = num_heads // num_kv_heads
    block_dim = max(triton.next_power_of_2(head_dim), 16)
    entries = tile.rows * triton.next_power_of_2(group)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "HALF_WORDS": half_words,
        "SPLITS": splits,
        "LEAST_KEYS": _LEAST_KEYS,
        "MERGED": max(min(_MERGED_ELEMENTS // (entries * block_dim), 4), 1),
        "TILE_ROWS": tile.rows,
        "BLOCK_GROUP": triton.next_power_of_2(group),
        "BLOCK_KEYS": tile.keys,
        "BLOCK_DIM": block_dim,
        # Only if the whole tree fits in one block.
        "ONE_LOOP": tile.one_loop and half_words * 32 <= tile.keys,
        "WIDE": wide,
    }


@jit_kernel
def _tree_attention(  # type: ignore[no-untyped-def]  # noqa: C901 -- most branches are compile-time
    query,
    query_stride,
    query_head_stride,
    keys,
    values,
    row_starts,
    context_lens,
    masks,
    mask_stride,
    tree_starts,
    block_tables,
    table_stride,
    context_starts,
    out,
    out_stride,
    out_head_stride,
    part_sums,
    part_maxima,
    part_weights,
    arrived,
    rows,
    max_blocks,
    num_kv_slots,
    seq_tiles,
    splits,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    MERGED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq = tile // seq_tiles
    # Clamp to 0 and rows: row_starts may hold anything.
    seq_row = tl.minimum(tl.maximum(tl.load(row_starts + seq), 0), rows)
    first_row = seq_row + tile % seq_tiles * TILE_ROWS
    end_row = tl.minimum(tl.load(row_starts + seq + 1), rows)
    # Load these early: in a short launch, each wait for memory after another one counts.
    tree_start = tl.load(tree_starts + seq)
    context_start = tl.maximum(tl.load(context_starts + seq), 0)
    if first_row >= end_row:
        return

    # Row m of the left operand is query head m % BLOCK_GROUP of the group, of row m // BLOCK_GROUP
    # of the tile.
    BLOCK_M: tl.constexpr = TILE_ROWS * BLOCK_GROUP
    entry = tl.arange(0, BLOCK_M)
    row = first_row + entry // BLOCK_GROUP
    member = entry % BLOCK_GROUP
    row_live = row < end_row
    entry_live = row_live & (member < GROUP)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    out_mask = entry_live[:, None] & (column < HEAD_DIM)[None, :]
    query_offset = row.to(tl.int64) * query_stride + head * query_head_stride
    q = tl.load(query + query_offset[:, None] + column[None, :], mask=out_mask, other=0.0)
    if WIDE:
        q = q.to(tl.float32)

    # The tile's number of keys: the tree's bits, then the longest context of its rows.
    length = tl.maximum(tl.load(context_lens + row, mask=row_live, other=0), 0)
    bits = 0
    row_words = ()
    for half in tl.static_range(HALF_WORDS):
        word = tl.load(masks + row.to(tl.int64) * mask_stride + half, mask=row_live, other=0)
        row_words = row_words + (word,)  # type: ignore[assignment]  # noqa: RUF005 -- the compiler knows no stars
        union = tl.reduce_or(word, 0)
        bits = tl.where(union != 0, half * 32 + bit_length(union), bits)
    context_end = tl.minimum(tl.max(length, 0), max_blocks * BLOCK_SIZE)
    num_keys = bits + tl.maximum(context_end - context_start, 0)
    table = block_tables + seq.to(tl.int64) * table_stride

    # Splits run side by side, but one program adds them all up. With c keys in each of n / c
    # splits, reading c keys and then n / c times BLOCK_M partial sums takes least time at c =
    # sqrt(n * BLOCK_M), since keys are two planes of bfloat16 and sums are one of float32.
    if SPLITS > 1:
        least = tl.maximum(tl.sqrt(num_keys.to(tl.float32) * BLOCK_M).to(tl.int32), LEAST_KEYS)
        share = tl.cdiv(num_keys, tl.maximum(tl.minimum(num_keys // least, splits), 1))
        share = tl.maximum(tl.cdiv(share, BLOCK_KEYS), 1) * BLOCK_KEYS
        used = tl.maximum(tl.cdiv(num_keys, share), 1)
        if split >= used:
            return
        begin = split * share
        end = tl.minimum(begin + share, num_keys)
    else:
        used: tl.constexpr = 1  # type: ignore[no-redef]
        begin = 0
        end = num_keys

    kv_slot_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    head_keys = keys + kv_head * HEAD_DIM
    head_values = values + kv_head * HEAD_DIM
    sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    place = tl.arange(0, BLOCK_KEYS)
    # A row sees the keys below ``room``, except nodes of the tree that are not on its path. Masking
    # a score takes as many instructions as the rest of its processing. So it is one comparison with
    # one number a row, and only in blocks that some row does not see completely: blocks past the
    # least room, and blocks with a tree.
    room = bits + tl.maximum(tl.minimum(length, max_blocks * BLOCK_SIZE) - context_start, 0)
    least_room = tl.min(tl.where(row_live, room, num_keys), 0)

    if ONE_LOOP:
        # The whole tree is in the first block, so its visibility is known before any key is loaded:
        # one bit a key, also set for all keys after the tree.
        words = tl.full([BLOCK_M, BLOCK_KEYS], -1, tl.int32)
        for half in tl.static_range(HALF_WORDS):
            in_table = low_bits(max_blocks * BLOCK_SIZE - tree_start - half * 32) & ~low_bits(-tree_start - half * 32)
            word = (row_words[half] & in_table) | ~low_bits(bits - half * 32)
            words = tl.where((place // 32 == half)[None, :], word[:, None], words)
        seen = tl.max((words >> (place % 32)[None, :]) & 1, 0) != 0
        for first in range(begin, end, BLOCK_KEYS):
            key_index = first + place
            in_tree = key_index < bits
            logical = tl.where(in_tree, tree_start + key_index, context_start + key_index - bits)
            # A bit that no row of the tile has set may belong to a KV slot that was never written.
            live = tl.where(in_tree, seen, key_index < num_keys)
            kv_slot, live = kv_slots_of(logical, live, table, max_blocks, num_kv_slots, BLOCK_SIZE)
            paths = tl.where(first < bits, words, -1)
            on_path = ((paths >> (place % 32)[None, :]) & 1) != 0
            visible = on_path & (place[None, :] < (room - first)[:, None])
            key = gather(head_keys, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            value = gather(head_values, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            is_masked = (first < bits) | (first + BLOCK_KEYS > least_room)
            sums, maxima, weights = attend(q, key, value, visible, scale, sums, maxima, weights, WIDE, is_masked)
    else:
        # Blocks of keys that contain the tree: one or two, so loading ahead gains nothing.
        tree_end = (bits + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS
        for first in tl.range(begin, tl.minimum(end, tree_end), BLOCK_KEYS, num_stages=1):
            key_index = first + place
            in_tree = key_index < bits
            logical = tl.where(in_tree, tree_start + key_index, context_start + key_index - bits)
            kv_slot, live = kv_slots_of(logical, key_index < num_keys, table, max_blocks, num_kv_slots, BLOCK_SIZE)
            words = tl.zeros([BLOCK_M, BLOCK_KEYS], tl.int32)
            for half in tl.static_range(BLOCK_KEYS // 32):
                # Past the last word there are no keys of the tree, so any word will do.
                index = tl.minimum(first // 32 + half, HALF_WORDS - 1)
                word = tl.load(masks + row.to(tl.int64) * mask_stride + index, mask=row_live, other=0)
                words = tl.where((place // 32 == half)[None, :], word[:, None], words)
            on_path = ((words >> (place % 32)[None, :]) & 1) != 0
            visible = tl.where(in_tree[None, :], on_path, logical[None, :] < length[:, None]) & live[None, :]
            # A bit that no row of the tile has set may belong to a KV slot that was never written.
            live = tl.max(visible.to(tl.int32), 0) != 0
            key = gather(head_keys, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            value = gather(head_values, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            sums, maxima, weights = attend(q, key, value, visible, scale, sums, maxima, weights, WIDE)

        for first in range(tl.maximum(begin, tree_end), end, BLOCK_KEYS):
            logical = context_start - bits + first + place
            kv_slot, live = kv_slots_of(logical, logical < context_end, table, max_blocks, num_kv_slots, BLOCK_SIZE)
            visible = place[None, :] < (room - first)[:, None]
            key = gather(head_keys, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            value = gather(head_values, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            is_masked = first + BLOCK_KEYS > least_room
            sums, maxima, weights = attend(q, key, value, visible, scale, sums, maxima, weights, WIDE, is_masked)

    out_offset = (row.to(tl.int64) * out_stride + head * out_head_stride)[:, None] + column[None, :]
    if used == 1:
        write(out, sums, weights, out_offset, out_mask)
    else:
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        part = row.to(tl.int64) * num_heads + head
        split_stride = rows.to(tl.int64) * num_heads
        mine = split * split_stride + part
        tl.store(part_maxima + mine, maxima, mask=entry_live)
        tl.store(part_weights + mine, weights, mask=entry_live)
        tl.store(part_sums + (mine * HEAD_DIM)[:, None] + column[None, :], sums, mask=out_mask)
        # All threads have stored before one thread counts this split as done.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + first_row.to(tl.int64) * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == used - 1:
            tl.store(arrived + first_row.to(tl.int64) * NUM_KV_HEADS + kv_head, 0)
            other = tl.arange(0, SPLITS)
            offset = (other * split_stride)[:, None] + part[None, :]
            mask = (other < used)[:, None] & entry_live[None, :]
            # ".cg" reads from the second-level cache, where other SMs' stores are.
            found = tl.load(part_maxima + offset, mask=mask, other=float("-inf"), cache_modifier=".cg")
            highest = tl.max(found, 0)
            highest = tl.where(highest == float("-inf"), 0.0, highest)
            found_weights = tl.load(part_weights + offset, mask=mask, other=0.0, cache_modifier=".cg")
            weights = tl.sum(found_weights * tl.exp2(found - highest[None, :]), 0)
            sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
            # A few splits at a time, so that their loads overlap.
            for first_split in range(0, used, MERGED):
                for step in tl.static_range(MERGED):
                    index = first_split + step
                    there = index * split_stride + part
                    valid = entry_live & (tl.full([BLOCK_M], index, tl.int32) < used)
                    found_maxima = tl.load(part_maxima + there, mask=valid, other=float("-inf"), cache_modifier=".cg")
                    found_sums = tl.load(
                        part_sums + (there * HEAD_DIM)[:, None] + column[None, :],
                        mask=out_mask & valid[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    sums += found_sums * tl.exp2(found_maxima - highest)[:, None]
            write(out, sums, weights, out_offset, out_mask)


def attention_workspace(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    num_splits: int = 32,
) -> Workspace:
    """Return a workspace for launches of at most ``max_rows`` rows and ``num_splits`` splits."""
    shape = num_splits, min(max_rows, _SPLIT_ROWS), num_heads
    return Workspace(
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device),
    )


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_starts: torch.Tensor,
    context_lens: torch.Tensor,
    masks: torch.Tensor,
    tree_starts: torch.Tensor,
    block_tables: torch.Tensor,
    context_starts: torch.Tensor,
    block_size: int,
    max_seq_rows: int,
    workspace: Workspace,
    out: torch.Tensor,
) -> None:
    """Compute foretoken_kernels.reference.tree_attention, with another order of sums.

    Lengths and tables are read on the device only, so a graph of launches may be replayed with
    other values. If one row of a tile sees a KV slot with NaN, other rows of the sequence may
    become NaN too.

    Args:
        query: [rows, num_heads, head_dim], 16-bit or float32, last dimension contiguous.
        keys, values: [num_kv_slots, num_kv_heads, head_dim], contiguous, of query's dtype.
        row_starts: int32 [seqs + 1], ascending; rows row_starts[s] up to row_starts[s + 1] belong
            to sequence s. Rows from row_starts[seqs] on are padding; their output is not written.
        context_lens: int32 [rows].
        masks: int64 [rows, words]; the bits of the reference's uint64. Last dimension contiguous.
        tree_starts, context_starts: int32 [seqs].
        block_tables: int32 [seqs, max_blocks], last dimension contiguous; no row sees KV slots past
            its end.
        block_size: KV slots in a block.
        max_seq_rows: no sequence has more rows.
        workspace: for these head counts and at least this many rows.
        out: query's shape and dtype, last dimension contiguous; written in place, zero where a row
            sees no KV slot.

    Raises:
        ValueError: the workspace is for fewer rows.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_slots, num_kv_heads, _ = keys.shape
    if rows > len(workspace.arrived):
        raise ValueError(f"the workspace is for {len(workspace.arrived)} rows, not for {rows}")
    # Tensors outside a GPU mean Triton's interpreter, which cannot multiply bfloat16.
    wide = query.dtype == torch.float32 or not query.is_cuda
    seqs = len(tree_starts)
    most_keys = block_tables.shape[1] * block_size + 64 * masks.shape[1]
    tile = _tile(seqs, max_seq_rows, num_kv_heads, num_heads // num_kv_heads, head_dim, wide, most_keys)
    seq_tiles = triton.cdiv(max_seq_rows, tile.rows)
    tiles = seqs * seq_tiles
    # With one loop, a program takes a multiprocessor's whole memory, with four warps as with eight.
    warps = 4 if tile.one_loop else tile.num_warps
    splits = _num_splits(rows, tile.splits, tiles * num_kv_heads * warps, most_keys, workspace)
    halves = masks.view(torch.int32)
    # One of two values whatever the launch's splits, so there are only two kernels.
    most_splits = triton.next_power_of_2(len(workspace.sums)) if splits > 1 else 1
    _tree_attention[(tiles, num_kv_heads, splits)](
        query,
        query.stride(0),
        query.stride(1),
        keys,
        values,
        row_starts,
        context_lens,
        halves,
        halves.stride(0),
        tree_starts,
        block_tables,
        block_tables.stride(0),
        context_starts,
        out,
        out.stride(0),
        out.stride(1),
        workspace.sums,
        workspace.maxima,
        workspace.weights,
        workspace.arrived,
        rows,
        block_tables.shape[1],
        num_kv_slots,
        seq_tiles,
        splits,
        head_dim**-0.5 * _LOG2_E,
        **_constants(tile, num_heads, num_kv_heads, head_dim, block_size, halves.shape[1], most_splits, wide),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
