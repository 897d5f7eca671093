"""Apply bias, per-head norm and rotary embedding in place; write to the paged KV cache.

reference.rope_kv_write defines it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_HEADS = 8  # heads of one program, which reads the row's angles once
# From this number of rows on, programs fill the GPU: one warp each, with loads of 16 bytes. With
# fewer rows, more warps wait less.
_MANY_ROWS = 256
_MAX_HEAD_DIM = 256


jit: Callable[[Any], Any] = triton.jit


class Rope(NamedTuple):
    """Arguments of rope_kv_write besides the rows; see there."""

    bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    epsilon: float
    cos_sin: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    num_heads: int


@jit
def write_kv_entries(  # type: ignore[no-untyped-def]
    low,
    high,
    cosine,
    sine,
    query_row,
    query_norm,
    key_norm,
    keys,
    values,
    kv_slot,
    head,
    dim,
    inside,
    epsilon,
    num_kv_slots,
    key_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalize and rotate heads; write queries in place, and keys and values to their KV slots.

    Args:
        low, high: float32 [a, b]; the lower and upper halves of heads, bias included. With HAS_NORM
            the b columns are one head.
        cosine, sine: float32, of that shape or broadcast to it, like the following arguments.
        query_row: start of the row of queries.
        kv_slot, head, dim: KV slot, head and dimension within its half of each element.
        inside: which elements exist.
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

    # The head at which a row's writes end: 0 without a KV slot, so that no KV entry is written.
    end = tl.where((kv_slot >= 0) & (kv_slot < num_kv_slots), NUM_HEADS + 2 * NUM_KV_HEADS, 0)
    to_cache = inside & (head < end)
    key_at = keys + kv_slot * key_stride + (head - NUM_HEADS) * HEAD_DIM + dim
    write_key = to_cache & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    tl.store(key_at, turned_low.to(keys.dtype.element_ty), mask=write_key)
    tl.store(key_at + HALF, turned_high.to(keys.dtype.element_ty), mask=write_key)
    value_at = values + kv_slot * value_stride + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + dim
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
    kv_slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    epsilon: tl.tensor,
    num_positions: tl.tensor,
    num_kv_slots: tl.tensor,
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
    kv_slot = tl.load(kv_slots + row).to(tl.int64)
    cosine = tl.load(cos_sin + position * HEAD_DIM + dim, mask=dim < HALF, other=1.0)
    sine = tl.load(cos_sin + position * HEAD_DIM + HALF + dim, mask=dim < HALF, other=0.0)

    at = head * HEAD_DIM + dim
    low = tl.load(qkv + row * qkv_stride + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv + row * qkv_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + at + HALF, mask=inside, other=0.0).to(tl.float32)
    write_kv_entries(
        low,
        high,
        cosine,
        sine,
        qkv + row * qkv_stride,
        query_norm,
        key_norm,
        keys,
        values,
        kv_slot,
        head,
        dim,
        inside,
        epsilon,
        num_kv_slots,
        key_stride,
        value_stride,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        HAS_NORM,
    )


_rope_kv_write: Any = triton.jit(_rope_kv_write_kernel, do_not_specialize=["num_positions", "num_kv_slots"])


def rope_kv_write(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    epsilon: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    strict: bool = False,
) -> None:
    """Apply bias, per-head norm and rotation; write keys and values to their KV slots.

    The rotated queries stay in ``qkv``.

    Args:
        qkv: [rows, num_heads + 2 * num_kv_heads, head_dim], or the same with the last two as one;
            16-bit or float32. Rows may be apart. The queries are replaced; keys and values stay
            as they are.
        bias: [num_heads + 2 * num_kv_heads, head_dim], contiguous in any shape, or None.
        query_norm, key_norm: [head_dim]; both or neither.
        cos_sin: float32 [positions, 2, head_dim / 2], contiguous: cosines, then sines (arXiv
            2104.09864).
        positions: int32 [rows]; clamped to cos_sin.
        kv_slots: int32 or int64 [rows]; KV slots. A row whose KV slot is not in the cache
            writes no KV entry.
        keys, values: [num_kv_slots, num_kv_heads, head_dim], 16-bit or float32; KV slots may be
            apart.
        strict: whether a head's norm has the same bits for any number of rows; all other results
            always do.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    num_kv_slots, num_kv_heads, head_dim = keys.shape
    heads = num_heads + 2 * num_kv_heads
    rows = len(qkv)
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM or qkv[:1].numel() not in (0, heads * head_dim):
        raise ValueError(f"no {num_heads} query heads and {num_kv_heads} key heads of {head_dim} in {tuple(qkv.shape)}")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("the heads of queries and keys must be both normed, or neither")
    if not (qkv[:1].is_contiguous() and cos_sin.is_contiguous() and cos_sin.shape[1:] == (2, head_dim // 2)):
        raise ValueError("rope_kv_write needs contiguous heads and angles [positions, 2, head_dim / 2]")
    if values.shape != keys.shape or not (keys[:1].is_contiguous() and values[:1].is_contiguous()):
        raise ValueError("keys and values must have one shape, and contiguous heads in a KV slot")
    if bias is not None and not (bias.is_contiguous() and bias.numel() == heads * head_dim):
        raise ValueError(f"a bias of {tuple(bias.shape)} does not fit {heads} heads of {head_dim}")
    if len(positions) < rows or len(kv_slots) < rows:
        raise ValueError(f"{len(positions)} positions and {len(kv_slots)} KV slots for {rows} rows")
    if rows == 0:
        return
    _rope_kv_write[(rows, triton.cdiv(heads, _HEADS))](
        qkv,
        bias if bias is not None else qkv,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        cos_sin,
        positions,
        kv_slots,
        keys,
        values,
        epsilon,
        len(cos_sin),
        num_kv_slots,
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
        # The number of warps determines the order in which a head's squares are added.
        num_warps=1 if rows >= _MANY_ROWS and not strict else 4,
    )
