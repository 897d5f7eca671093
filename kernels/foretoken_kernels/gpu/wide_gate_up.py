"""Gate, up and activation for many rows, where a matmul waits for tensor cores, not for memory.

foretoken_kernels.reference.linear, twice, and silu_and_multiply define it. A program processes tile
after tile (a persistent kernel), and loads of its next tile begin before the last one is written.
The tensor memory accelerator of compute capability 9.0 loads a tile of gate and the same tile of up
as one operand. So one product computes both, and the thread that holds a gate's sum also holds its
up's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows, and features of gate and of up each: as much as registers of 8 warps and stages in shared
# memory can hold.
_BLOCK_M, _BLOCK_N, _BLOCK_K = 128, 128, 64
_NUM_STAGES, _NUM_WARPS = 4, 8
# The accelerator's alignment of addresses and of row distances, in bytes.
_ALIGNMENT = 16
# The least useful share of what all programs could compute in their rounds. On an H200, two shapes
# (Llama's of 8B and of 1B) take 2 to 10% less time than the library's matmul and the activation
# after it from 0.85 on, and more time below.
_LEAST_USE = 0.84

jit: Callable[[Any], Any] = triton.jit
jit_kernel: Callable[[Any], Any] = triton.jit(do_not_specialize=["num_rows", "num_whole"])


@jit
def _gate_up_tile(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_rows,
    size,
    in_features,
    out_stride,
    row,
    feature,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    sums = tl.zeros([M, 2 * N], tl.float32)
    for first in range(0, in_features, K):
        rows = x.load([row, first])
        both = tl.reshape(weight.load([0, feature, first]), [2 * N, K])
        sums = tl.dot(rows, tl.trans(both), sums, input_precision="ieee")
    gate, up = tl.split(tl.permute(tl.reshape(sums, [M, 2, N]), [0, 2, 1]))
    result = gate / (1.0 + tl.exp(-gate)) * up
    at = row + tl.arange(0, M)
    column = feature + tl.arange(0, N)
    offset = at.to(tl.int64)[:, None] * out_stride + column[None, :]
    inside = (at < num_rows)[:, None] & (column < size)[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)


@jit_kernel
def _wide_gate_up(  # type: ignore[no-untyped-def]
    x,
    half_x,
    weight,
    out,
    num_rows,
    size,
    in_features,
    out_stride,
    num_whole,
    PROGRAMS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    program = tl.program_id(0)
    # Adjacent tiles have the same features, so the weight is read from memory once.
    row_tiles = tl.cdiv(num_rows, M)
    for tile in tl.range(program, num_whole, PROGRAMS, flatten=True):
        row, feature = tile % row_tiles * M, tile // row_tiles * N
        _gate_up_tile(x, weight, out, num_rows, size, in_features, out_stride, row, feature, M, N, K)
    half_tile = 2 * num_whole + program
    row, feature = half_tile % (2 * row_tiles) * (M // 2), half_tile // (2 * row_tiles) * N
    if (feature < size) & (row < num_rows):
        _gate_up_tile(half_x, weight, out, num_rows, size, in_features, out_stride, row, feature, M // 2, N, K)


def whole_tiles(tiles: int, programs: int) -> int:
    """Return how many tiles to compute whole; the rest is cut in halves, at most one a program.

    Where the last round would have a tile for only a few of the programs, halves make it half as
    long.
    """
    rest = tiles % programs
    return tiles - rest if 2 * rest <= programs else tiles


def pays_wide_gate_up(rows: int, size: int, programs: int) -> bool:
    """Return whether ``wide_gate_up`` is faster than a library's matmul for so many rows.

    It is if they keep ``programs`` programs busy enough.
    """
    tiles = triton.cdiv(rows, _BLOCK_M) * triton.cdiv(size, _BLOCK_N)
    whole = whole_tiles(tiles, programs)
    rounds = triton.cdiv(whole, programs) + (0.5 if whole < tiles else 0.0)
    return bool(rows * size >= _LEAST_USE * rounds * programs * _BLOCK_M * _BLOCK_N)


def fits_wide_gate_up(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the accelerator accepts the tensors: 16-bit types, addresses divisible by 16.

    Does not check that the GPU has an accelerator.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    if x.stride(1) != 1 or not weight.is_contiguous():
        return False
    strides = (tensor.stride(0) * tensor.element_size() for tensor in (x, weight))
    return all(number % _ALIGNMENT == 0 for number in (*strides, x.data_ptr(), weight.data_ptr()))


def wide_gate_up(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, programs: int) -> None:
    """Compute ``out = silu(x @ gate.T) * (x @ up.T)``; sums are float32.

    Args:
        x: [rows, in_features], for which ``fits_wide_gate_up`` is true on a GPU; rows may be apart,
            columns may not.
        weight: [2 * size, in_features], contiguous, x's dtype: gate, then up.
        out: [rows, size]; rows may be apart, columns may not. Not x.
        programs: the GPU's number of multiprocessors.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    (rows, in_features), size = x.shape, out.shape[1]
    if len(out) != rows or weight.shape != (2 * size, in_features):
        raise ValueError(f"cannot multiply {tuple(x.shape)} by {tuple(weight.shape)} transposed to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError("gate and up need contiguous columns and a contiguous weight of x's dtype")
    if rows == 0:
        return
    tiles = triton.cdiv(rows, _BLOCK_M) * triton.cdiv(size, _BLOCK_N)
    strides = [x.stride(0), 1]
    _wide_gate_up[(programs,)](
        TensorDescriptor(x, list(x.shape), strides, [_BLOCK_M, _BLOCK_K]),
        TensorDescriptor(x, list(x.shape), strides, [_BLOCK_M // 2, _BLOCK_K]),
        TensorDescriptor(weight, [2, size, in_features], [size * in_features, in_features, 1], [2, _BLOCK_N, _BLOCK_K]),
        out,
        rows,
        size,
        in_features,
        out.stride(0),
        whole_tiles(tiles, programs),
        PROGRAMS=programs,
        M=_BLOCK_M,
        N=_BLOCK_N,
        K=_BLOCK_K,
        num_stages=_NUM_STAGES,
        num_warps=_NUM_WARPS,
    )
