"""x W^T whose row r depends on x's row r and the weight alone: foretoken_kernels.reference.linear, for strict mode.

Another tile is another instruction or another order of sums, and so are other parts of a split sum. Here both follow
from the weight's shape: more rows are more programs, side by side on the same features so that these are read from
memory once, and each sum goes through the input features in ascending order, in parts that are added up in theirs.

Tiles of bfloat16 have 64 rows, the fewest that Hopper's fastest matrix instruction takes. A row that is not there costs
no memory traffic, and at 64 rows a tensor core still multiplies faster than weights arrive (a multiprocessor takes some
32 bytes of them a cycle, 7 TB/s for an H200's 132), so a decode step of one row waits for memory as in fast mode, and a
tree of up to 64 nodes costs what one row does. With tiles of 16 a prompt would read its weights four times as often.
float32 goes without tensor cores, where each row counts: 16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.matmul_tile import MatmulWorkspace, multiply_tile
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, candidates

# Rows of one launch; more are several, one after the other, so that partial sums have a bound.
_LAUNCH_ROWS = 512
# For shapes that have no candidates: small ones and odd ones.
_SMALL = SkinnyConfig(block_n=64, block_k=64, split_k=1, num_stages=3, num_warps=4)
_WIDE = SkinnyConfig(block_n=32, block_k=32, split_k=1, num_stages=3, num_warps=4)


class StrictTile(NamedTuple):
    """Rows of a tile, and how the weight is cut up."""

    block_m: int
    config: SkinnyConfig


def strict_tile(out_features: int, in_features: int, gate_up: bool, dtype: torch.dtype, device: Device) -> StrictTile:
    """The one tile for a weight on a GPU: the most promising of 64 rows that could be timed in fast mode.

    For ``gate_up``, ``out_features`` counts the features of the result.
    """
    if dtype == torch.float32:
        return StrictTile(16, _WIDE)
    found = candidates(64, out_features, in_features, gate_up, device, limit=1)
    return StrictTile(64, found[0] if found else _SMALL)


def strict_workspace(tile: StrictTile, out_features: int, gate_up: bool, device: torch.device | str) -> MatmulWorkspace:
    """For launches of any number of rows with this tile; empty where sums are not split."""
    tiles, elements = _needs(tile, out_features, gate_up, _LAUNCH_ROWS)
    return MatmulWorkspace(
        torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def _needs(tile: StrictTile, out_features: int, gate_up: bool, rows: int) -> tuple[int, int]:
    """Counters and partial sums of a launch."""
    block_m, config = tile
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
    multiply_tile(
        x,
        weight,
        out,
        partials,
        counters,
        num_rows,
        out_features,
        in_features,
        split_size,
        x_stride,
        out_stride,
        tl.program_id(0) * BLOCK_M,
        tl.program_id(1),
        tl.program_id(2),
        tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
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
    """``out = x @ weight.T``, ``out += x @ weight.T`` with ``add``, or with ``gate_up`` (a weight of gate, then up)
    ``out = silu(x @ gate.T) * (x @ up.T)``. Sums are float32.

    Args:
        x: [rows, in_features], bfloat16, or float32 as weight. Rows may be apart, columns may not.
        weight: [out_features, in_features] or, for ``gate_up``, twice as many; contiguous, x's dtype.
        out: [rows, out_features], bfloat16 or float32; rows may be apart, columns may not. Not x.
        workspace: of strict_workspace for this tile, or a larger one.
        tile: of strict_tile; the same in each call with this weight, or the bits are not.
    """
    (rows, in_features), out_features = x.shape, out.shape[1]
    block_m, config = tile
    if len(out) != rows or weight.shape != ((2 if gate_up else 1) * out_features, in_features) or (add and gate_up):
        raise ValueError(f"{tuple(x.shape)} times {tuple(weight.shape)} transposed to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError("a strict matmul needs contiguous columns and a contiguous weight of x's dtype")
    tiles, elements = _needs(tile, out_features, gate_up, min(rows, _LAUNCH_ROWS))
    if workspace.partials.numel() < elements or workspace.counters.numel() < tiles:
        raise ValueError(f"the workspace is too small for {elements} partial sums of {tiles} tiles")
    split_size = math.ceil(in_features / (config.block_k * config.split_k)) * config.block_k
    for first in range(0, rows, _LAUNCH_ROWS):
        part, out_part = x[first : first + _LAUNCH_ROWS], out[first : first + _LAUNCH_ROWS]
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
            # Triton's interpreter, which alone takes tensors that are not on a GPU, does not multiply bfloat16.
            WIDEN=not x.is_cuda and x.dtype != torch.float32,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
        )


class StrictMatmuls:
    """A model's matmuls: one tile for each weight's shape, whatever the rows.

    Its matmuls must not run at the same time as each other (on two streams), since they share a workspace.
    """

    def __init__(self, device: torch.device | str, limits: Device | None = None) -> None:
        self._device, self._limits = device, limits or Device()
        self._tiles: dict[tuple[torch.Size, torch.dtype, bool], StrictTile] = {}
        self._workspace = strict_workspace(StrictTile(16, _WIDE), 0, False, device)

    def reserve(self, weight: torch.Tensor, gate_up: bool) -> bool:
        """Make room for partial sums; True if the workspace has moved, which CUDA graphs may know."""
        tile, out_features = self._tile(weight, gate_up), len(weight) // (2 if gate_up else 1)
        needed = strict_workspace(tile, out_features, gate_up, self._device)
        before = self._workspace
        self._workspace = MatmulWorkspace(
            *(max(pair, key=torch.Tensor.numel) for pair in zip(before, needed, strict=True))
        )
        return any(new is not old for new, old in zip(self._workspace, before, strict=True))

    def matmul(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """As matmul_choice.MatmulTable.matmul."""
        strict_matmul(x, weight, out, self._workspace, self._tile(weight, False), add)

    def gate_up(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As matmul_choice.MatmulTable.gate_up, always fused."""
        strict_matmul(x, weight, out, self._workspace, self._tile(weight, True), gate_up=True)

    def _tile(self, weight: torch.Tensor, gate_up: bool) -> StrictTile:
        key = weight.shape, weight.dtype, gate_up
        if key not in self._tiles:
            out_features = len(weight) // (2 if gate_up else 1)
            self._tiles[key] = strict_tile(out_features, weight.shape[1], gate_up, weight.dtype, self._limits)
        return self._tiles[key]
