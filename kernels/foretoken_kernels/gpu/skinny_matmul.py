"""Compute x W^T for at most 128 rows as fast as the weights can be read.

foretoken_kernels.reference.linear defines it. All rows are one tile: a program computes some output
features of all rows, and one part of the sum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.compile_ahead import launcher
from foretoken_kernels.gpu.matmul_tile import MatmulWorkspace, Product, multiply_tile
from foretoken_kernels.gpu.skinny_configs import MAX_ROWS, SkinnyConfig, block_rows


def skinny_matmul_workspace(out_features: int, split_k: int, device: torch.device | str) -> MatmulWorkspace:
    """Return a workspace for up to ``out_features`` features in up to ``split_k`` parts.

    For a gate_up matrix, ``out_features`` counts all of its rows.
    """
    padded = -(-out_features // 256) * 256
    return MatmulWorkspace(
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
    product = Product(x, weight, partials, counters, num_rows, in_features, split_size, x_stride)
    multiply_tile(
        product,
        out,
        out_features,
        out_stride,
        0,
        tile,
        tl.program_id(1),
        tile,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SPLIT_K,
        EVEN_N,
        EVEN_K,
        ADD,
        GATE_UP,
        False,
    )


_skinny_matmul: Any = triton.jit(_skinny_matmul_kernel, do_not_specialize=["num_rows"])


class Cut(NamedTuple):
    """Sizes of a launch: tiles of features, rows of a tile, input features of a part of the sum."""

    tiles: int
    block_m: int
    split_size: int


def cut(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: MatmulWorkspace,
    config: SkinnyConfig,
    matrices: int = 1,
) -> Cut:
    """Check a launch's arguments and return its sizes.

    Args:
        matrices: how many matrices of ``out``'s width the weight holds.

    Raises:
        ValueError: shapes, strides, types or the workspace do not fit.
    """
    (rows, in_features), out_features = x.shape, out.shape[1]
    if rows > MAX_ROWS or len(out) != rows or weight.shape != (matrices * out_features, in_features):
        raise ValueError(f"cannot multiply {tuple(x.shape)} by {tuple(weight.shape)} transposed to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError("a skinny matmul needs contiguous columns and a contiguous weight of x's dtype")
    block_m = block_rows(rows)
    tiles = triton.cdiv(out_features, config.block_n)
    split_size = math.ceil(in_features / (config.block_k * config.split_k)) * config.block_k
    elements = tiles * config.split_k * matrices * block_m * config.block_n
    if config.split_k > 1 and (workspace.partials.numel() < elements or workspace.counters.numel() < tiles):
        raise ValueError(f"the workspace is too small for {tiles} tiles of {elements // tiles} partial sums")
    return Cut(tiles, block_m, split_size)


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: MatmulWorkspace,
    config: SkinnyConfig,
    add: bool = False,
    gate_up: bool = False,
) -> None:
    """Compute ``out = x @ weight.T``, ``out += x @ weight.T``, or gate and up with the activation.

    With ``add`` it adds to ``out``; with ``gate_up`` it computes ``out = silu(x @ gate.T) * (x @
    up.T)``, where a program has the same features of both. Sums are float32.

    Args:
        x: [rows, in_features], at most 128 rows; 16-bit or float32, as weight. Rows may be apart,
            columns may not.
        weight: [out_features, in_features], or twice as many rows for ``gate_up``: gate, then up;
            contiguous, x's dtype.
        out: [rows, out_features], 16-bit or float32; rows may be apart, columns may not. Not x.
        workspace: from skinny_matmul_workspace, for at least ``config.split_k`` parts; unused if
            that is 1.
        config: ``block_n`` counts features of ``out``.

    Raises:
        ValueError: shapes, strides, types or the workspace do not fit.
    """
    if len(x) == 0:
        return
    out_features = out.shape[1]
    tiles, block_m, split_size = cut(x, weight, out, workspace, config, 2 if gate_up else 1)
    launcher(_skinny_matmul, (tiles, config.split_k))(
        x,
        weight,
        out,
        workspace.partials,
        workspace.counters,
        len(x),
        out_features,
        x.shape[1],
        split_size,
        x.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        EVEN_N=out_features % config.block_n == 0,
        EVEN_K=split_size * config.split_k == x.shape[1],
        ADD=add,
        GATE_UP=gate_up,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
    )
