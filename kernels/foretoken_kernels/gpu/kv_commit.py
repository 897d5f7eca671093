"""Move KV entries of accepted nodes to the committed path; the device finds the moves.

reference.kv_commit defines the copies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COMMIT_BLOCK = 256
_MAX_DEPTHS = 16
_COPY_BLOCK = 1024
_NUM_WARPS = 4


def _physical_kv_slots(
    logical: tl.tensor,
    is_move: tl.tensor,
    block_table: tl.tensor,
    max_blocks: tl.tensor,
    num_kv_slots: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> Any:
    """Return the KV slots of a sequence's logical KV slots, or -1 where there is none."""
    is_inside = is_move & (logical >= 0) & (logical < max_blocks.to(tl.int64) * BLOCK_SIZE)
    block = tl.load(block_table + logical // BLOCK_SIZE, mask=is_inside, other=-1).to(tl.int64)
    kv_slot = block * BLOCK_SIZE + logical % BLOCK_SIZE
    return tl.where((block >= 0) & (kv_slot < num_kv_slots), kv_slot, -1)


_physical: Any = triton.jit(_physical_kv_slots)


def _kv_commit_kernel(
    cache: tl.tensor,
    accepted: tl.tensor,
    num_accepted: tl.tensor,
    root_positions: tl.tensor,
    block_tables: tl.tensor,
    depth: tl.tensor,
    max_blocks: tl.tensor,
    num_kv_slots: tl.tensor,
    kv_slot_size: tl.tensor,
    plane_stride: tl.tensor,
    kv_slot_stride: tl.tensor,
    accepted_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A program owns a piece of every KV slot in one plane, for one sequence, and makes DEPTHS moves
    # at once, in order from the root: it reads all, then writes all. That equals one move after the
    # other, because no move reads what an earlier one wrote: nodes ascend along a path and none is
    # below its depth, so for e > d move e reads KV slot root + node[e], where node[e] > node[d] >=
    # d, and move d wrote root + d. A later move may write what an earlier one read: hence the
    # barrier, since different threads may run the two. Other programs have other pieces, planes or
    # sequences, and sequences share no KV slots after their roots.
    plane = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    piece = cache + plane * plane_stride + columns[None, :]
    root = tl.load(root_positions + seq).to(tl.int64)
    moves = tl.minimum(tl.load(num_accepted + seq), depth)
    table = block_tables + seq * table_stride
    for first in range(0, moves, DEPTHS):
        move = first + tl.arange(0, DEPTHS)
        is_move = move < moves
        node = tl.load(accepted + seq * accepted_stride + move, mask=is_move, other=0).to(tl.int64)
        src = _physical(root + node, is_move, table, max_blocks, num_kv_slots, BLOCK_SIZE)
        dst = _physical(root + move + 1, is_move, table, max_blocks, num_kv_slots, BLOCK_SIZE)
        # Skip moves onto themselves, and moves from or to a KV slot that does not exist.
        mask = ((src >= 0) & (dst >= 0) & (src != dst))[:, None] & (columns < kv_slot_size)[None, :]
        value = tl.load(piece + src[:, None] * kv_slot_stride, mask=mask)
        tl.debug_barrier()
        tl.store(piece + dst[:, None] * kv_slot_stride, value, mask=mask)


def _copy_kv_slots_kernel(
    cache: tl.tensor,
    src_kv_slots: tl.tensor,
    dst_kv_slots: tl.tensor,
    moves: tl.tensor,
    num_kv_slots: tl.tensor,
    kv_slot_size: tl.tensor,
    plane_stride: tl.tensor,
    kv_slot_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    plane = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = cache + plane * plane_stride + columns
    for i in range(moves):
        src = tl.load(src_kv_slots + i).to(tl.int64)
        dst = tl.load(dst_kv_slots + i).to(tl.int64)
        is_inside = (src >= 0) & (src < num_kv_slots) & (dst >= 0) & (dst < num_kv_slots) & (src != dst)
        size = tl.where(is_inside, kv_slot_size, 0)
        value = tl.load(start + tl.maximum(src, 0) * kv_slot_stride, mask=columns < size)
        tl.store(start + tl.maximum(dst, 0) * kv_slot_stride, value, mask=columns < size)
        # A later move may read what another thread wrote for this one.
        tl.debug_barrier()


_kv_commit: Any = triton.jit(_kv_commit_kernel, do_not_specialize=["depth", "max_blocks", "num_kv_slots"])
# Sources and targets are two halves of one array; whether the second half is aligned depends on the
# number of moves.
_copy_kv_slots: Any = triton.jit(
    _copy_kv_slots_kernel,
    do_not_specialize=["moves", "num_kv_slots"],
    do_not_specialize_on_alignment=["src_kv_slots", "dst_kv_slots"],
)


def kv_commit(
    cache: torch.Tensor,
    accepted: torch.Tensor,
    num_accepted: torch.Tensor,
    root_positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """Make each sequence's accepted path contiguous after its root.

    Node ``accepted[d - 1]`` moves to depth d. Tree node i of a sequence is at logical KV slot
    ``root + i``. A move from or to a KV slot that does not exist is skipped.

    Args:
        cache: [planes, num_kv_slots, kv_slot_size], 16-bit or float32; a plane is the keys or the
            values of one layer. The elements of a KV slot are contiguous. Written in place.
        accepted: int32 [seqs, depth]; the nodes of the accepted path, ascending, without the root.
        num_accepted: int32 [seqs]; how many of them count.
        root_positions: int32 [seqs]; the root's logical KV slot.
        block_tables: int32 [seqs, max_blocks].

    Raises:
        ValueError: shapes or strides do not fit.
    """
    planes, num_kv_slots, kv_slot_size = cache.shape
    seqs, depth = accepted.shape
    if cache.stride(2) != 1 or (depth and accepted.stride(1) != 1) or block_tables.stride(1) != 1:
        raise ValueError("kv_commit needs contiguous KV slots, paths and block tables")
    if min(len(num_accepted), len(root_positions), len(block_tables)) < seqs:
        raise ValueError(f"{seqs} paths, but fewer counts, roots or block tables")
    if seqs == 0 or depth == 0:
        return
    _kv_commit[(planes, seqs, triton.cdiv(kv_slot_size, _COMMIT_BLOCK))](
        cache,
        accepted,
        num_accepted,
        root_positions,
        block_tables,
        depth,
        block_tables.shape[1],
        num_kv_slots,
        kv_slot_size,
        cache.stride(0),
        cache.stride(1),
        accepted.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        DEPTHS=min(triton.next_power_of_2(depth), _MAX_DEPTHS),
        BLOCK=_COMMIT_BLOCK,
        num_warps=_NUM_WARPS,
    )


def copy_kv_slots(cache: torch.Tensor, src_kv_slots: torch.Tensor, dst_kv_slots: torch.Tensor) -> None:
    """Copy KV slots ``src_kv_slots`` to ``dst_kv_slots`` in place, one by one, in every plane.

    A move from or to a KV slot that does not exist is skipped.

    Args:
        cache: [planes, num_kv_slots, kv_slot_size], as for kv_commit.
        src_kv_slots, dst_kv_slots: int32 or int64 [moves].

    Raises:
        ValueError: shapes or strides do not fit.
    """
    planes, num_kv_slots, kv_slot_size = cache.shape
    if cache.stride(2) != 1 or src_kv_slots.shape != dst_kv_slots.shape:
        raise ValueError("copy_kv_slots needs contiguous KV slots, and a target for each source")
    if len(src_kv_slots) == 0:
        return
    _copy_kv_slots[(planes, triton.cdiv(kv_slot_size, _COPY_BLOCK))](
        cache,
        src_kv_slots,
        dst_kv_slots,
        len(src_kv_slots),
        num_kv_slots,
        kv_slot_size,
        cache.stride(0),
        cache.stride(1),
        BLOCK=_COPY_BLOCK,
        num_warps=_NUM_WARPS,
    )
