"""Bias, per-head norm, rotary embedding and the write to the paged cache: reference.rope_kv_write, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_HEADS = 8  # of a program: the row's angles are read once for all
# From so many rows on programs fill the GPU: one warp each, with loads of 16 bytes. Before it more warps wait less.
_MANY_ROWS = 256
_MAX_HEAD_DIM = 256


jit: Callable[[Any], Any] = triton.jit


class Rope(NamedTuple):
    """What rope_kv_write takes beside the rows; see there."""

    bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    epsilon: float
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    num_heads: int


@jit
def write_entries(  # type: ignore[no-untyped-def]
    low,
    high,
    cosine,
    sine,
    query_row,
    query_norm,
    key_norm,
    keys,
    values,
    slot,
    head,
    dim,
    inside,
    epsilon,
    num_slots,
    key_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norm of each head, rotation, and the writes: queries in place, keys and values to their slots.

    Args:
        low, high: float32 [a, b]; the lower and upper halves of heads, bias and all. With HAS_NORM the b columns are
            one head.
        cosine, sine: float32, of that shape or one that widens to it; so are all that follow.
        query_row: where the row of queries begins.
        slot, head, dim: of each element; ``dim`` of its half.
        inside: which elements there are.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    is_query = head < NUM_HEADS
    plain_low = low
    plain_high = high
    if HAS_NORM:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(mean + epsilon)[:, None]
        query_low = tl.load(query_norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        query_high = tl.load(query_norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        key_low = tl.load(key_norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        key_high = tl.load(key_norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        low = low * scale * tl.where(is_query, query_low, key_low)
        high = high * scale * tl.where(is_query, query_high, key_high)
    turned_low = low * cosine - high * sine
    turned_high = high * cosine + low * sine

    query_at = query_row + head * HEAD_DIM + dim
    write_query = inside & is_query
    tl.store(query_at, turned_low.to(query_row.dtype.element_ty), mask=write_query)
    tl.store(query_at + HALF, turned_high.to(query_row.dtype.element_ty), mask=write_query)

    # The head at which a row's writes end: none are left without a slot.
    end = tl.where((slot >= 0) & (slot < num_slots), NUM_HEADS + 2 * NUM_KV_HEADS, 0)
    to_cache = inside & (head < end)
    key_at = keys + slot * key_stride + (head - NUM_HEADS) * HEAD_DIM + dim
    write_key = to_cache & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    tl.store(key_at, turned_low.to(keys.dtype.element_ty), mask=write_key)
    tl.store(key_at + HALF, turned_high.to(keys.dtype.element_ty), mask=write_key)
    value_at = values + slot * value_stride + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + dim
    write_value = to_cache & (head >= NUM_HEADS + NUM_KV_HEADS)
    tl.store(value_at, plain_low.to(values.dtype.element_ty), mask=write_value)
    tl.store(value_at + HALF, plain_high.to(values.dtype.element_ty), mask=write_value)


def _rope_kv_write_kernel(
    qkv: tl.tensor,
    bias: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    epsilon: tl.tensor,
    num_positions: tl.tensor,
    num_slots: tl.tensor,
    qkv_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (dim < HALF)

    position = tl.minimum(tl.maximum(tl.load(positions + row), 0), num_positions - 1).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    cosine = tl.load(cos_sin + position * HEAD_DIM + dim, mask=dim < HALF, other=1.0)
    sine = tl.load(cos_sin + position * HEAD_DIM + HALF + dim, mask=dim < HALF, other=0.0)

    at = head * HEAD_DIM + dim
    low = tl.load(qkv + row * qkv_stride + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv + row * qkv_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + at + HALF, mask=inside, other=0.0).to(tl.float32)
    write_entries(
        low,
        high,
        cosine,
        sine,
        qkv + row * qkv_stride,
        query_norm,
        key_norm,
        keys,
        values,
        slot,
        head,
        dim,
        inside,
        epsilon,
        num_slots,
        key_stride,
        value_stride,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        HAS_NORM,
    )


_rope_kv_write: Any = triton.jit(_rope_kv_write_kernel, do_not_specialize=["num_positions", "num_slots"])


def rope_kv_write(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    epsilon: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    strict: bool = False,
) -> None:
    """Bias, norm of each head, rotation; keys and values go to their slots, the queries stay in ``qkv``, turned.

    Args:
        qkv: [rows, num_heads + 2 * num_kv_heads, head_dim], or the same with the last two as one; bfloat16 or float32.
            Rows may be apart. Its queries are replaced; its keys and values stay as they are.
        bias: [num_heads + 2 * num_kv_heads, head_dim], contiguous in any shape, or None.
        query_norm, key_norm: [head_dim]; both or neither.
        cos_sin: float32 [positions, 2, head_dim / 2], contiguous: cosines, then sines (arXiv 2104.09864).
        positions: int32 [rows]; clamped to cos_sin.
        slot_mapping: int32 or int64 [rows]; a row whose slot is not in the cache writes nothing there.
        keys, values: [slots, num_kv_heads, head_dim], bfloat16 or float32; slots may be apart.
        strict: whether a head's norm is to have the same bits for any number of rows, as all else has.
    """
    num_slots, num_kv_heads, head_dim = keys.shape
    heads = num_heads + 2 * num_kv_heads
    rows = len(qkv)
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM or qkv[:1].numel() not in (0, heads * head_dim):
        raise ValueError(f"{num_heads} query heads and {num_kv_heads} key heads of {head_dim} in {tuple(qkv.shape)}")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("the heads of queries and keys are both normed, or none")
    if not (qkv[:1].is_contiguous() and cos_sin.is_contiguous() and cos_sin.shape[1:] == (2, head_dim // 2)):
        raise ValueError("rope_kv_write needs contiguous heads and angles [positions, 2, head_dim / 2]")
    if values.shape != keys.shape or not (keys[:1].is_contiguous() and values[:1].is_contiguous()):
        raise ValueError("keys and values have one shape, and the heads of a slot lie together")
    if bias is not None and not (bias.is_contiguous() and bias.numel() == heads * head_dim):
        raise ValueError(f"a bias {tuple(bias.shape)} for {heads} heads of {head_dim}")
    if len(positions) < rows or len(slot_mapping) < rows:
        raise ValueError(f"{len(positions)} positions and {len(slot_mapping)} slots for {rows} rows")
    if rows == 0:
        return
    _rope_kv_write[(rows, triton.cdiv(heads, _HEADS))](
        qkv,
        bias if bias is not None else qkv,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        cos_sin,
        positions,
        slot_mapping,
        keys,
        values,
        epsilon,
        len(cos_sin),
        num_slots,
        qkv.stride(0),
        keys.stride(0),
        values.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        HAS_BIAS=bias is not None,
        HAS_NORM=query_norm is not None,
        # Lanes add up what they have of a head, so another number of warps is another order.
        num_warps=1 if rows >= _MANY_ROWS and not strict else 4,
    )
