"""Compute x W^T for strict mode: row r depends on x's row r and the weight alone.

foretoken_kernels.reference.linear defines it. Another instruction, or other parts of a split sum,
would add in another order. Here the weight's shape determines both: the same instruction adds an
element's products 16 at a time, in ascending order of the input features, in parts of the same
length, and the parts are added in their order. The number of rows and features of a program changes
no bit.

Up to 64 rows, a tile of 16-bit numbers has 64 rows, the fewest that Hopper's fastest matrix
instruction takes. A missing row costs no memory traffic, and at 64 rows a tensor core still
multiplies faster than weights arrive (a multiprocessor receives some 32 bytes of them a cycle, 7
TB/s for an H200's 132). So a decode step of one row waits for memory as in fast mode, and a tree of
up to 64 nodes costs what one row does. More rows come in tiles of 128, which read a weight half as
often; tiles of the same features run side by side, so the weight is read from memory once. float32
does not use tensor cores, so each row counts: a tile has 16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.matmul_tile import MatmulWorkspace, Product, multiply_tile
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, shared_memory

# Most rows of one launch, so that partial sums have a bound; more rows take several launches, one
# after the other.
_LAUNCH_ROWS = 512
# For weights whose number of input features is not a multiple of 128.
_SMALL = SkinnyConfig(block_n=64, block_k=64, split_k=1, num_stages=3, num_warps=4)
_FLOAT32 = SkinnyConfig(block_n=32, block_k=32, split_k=1, num_stages=3, num_warps=4)
# Rows of a tile when there are many rows.
_MANY_ROWS = 128
# Tiles of few rows: features, input features at a time, and the numbers of parts to try where there
# are few programs.
_FEATURES, _DEPTH, _PARTS = 64, 128, (4, 2)


class StrictTile(NamedTuple):
    """Tiles for the matmuls with one weight.

    Attributes:
        block_m: rows of a tile.
        config: the tile of the weight.
        many: the same for more rows than ``block_m``, in tiles of 128; None: ``config`` for all.
            Its sums have the same parts, so its ``block_k`` divides the other one.
    """

    block_m: int
    config: SkinnyConfig
    many: SkinnyConfig | None = None

    def of(self, rows: int) -> tuple[int, SkinnyConfig]:
        """Return the rows of a tile and the configuration for this number of rows."""
        if self.many is None or rows <= self.block_m:
            return self.block_m, self.config
        return _MANY_ROWS, self.many


def strict_tile(out_features: int, in_features: int, gate_up: bool, dtype: torch.dtype, device: Device) -> StrictTile:
    """Return the only tile of a weight on a GPU.

    Of all tiles with the same bits at all row counts, it was the fastest for Llama-3.1-8B's weights
    on an H200. Nothing is timed, since a sum must have the same parts after every start.

    Args:
        out_features: for ``gate_up``, features of the result.
    """
    if dtype == torch.float32:
        return StrictTile(16, _FLOAT32)
    if in_features % _DEPTH:
        return StrictTile(64, _SMALL)
    block_n = _FEATURES // 2 if gate_up else _FEATURES
    programs = triton.cdiv(out_features, block_n)
    parts = 1
    if 3 * programs < 2 * device.num_sms:
        parts = next((count for count in _PARTS if in_features % (count * _DEPTH) == 0), 1)
    # A program alone on its multiprocessor gets a deep pipeline; shallow ones let two share it.
    stages = 5 if programs * parts <= device.num_sms else 3
    config = _fitting(SkinnyConfig(block_n, _DEPTH, parts, stages, 4), 64, gate_up, device)
    if gate_up or parts > 1:
        many = SkinnyConfig(128, 64, parts, 4, 8)
    elif programs > 4 * device.num_sms:
        many = SkinnyConfig(256, 64, parts, 3, 8)
    else:
        many = SkinnyConfig(64, _DEPTH, parts, 3, 8)
    return StrictTile(64, config, _fitting(many, _MANY_ROWS, gate_up, device))


def _fitting(config: SkinnyConfig, rows: int, gate_up: bool, device: Device) -> SkinnyConfig:
    """Reduce the stages until they fit in shared memory; this changes no bit.

    Two always fit: on GPUs before Hopper, where memory is so scarce, the compiler has one buffer
    fewer than stages.
    """
    while config.num_stages > 2 and shared_memory(config, rows, gate_up) > device.shared_memory:
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def strict_workspace(tile: StrictTile, out_features: int, gate_up: bool, device: torch.device | str) -> MatmulWorkspace:
    """Return a workspace for launches of any number of rows; empty if sums are not split."""
    needs = [_needs(tile, out_features, gate_up, rows) for rows in (min(tile.block_m, _LAUNCH_ROWS), _LAUNCH_ROWS)]
    tiles, elements = (max(sizes) for sizes in zip(*needs, strict=True))
    return MatmulWorkspace(
        torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def _needs(tile: StrictTile, out_features: int, gate_up: bool, rows: int) -> tuple[int, int]:
    """Return the numbers of counters and of partial sums of a launch."""
    block_m, config = tile.of(rows)
    if config.split_k == 1:
        return 0, 0
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(out_features, config.block_n)
    return tiles, tiles * config.split_k * (2 if gate_up else 1) * block_m * config.block_n


def _strict_matmul_kernel(
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
    WIDEN: tl.constexpr,
) -> None:
    product = Product(x, weight, partials, counters, num_rows, in_features, split_size, x_stride)
    first_row, feature_tile, split = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    tile = tl.program_id(0) * tl.num_programs(1) + feature_tile
    multiply_tile(
        product,
        out,
        out_features,
        out_stride,
        first_row,
        feature_tile,
        split,
        tile,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SPLIT_K,
        EVEN_N,
        EVEN_K,
        ADD,
        GATE_UP,
        WIDEN,
    )


_strict_matmul: Any = triton.jit(_strict_matmul_kernel, do_not_specialize=["num_rows"])


def strict_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: MatmulWorkspace,
    tile: StrictTile,
    add: bool = False,
    gate_up: bool = False,
) -> None:
    """Compute ``out = x @ weight.T``, ``out += x @ weight.T``, or gate and up with the activation.

    With ``add`` it adds to ``out``; with ``gate_up`` it computes ``out = silu(x @ gate.T) * (x @
    up.T)`` of a weight that holds gate, then up. Sums are float32.

    Args:
        x: [rows, in_features], 16-bit or float32, as weight. Rows may be apart, columns may not.
        weight: [out_features, in_features], or twice as many rows for ``gate_up``; contiguous, x's
            dtype.
        out: [rows, out_features], 16-bit or float32; rows may be apart, columns may not. Not x.
        workspace: from strict_workspace for this tile, or a larger one.
        tile: from strict_tile. With another tile for the same weight, the bits may differ.

    Raises:
        ValueError: shapes, strides, types or the workspace do not fit.
    """
    (rows, in_features), out_features = x.shape, out.shape[1]
    if len(out) != rows or weight.shape != ((2 if gate_up else 1) * out_features, in_features) or (add and gate_up):
        raise ValueError(f"cannot multiply {tuple(x.shape)} by {tuple(weight.shape)} transposed to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError("a strict matmul needs contiguous columns and a contiguous weight of x's dtype")
    few = tile.config
    split_size = math.ceil(in_features / (few.block_k * few.split_k)) * few.block_k
    for first in range(0, rows, _LAUNCH_ROWS):
        part, out_part = x[first : first + _LAUNCH_ROWS], out[first : first + _LAUNCH_ROWS]
        block_m, config = tile.of(len(part))
        tiles, elements = _needs(tile, out_features, gate_up, len(part))
        if workspace.partials.numel() < elements or workspace.counters.numel() < tiles:
            raise ValueError(f"the workspace is too small for {elements} partial sums of {tiles} tiles")
        grid = triton.cdiv(len(part), block_m), triton.cdiv(out_features, config.block_n), config.split_k
        _strict_matmul[grid](
            part,
            weight,
            out_part,
            workspace.partials,
            workspace.counters,
            len(part),
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
            # Tensors outside a GPU mean Triton's interpreter, which cannot multiply bfloat16.
            WIDEN=not x.is_cuda and x.dtype != torch.float32,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
        )


class StrictMatmuls:
    """A model's matmuls: one tile for each weight's shape, whatever the number of rows.

    They share a workspace, so they must not run at the same time (on two streams).
    """

    def __init__(self, device: torch.device | str, limits: Device | None = None) -> None:
        self._device, self._limits = device, limits or Device()
        self._tiles: dict[tuple[torch.Size, torch.dtype, bool], StrictTile] = {}
        self._workspace = strict_workspace(StrictTile(16, _FLOAT32), 0, False, device)

    def reserve(self, weight: torch.Tensor, gate_up: bool) -> bool:
        """Make room for partial sums; return True if the workspace moved.

        CUDA graphs captured before must then be captured again.
        """
        tile, out_features = self._tile(weight, gate_up), len(weight) // (2 if gate_up else 1)
        needed = strict_workspace(tile, out_features, gate_up, self._device)
        before = self._workspace
        self._workspace = MatmulWorkspace(
            *(max(pair, key=torch.Tensor.numel) for pair in zip(before, needed, strict=True))
        )
        return any(new is not old for new, old in zip(self._workspace, before, strict=True))

    def matmul(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Compute MatmulTable.matmul (matmul_choice)."""
        strict_matmul(x, weight, out, self._workspace, self._tile(weight, False), add)

    def gate_up(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Compute MatmulTable.gate_up (matmul_choice), always fused."""
        strict_matmul(x, weight, out, self._workspace, self._tile(weight, True), gate_up=True)

    def _tile(self, weight: torch.Tensor, gate_up: bool) -> StrictTile:
        key = weight.shape, weight.dtype, gate_up
        if key not in self._tiles:
            out_features = len(weight) // (2 if gate_up else 1)
            self._tiles[key] = strict_tile(out_features, weight.shape[1], gate_up, weight.dtype, self._limits)
        return self._tiles[key]
