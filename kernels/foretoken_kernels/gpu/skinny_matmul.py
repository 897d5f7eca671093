"""x W^T for at most 128 rows, which is as fast as the weights can be read: foretoken_kernels.reference.linear.

A program has BLOCK_N output features and one of SPLIT_K parts of the sum, so that small matrices still keep every SM
busy. The last of a tile's programs to arrive adds the parts up, in the parts' order: the same bits every time, whoever
came last.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.skinny_configs import MAX_ROWS, SkinnyConfig, block_rows


class SkinnyWorkspace(NamedTuple):
    """What programs leave for each other. Kernels that may run at the same time need one each.

    Attributes:
        partials: float32 [elements].
        counters: int32 [tiles]; zero between kernels.
    """

    partials: torch.Tensor
    counters: torch.Tensor


def skinny_matmul_workspace(out_features: int, split_k: int, device: torch.device | str) -> SkinnyWorkspace:
    """A workspace for up to ``out_features`` (a gate_up matrix: all its rows) in up to ``split_k`` parts."""
    padded = -(-out_features // 256) * 256
    return SkinnyWorkspace(
        torch.empty(split_k * MAX_ROWS * padded, dtype=torch.float32, device=device),
        torch.zeros(padded // 16, dtype=torch.int32, device=device),
    )


def _skinny_matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    split_size: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ADD: tl.constexpr,
    GATE_UP: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = split * split_size + tl.arange(0, BLOCK_K)
    is_row = (m < num_rows)[:, None]
    is_output = is_row & (n < out_features)[None, :]
    # Features past the end repeat the last one and are not stored: a mask would only slow the loads down.
    source = n
    if not EVEN_N:
        source = tl.minimum(n, out_features - 1)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight + source.to(tl.int64)[:, None] * in_features + k[None, :]
    up_at = weight_at + out_features.to(tl.int64) * in_features
    out_at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ADD:
        # The sum begins with what is there, in the first part.
        limit = tl.where(split == 0, num_rows, 0)
        total += tl.load(out_at, mask=is_output & (m < limit)[:, None], other=0.0).to(tl.float32)
    for _ in range(0, split_size, BLOCK_K):
        if EVEN_K:
            rows = tl.load(x_at, mask=is_row, other=0.0)
            features = tl.load(weight_at, eviction_policy="evict_first")
        else:
            rows = tl.load(x_at, mask=is_row & (k < in_features)[None, :], other=0.0)
            features = tl.load(weight_at, mask=(k < in_features)[None, :], other=0.0, eviction_policy="evict_first")
        total = tl.dot(rows, tl.trans(features), total, input_precision="ieee")
        if GATE_UP:
            if EVEN_K:
                up_features = tl.load(up_at, eviction_policy="evict_first")
            else:
                up_features = tl.load(up_at, mask=(k < in_features)[None, :], other=0.0, eviction_policy="evict_first")
            up_total = tl.dot(rows, tl.trans(up_features), up_total, input_precision="ieee")
            up_at += BLOCK_K
        x_at += BLOCK_K
        weight_at += BLOCK_K
        k += BLOCK_K

    if SPLIT_K == 1:
        if GATE_UP:
            total = total / (1.0 + tl.exp(-total)) * up_total
        tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output)
    else:
        PARTS: tl.constexpr = 2 if GATE_UP else 1
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        inside_tile = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        start = partials + tile.to(tl.int64) * (SPLIT_K * PARTS * TILE) + inside_tile
        tl.store(start + split * (PARTS * TILE), total, mask=is_row)
        if GATE_UP:
            tl.store(start + split * (PARTS * TILE) + TILE, up_total, mask=is_row)
        # All threads' parts are written before one thread tells; what it learns holds for all threads behind it.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            # Every part is read back, this program's own too, past the first-level cache, which others do not write.
            total = tl.load(start, mask=is_row, other=0.0, cache_modifier=".cg")
            for part in tl.static_range(1, SPLIT_K):
                total += tl.load(start + part * (PARTS * TILE), mask=is_row, other=0.0, cache_modifier=".cg")
            if GATE_UP:
                up_total = tl.load(start + TILE, mask=is_row, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, SPLIT_K):
                    up_total += tl.load(
                        start + part * (PARTS * TILE) + TILE, mask=is_row, other=0.0, cache_modifier=".cg"
                    )
                total = total / (1.0 + tl.exp(-total)) * up_total
            tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output)
            tl.store(counters + tile, 0)


_skinny_matmul: Any = triton.jit(_skinny_matmul_kernel, do_not_specialize=["num_rows"])


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: SkinnyWorkspace,
    config: SkinnyConfig,
    add: bool = False,
) -> None:
    """``out = x @ weight.T``, or ``out += x @ weight.T`` with ``add``; sums are float32.

    Args:
        x: [rows, in_features], at most 128 rows; bfloat16, or float32 as weight. Rows may be apart, columns may not.
        weight: [out_features, in_features], contiguous, x's dtype.
        out: [rows, out_features], bfloat16 or float32; rows may be apart, columns may not. Not x.
        workspace: of skinny_matmul_workspace, for at least ``config.split_k`` parts; unused if that is 1.
    """
    _launch(x, weight, out, workspace, config, add, False)


def skinny_gate_up(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: SkinnyWorkspace, config: SkinnyConfig
) -> None:
    """``out = silu(x @ gate.T) * (x @ up.T)``: a program has the same features of gate and of up.

    Args:
        x: as for skinny_matmul.
        weight: [2 * size, in_features], contiguous: gate, then up.
        out: [rows, size].
        workspace: as for skinny_matmul.
        config: ``block_n`` counts features of ``out``.
    """
    _launch(x, weight, out, workspace, config, False, True)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: SkinnyWorkspace,
    config: SkinnyConfig,
    add: bool,
    gate_up: bool,
) -> None:
    (rows, in_features), out_features = x.shape, out.shape[1]
    matrices = 2 if gate_up else 1
    if rows > MAX_ROWS or len(out) != rows or weight.shape != (matrices * out_features, in_features):
        raise ValueError(f"{tuple(x.shape)} times {tuple(weight.shape)} transposed to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError("a skinny matmul needs contiguous columns and a contiguous weight of x's dtype")
    if rows == 0:
        return
    block_m = block_rows(rows)
    tiles = triton.cdiv(out_features, config.block_n)
    split_size = math.ceil(in_features / (config.block_k * config.split_k)) * config.block_k
    elements = tiles * config.split_k * matrices * block_m * config.block_n
    if config.split_k > 1 and (workspace.partials.numel() < elements or workspace.counters.numel() < tiles):
        raise ValueError(f"the workspace is too small for {tiles} tiles of {elements // tiles} partial sums")
    _skinny_matmul[(tiles, config.split_k)](
        x,
        weight,
        out,
        workspace.partials,
        workspace.counters,
        rows,
        out_features,
        in_features,
        split_size,
        x.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        EVEN_N=out_features % config.block_n == 0,
        EVEN_K=split_size * config.split_k == in_features,
        ADD=add,
        GATE_UP=gate_up,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
    )
