# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Lay out the rows of an overlapped step on the device: each sequence's root and tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.overlap_state import NO_KV_SLOT, NO_NODE, BatchState, DraftedTrees, StepRows

_NO_KV_SLOT = tl.constexpr(NO_KV_SLOT)
_NO_NODE = tl.constexpr(NO_NODE)


@triton.jit(do_not_specialize=["num_rows", "max_blocks", "num_kv_slots", "max_depth"])
def _lay_out_rows(
    batch,
    drafted,
    found,
    block_tables,
    rows,
    num_rows,
    max_blocks,
    num_kv_slots,
    drafted_stride,
    found_stride,
    table_stride,
    vocab_size,
    max_depth,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr,
    NODES: tl.constexpr,
):
    batch_row = tl.program_id(0)
    start = tl.minimum(tl.maximum(tl.load(rows.row_starts + batch_row), 0), num_rows)
    end = tl.minimum(tl.maximum(tl.load(rows.row_starts + batch_row + 1), start), num_rows)
    width = tl.minimum(end - start, NODES)
    left = tl.load(batch.num_left + batch_row)
    length = tl.maximum(tl.load(batch.lengths + batch_row), 1)
    node = tl.arange(0, NODES)
    is_row = node < width

    step = tl.load(batch.step)
    num_found = tl.load(found.num_nodes + batch_row)
    is_found = (tl.load(found.stamp) == step) & (num_found > 1)
    is_drafted = (tl.load(drafted.stamp) == step) & (step > tl.load(batch.joined + batch_row))
    num_nodes = tl.where(is_found, num_found, tl.load(drafted.num_nodes + batch_row))
    stride = tl.where(is_found, found_stride, drafted_stride)
    count = tl.minimum(tl.minimum(num_nodes, left), tl.minimum(width, stride))
    count = tl.where(is_found | is_drafted, tl.maximum(count, 1), 1)
    count = tl.where((left > 0) & (width > 0), count, 0)
    is_child = (node > 0) & (node < count)
    at = batch_row.to(tl.int64) * stride + node
    from_host = (node > 0) & (node < tl.where(is_found, count, 0))
    from_drafter = (node > 0) & (node < tl.where(is_found, 0, count))
    parent = tl.load(drafted.parents + at, mask=from_drafter, other=0)
    parent += tl.load(found.parents + at, mask=from_host, other=0)
    token = tl.load(drafted.tokens + at, mask=from_drafter, other=0)
    token += tl.load(found.tokens + at, mask=from_host, other=0)
    is_bad = is_child & ((parent < 0) | (parent >= node) | (token < 0) | (token >= vocab_size))
    count = tl.where(tl.sum(is_bad.to(tl.int32), axis=0) > 0, tl.minimum(count, 1), count)
    is_node = node < count
    is_child = (node > 0) & is_node
    token = tl.where(is_child, token, tl.load(batch.last_tokens + batch_row))
    # The walk uses this copy. Parents are read from it again, because the drafter may still be
    # writing.
    tl.store(rows.tokens + start + node, tl.where(is_node, token, _NO_NODE), mask=is_row)
    tl.store(rows.parents + start + node, tl.where(is_child, parent, tl.where(is_node, -1, _NO_NODE)), mask=is_row)
    tl.debug_barrier()

    word = tl.arange(0, PADDED_WORDS)
    mask = tl.zeros([NODES, PADDED_WORDS], tl.int64)
    depth = tl.zeros([NODES], tl.int32)
    current = tl.where(is_child, node, 0)
    while tl.max(current, axis=0) > 0:
        above = current > 0
        bit = tl.full([NODES], 1, tl.int64) << (current % 64).to(tl.int64)
        mask |= tl.where(above[:, None] & (word[None, :] == (current // 64)[:, None]), bit[:, None], 0)
        depth += above.to(tl.int32)
        up = tl.load(rows.parents + start + current, mask=above & is_row, other=0)
        # A parent's index is forced below its child's, so this ends.
        current = tl.minimum(tl.maximum(up, 0), tl.maximum(current - 1, 0))

    count = tl.where(tl.max(depth, axis=0) > max_depth, tl.minimum(count, 1), count)
    is_node = node < count
    is_child = (node > 0) & is_node
    mask = tl.where(is_child[:, None], mask, 0)
    depth = tl.where(is_child, depth, 0)
    tl.debug_barrier()
    tl.store(rows.tokens + start + node, _NO_NODE, mask=is_row & (node >= count))
    tl.store(rows.parents + start + node, _NO_NODE, mask=is_row & (node >= count))

    root = length - 1
    logical = root + node
    entry = logical // BLOCK_SIZE
    is_entry = is_node & (entry < max_blocks)
    block = tl.load(block_tables + batch_row.to(tl.int64) * table_stride + entry, mask=is_entry, other=-1)
    kv_slot = block * BLOCK_SIZE + logical % BLOCK_SIZE
    kv_slot = tl.where(is_entry & (block >= 0) & (kv_slot < num_kv_slots), kv_slot, _NO_KV_SLOT)
    row = start + node
    tl.store(rows.token_ids + row, tl.where(is_node, token, 0), mask=is_row)
    tl.store(rows.positions + row, tl.where(is_node, root + depth, 0), mask=is_row)
    tl.store(rows.kv_slots + row, kv_slot, mask=is_row)
    tl.store(rows.context_lens + row, tl.where(is_node, length, 0), mask=is_row)
    tl.store(rows.row_seqs + row, tl.where(is_node, batch_row, -1), mask=is_row)
    words_at = row.to(tl.int64)[:, None] * WORDS + word[None, :]
    tl.store(rows.masks + words_at, mask, mask=is_row[:, None] & (word < WORDS)[None, :])
    tl.store(rows.num_nodes + batch_row, count)
    tl.store(rows.tree_starts + batch_row, root)
    tl.store(rows.sample_positions + batch_row, length)
    tl.store(rows.num_outputs + batch_row, tl.load(batch.num_outputs + batch_row))
    tl.store(rows.max_new + batch_row, tl.maximum(left, 1))


def lay_out_rows(
    batch: BatchState,
    drafted: DraftedTrees,
    found: DraftedTrees,
    block_tables: torch.Tensor,
    rows: StepRows,
    *,
    block_size: int,
    num_kv_slots: int,
    vocab_size: int,
    max_width: int,
    max_depth: int,
) -> None:
    """Fill ``rows`` except ``row_starts``; reference_overlap.lay_out_rows_reference defines it.

    A sequence's tree is the one that was found for it, if there is one, else the drafted one. A
    tree without the batch's step as its stamp, one that was drafted before the sequence joined, an
    invalid tree, or a tree that is too deep becomes a root alone. A tree that is too large for its
    rows, or for the tokens that may still be emitted, is cut: ancestors come first.

    Args:
        drafted: the trees of the drafter on this device.
        found: trees from the host; a batch row with at most one node has none.
        block_tables: int32 [batch_rows, blocks].
        num_kv_slots: KV slots in the cache.
        vocab_size: drafted tokens must be below this.
        max_width: no sequence has more rows.
        max_depth: most edges from a root.
    """
    num_batch_rows = len(rows.tree_starts)
    words = rows.masks.shape[1]
    _lay_out_rows[(num_batch_rows,)](
        batch,
        drafted,
        found,
        block_tables,
        rows,
        len(rows.token_ids),
        block_tables.shape[1],
        num_kv_slots,
        drafted.tokens.shape[1],
        found.tokens.shape[1],
        block_tables.stride(0),
        vocab_size,
        max_depth,
        BLOCK_SIZE=block_size,
        WORDS=words,
        PADDED_WORDS=triton.next_power_of_2(words),
        NODES=max(triton.next_power_of_2(max_width), 2),
        num_warps=1 if max_width <= 32 else 4,
    )
