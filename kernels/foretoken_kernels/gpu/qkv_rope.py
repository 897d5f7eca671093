"""Fuse the matmul of queries, keys and values with bias, norm, rotation and cache write.

reference.linear and reference.rope_kv_write define it. With few rows, a launch is over before the
next one begins, so one launch less a layer saves time. Rotation pairs the lower half of a head with
its upper half, so a program computes features of both: first of lower halves, then of the upper
ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.compile_ahead import launcher
from foretoken_kernels.gpu.matmul_tile import MatmulWorkspace, Product, sum_tile
from foretoken_kernels.gpu.rope_kv_write import Rope, write_kv_entries
from foretoken_kernels.gpu.skinny_configs import SkinnyConfig
from foretoken_kernels.gpu.skinny_matmul import cut


def _qkv_rope_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    epsilon: tl.tensor,
    num_rows: tl.tensor,
    in_features: tl.tensor,
    split_size: tl.tensor,
    num_positions: tl.tensor,
    num_kv_slots: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    PAIRS: tl.constexpr = BLOCK_N // 2
    NUM_PAIRS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HALF
    tile = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    is_row = m < num_rows
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    head = (pair // HALF)[None, :]
    dim = (pair % HALF)[None, :]
    inside = is_row[:, None] & (pair < NUM_PAIRS)[None, :]
    # Load the positions before the sums, to hide the latency.
    position = tl.load(positions + m, mask=is_row, other=0)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64)
    kv_slot = tl.load(kv_slots + m, mask=is_row, other=-1).to(tl.int64)
    angle = cos_sin + position[:, None] * HEAD_DIM + dim
    cosine = tl.load(angle, mask=inside, other=1.0)
    sine = tl.load(angle + HALF, mask=inside, other=0.0)

    # Features past the end repeat the last one and are not stored.
    feature = tl.arange(0, BLOCK_N)
    clamped = tl.minimum(tile * PAIRS + feature % PAIRS, NUM_PAIRS - 1)
    source = clamped // HALF * HEAD_DIM + clamped % HALF + tl.where(feature < PAIRS, 0, HALF)
    product = Product(x, weight, partials, counters, num_rows, in_features, split_size, x_stride)
    total, _, is_whole = sum_tile(
        product,
        source,
        in_features,
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
        m,
        tl.program_id(1),
        tile,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SPLIT_K,
        EVEN_K,
        False,
        WIDEN,
    )
    if is_whole:
        low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, PAIRS)), (0, 2, 1)))
        if HAS_BIAS:
            at = head * HEAD_DIM + dim
            low += tl.load(bias + at, mask=head * HALF + dim < NUM_PAIRS, other=0.0).to(tl.float32)
            high += tl.load(bias + at + HALF, mask=head * HALF + dim < NUM_PAIRS, other=0.0).to(tl.float32)
        write_kv_entries(
            low,
            high,
            cosine,
            sine,
            out + m.to(tl.int64)[:, None] * out_stride,
            query_norm,
            key_norm,
            keys,
            values,
            kv_slot[:, None],
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


_qkv_rope: Any = triton.jit(_qkv_rope_kernel, do_not_specialize=["num_rows", "num_positions", "num_kv_slots"])


def fits(config: SkinnyConfig, head_dim: int, has_norm: bool) -> bool:
    """Return whether a configuration works: a program must norm whole heads, or none."""
    return not has_norm or config.block_n == head_dim


def qkv_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rope: Rope,
    workspace: MatmulWorkspace,
    config: SkinnyConfig,
) -> None:
    """Apply rope_kv_write to ``x @ weight.T``; only the rotated queries are written to ``out``.

    Sums are float32 until the last operation.

    Args:
        x: [rows, in_features], at most 128 rows; 16-bit or float32, as weight. Rows may be apart,
            columns may not.
        weight: [(num_heads + 2 * num_kv_heads) * head_dim, in_features], contiguous, x's dtype.
        out: [rows, (num_heads + 2 * num_kv_heads) * head_dim]; 16-bit or float32; rows may be
            apart, columns may not. Not x. The columns after the queries stay as they are.
        rope: the other arguments of rope_kv_write.
        workspace: from skinny_matmul_workspace, for at least ``config.split_k`` parts; unused if
            that is 1.
        config: one for which ``fits`` is true.

    Raises:
        ValueError: shapes, strides, the workspace or the configuration do not fit.
    """
    num_kv_slots, num_kv_heads, head_dim = rope.keys.shape
    features = (rope.num_heads + 2 * num_kv_heads) * head_dim
    if len(weight) != features or head_dim % 2:
        raise ValueError(f"{rope.num_heads} and {num_kv_heads} heads of {head_dim} are not {len(weight)} features")
    has_norm = rope.query_norm is not None
    if not fits(config, head_dim, has_norm):
        raise ValueError(f"{config} does not hold whole heads of {head_dim}")
    if len(x) == 0:
        return
    tiles, block_m, split_size = cut(x, weight, out, workspace, config)
    launcher(_qkv_rope, (tiles, config.split_k))(
        x,
        weight,
        out,
        rope.bias if rope.bias is not None else x,
        rope.query_norm if rope.query_norm is not None else x,
        rope.key_norm if rope.key_norm is not None else x,
        rope.cos_sin,
        rope.positions,
        rope.kv_slots,
        rope.keys,
        rope.values,
        workspace.partials,
        workspace.counters,
        rope.epsilon,
        len(x),
        x.shape[1],
        split_size,
        len(rope.cos_sin),
        num_kv_slots,
        x.stride(0),
        out.stride(0),
        rope.keys.stride(0),
        rope.values.stride(0),
        NUM_HEADS=rope.num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_BIAS=rope.bias is not None,
        HAS_NORM=has_norm,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        EVEN_K=split_size * config.split_k == x.shape[1],
        # Tensors outside a GPU mean Triton's interpreter, which cannot multiply bfloat16.
        WIDEN=not x.is_cuda and x.dtype != torch.float32,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
    )
