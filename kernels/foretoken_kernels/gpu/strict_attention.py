"""Attention for strict mode: a row's bits depend on its own path alone.

foretoken_kernels.reference.tree_attention defines it. A row's keys are processed by logical
position on its path, whatever the row is: part of a prompt chunk, a decode step, or a tree node.
Position p of a path is logical KV slot p if p < context_len; from there on it is the KV slot of the
next set bit of the row's mask, ascending, since parents come before their children. Blocks of keys
begin at multiples of BLOCK_KEYS and splits at multiples of SPLIT_KEYS, both counted from position 0
even if the sequence's first KV slots are on no path (context_start). So the position alone
determines its place in a matrix product and in a sum. Each split has a softmax of its own
(FlashAttention-2, arXiv 2307.08691), and splits are folded in ascending order: by one program that
computes all of them or, where few rows would leave most of a GPU idle, by the last of several
programs that compute one each.

Keys outside a row's path do not change its bits: a masked key has weight 0, and a block or split
without keys leaves maximum, weights and sums as they are (times 2^0, plus 0). So a program can
process several rows with the same bits as one: as many as fill, with the query heads of one key
head, the 16 rows of a tensor core's left operand. These rows share blocks of keys whose KV slots
all come from the block table. Blocks with tree nodes are gathered for each row separately, in the
order of its own path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.attention_parts import attend, gather, jit, kv_slots_of, write
from foretoken_kernels.gpu.tree_attention import Workspace

# Positions of a split: reading them takes longer than adding a split up.
SPLIT_KEYS = 512
_BLOCK_KEYS, _WIDE_BLOCK_KEYS = 64, 32
# Two of the stages are for block table entries: keys and values are loaded two blocks ahead.
_NUM_WARPS, _NUM_STAGES = 4, 5
# Warps that keep a GPU busy without splits.
_MANY_WARPS = 1024
# Splits that a program loads at a time while it folds them.
_MERGED = 4
_LOG2_E = 1.4426950408889634

jit_kernel: Callable[[Any], Any] = triton.jit(do_not_specialize=["rows", "max_blocks", "seq_tiles"])


@jit
def _bit_count(word):  # type: ignore[no-untyped-def]
    """Return the number of set bits of an int32 read as unsigned."""
    count = word - ((word >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F
    count += count >> 8
    count += count >> 16
    return count & 63


@jit
def _fold(sums, maxima, weights, next_sums, next_maxima, next_weights):  # type: ignore[no-untyped-def]
    """Fold one more split into the sums. If one of the two is empty, the result is the other."""
    highest = tl.maximum(maxima, next_maxima)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp2(maxima - finite)
    factor = tl.exp2(next_maxima - finite)
    sums = sums * decay[:, None] + next_sums * factor[:, None]
    return sums, highest, weights * decay + next_weights * factor


@jit_kernel
def _strict_attention(  # type: ignore[no-untyped-def]  # noqa: C901 -- most branches are compile-time
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
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MERGED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
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

    # Find the end of each row's path, and the end of its blocks without tree nodes.
    capacity = max_blocks * BLOCK_SIZE
    length = tl.minimum(tl.maximum(tl.load(context_lens + row, mask=row_live, other=0), 0), capacity)
    num_nodes = tl.zeros([BLOCK_M], tl.int32)
    for half in tl.static_range(HALF_WORDS):
        num_nodes += _bit_count(tl.load(masks + row.to(tl.int64) * mask_stride + half, mask=row_live, other=0))
    shared_length = tl.where(num_nodes > 0, length // BLOCK_KEYS * BLOCK_KEYS, length)
    shared_end = tl.max(shared_length, 0)
    path_end = tl.max(length + num_nodes, 0)
    rows_with_nodes = tl.where(tl.max(num_nodes, 0) > 0, TILE_ROWS, 0)
    used = tl.maximum(tl.cdiv(path_end, SPLIT_KEYS), 1)
    first_split = split
    end_split = split + 1
    if tl.num_programs(2) == 1:
        end_split = used
    if first_split >= used:
        return

    table = block_tables + seq.to(tl.int64) * table_stride
    kv_slot_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    head_keys = keys + kv_head * HEAD_DIM
    head_values = values + kv_head * HEAD_DIM
    place = tl.arange(0, BLOCK_KEYS)
    node = tl.arange(0, BLOCK_BITS)
    sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    for index in range(first_split, end_split):
        low = index * SPLIT_KEYS
        high = low + SPLIT_KEYS
        split_sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
        split_maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_weights = tl.zeros([BLOCK_M], tl.float32)
        begin = tl.maximum(low, context_start // BLOCK_KEYS * BLOCK_KEYS)
        for first in range(begin, tl.minimum(high, shared_end), BLOCK_KEYS):
            position = first + place
            in_context = (position >= context_start) & (position < shared_end)
            kv_slot, live = kv_slots_of(position, in_context, table, max_blocks, num_kv_slots, BLOCK_SIZE)
            visible = (position[None, :] < shared_length[:, None]) & live[None, :]
            key = gather(head_keys, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            value = gather(head_values, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
            split_sums, split_maxima, split_weights = attend(
                q, key, value, visible, scale, split_sums, split_maxima, split_weights, WIDE
            )
        for member_row in range(rows_with_nodes):
            own_row = first_row + member_row
            own_length = tl.load(context_lens + own_row, mask=own_row < end_row, other=0)
            own_length = tl.minimum(tl.maximum(own_length, 0), capacity)
            own_words = masks + own_row.to(tl.int64) * mask_stride
            own_bits = tl.where(own_row < end_row, HALF_WORDS * 32, 0)
            word = tl.load(own_words + node // 32, mask=node < own_bits, other=0)
            is_node = (word >> (node % 32)) & 1
            own_nodes = tl.sum(is_node, 0)
            before = tl.cumsum(is_node, 0) - is_node
            begin = tl.maximum(low, own_length // BLOCK_KEYS * BLOCK_KEYS)
            end = tl.where(own_nodes > 0, tl.minimum(high, own_length + own_nodes), 0)
            for first in tl.range(begin, end, BLOCK_KEYS, num_stages=1):
                position = first + place
                depth = position - own_length
                is_depth = (is_node != 0)[None, :] & (before[None, :] == depth[:, None])
                ancestor = tl.sum(tl.where(is_depth, node[None, :], 0), 1)
                in_context = (depth < 0) & (position >= context_start)
                in_tree = (depth >= 0) & (depth < own_nodes)
                logical = tl.where(depth < 0, position, tree_start + ancestor)
                kv_slot, live = kv_slots_of(logical, in_context | in_tree, table, max_blocks, num_kv_slots, BLOCK_SIZE)
                visible = (row == own_row)[:, None] & live[None, :]
                key = gather(head_keys, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
                value = gather(head_values, kv_slot, live, kv_slot_stride, HEAD_DIM, BLOCK_DIM)
                split_sums, split_maxima, split_weights = attend(
                    q, key, value, visible, scale, split_sums, split_maxima, split_weights, WIDE
                )
        sums, maxima, weights = _fold(sums, maxima, weights, split_sums, split_maxima, split_weights)

    out_offset = (row.to(tl.int64) * out_stride + head * out_head_stride)[:, None] + column[None, :]
    if (tl.num_programs(2) == 1) | (used == 1):
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
        counter = arrived + first_row.to(tl.int64) * NUM_KV_HEADS + kv_head
        num_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if num_before == used - 1:
            tl.store(counter, 0)
            sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
            maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
            weights = tl.zeros([BLOCK_M], tl.float32)
            for first_merged in range(0, used, MERGED):
                for step in tl.static_range(MERGED):
                    # ".cg" reads from the second-level cache, where other SMs' stores are. Splits
                    # past the last one are read as empty.
                    there = (first_merged + step) * split_stride + part
                    valid = entry_live & (tl.full([BLOCK_M], first_merged + step, tl.int32) < used)
                    found_maxima = tl.load(part_maxima + there, mask=valid, other=float("-inf"), cache_modifier=".cg")
                    found_weights = tl.load(part_weights + there, mask=valid, other=0.0, cache_modifier=".cg")
                    found_sums = tl.load(
                        part_sums + (there * HEAD_DIM)[:, None] + column[None, :],
                        mask=out_mask & valid[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    sums, maxima, weights = _fold(sums, maxima, weights, found_sums, found_maxima, found_weights)
            write(out, sums, weights, out_offset, out_mask)


def _constants(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, half_words: int, wide: bool
) -> dict[str, int]:
    """Return the kernel's compile-time constants; none of them depends on the batch."""
    group = num_heads // num_kv_heads
    block_group = triton.next_power_of_2(group)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "HALF_WORDS": half_words,
        "SPLIT_KEYS": SPLIT_KEYS,
        "MERGED": _MERGED,
        "TILE_ROWS": max(16 // block_group, 1),
        "BLOCK_GROUP": block_group,
        "BLOCK_BITS": triton.next_power_of_2(32 * half_words),
        "BLOCK_KEYS": _WIDE_BLOCK_KEYS if wide else _BLOCK_KEYS,
        "BLOCK_DIM": max(triton.next_power_of_2(head_dim), 16),
        "WIDE": wide,
    }


def _num_programs(rows: int, programs: int, most_keys: int, workspace: Workspace) -> int:
    """Return how many programs share a tile's keys: one, or one a split, with the same bits.

    Args:
        programs: programs of a launch without splits.
    """
    most, split_rows = workspace.sums.shape[:2]
    splits = triton.cdiv(most_keys, SPLIT_KEYS)
    fits = most > 1 and rows * splits <= most * split_rows
    return splits if fits and programs * _NUM_WARPS < _MANY_WARPS else 1


def strict_attention(
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
    """Compute reference.tree_attention; a row's bits depend on its query and its path only.

    Arguments as for tree_attention. The KV slots on one row's path must be finite, or they can
    change another row of the sequence. A workspace of one split means no splits.

    Raises:
        ValueError: the workspace is for fewer rows.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_slots, num_kv_heads, _ = keys.shape
    if rows > len(workspace.arrived):
        raise ValueError(f"the workspace is for {len(workspace.arrived)} rows, not for {rows}")
    # Tensors outside a GPU mean Triton's interpreter, which cannot multiply bfloat16.
    wide = query.dtype == torch.float32 or not query.is_cuda
    halves = masks.view(torch.int32)
    constants = _constants(num_heads, num_kv_heads, head_dim, block_size, halves.shape[1], wide)
    seq_tiles = triton.cdiv(max_seq_rows, constants["TILE_ROWS"])
    tiles = len(tree_starts) * seq_tiles
    most_keys = block_tables.shape[1] * block_size + 64 * masks.shape[1]
    _strict_attention[(tiles, num_kv_heads, _num_programs(rows, tiles * num_kv_heads, most_keys, workspace))](
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
        head_dim**-0.5 * _LOG2_E,
        **constants,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        # Splits are folded in two places, which must round alike.
        enable_fp_fusion=False,
    )
