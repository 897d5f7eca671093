"""x W^T whose row r depends on x's row r and the weight alone: foretoken_kernels.reference.linear, for strict mode.

Another instruction is another order of sums, and so are other parts of a split sum. Here both follow from the weight's
shape: an element's products are added 16 at a time by the same instruction, in ascending order of the input features,
in parts of the same length, and the parts are added up in theirs. How many rows and features a program has, and whether
it has one part of a sum or all of them, changes no bit.

Up to 64 rows a tile of bfloat16 has 64, the fewest that Hopper's fastest matrix instruction takes. A row that is not
there costs no memory traffic, and at 64 rows a tensor core still multiplies faster than weights arrive (a
multiprocessor takes some 32 bytes of them a cycle, 7 TB/s for an H200's 132), so a decode step of one row waits for
memory as in fast mode, and a tree of up to 64 nodes costs what one row does. More rows come in tiles of 128, by which a
weight is read half as often, side by side on the same features so that these are read from memory once. float32 goes
without tensor cores, where each row counts: 16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.matmul_tile import MatmulWorkspace, multiply_tile
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, candidates, shared_memory

# Rows of one launch; more are several, one after the other, so that partial sums have a bound.
_LAUNCH_ROWS = 512
# For shapes that have no candidates: small ones and odd ones.
_SMALL = SkinnyConfig(block_n=64, block_k=64, split_k=1, num_stages=3, num_warps=4)
_FLOAT32 = SkinnyConfig(block_n=32, block_k=32, split_k=1, num_stages=3, num_warps=4)
# Tiles of many rows.
_MANY_ROWS = 128
_MANY_BLOCK_N, _MANY_BLOCK_K, _MANY_STAGES, _MANY_WARPS = 128, 64, 4, 8


class StrictTile(NamedTuple):
    """How a weight is multiplied.

    Attributes:
        block_m: rows of a tile.
        config: how the weight is cut up.
        many: the same for more rows than ``block_m``, in tiles of 128; None: as for few. Its sums have the same parts,
            so ``block_k`` divides the other's.
        busy: so many tiles of many rows keep the GPU busy with all parts of a sum each.
    """

    block_m: int
    config: SkinnyConfig
    many: SkinnyConfig | None = None
    busy: int = 1


class _Launch(NamedTuple):
    """What a launch of some rows is: its tiles, and their programs."""

    block_m: int
    config: SkinnyConfig
    row_tiles: int
    feature_tiles: int
    in_turn: bool

    @classmethod
    def of(cls, tile: StrictTile, rows: int, out_features: int) -> _Launch:
        block_m, config, in_turn = tile.block_m, tile.config, False
        if tile.many is not None and rows > block_m:
            block_m, config = _MANY_ROWS, tile.many
            in_turn = triton.cdiv(rows, block_m) * triton.cdiv(out_features, config.block_n) >= tile.busy
        return cls(block_m, config, triton.cdiv(rows, block_m), triton.cdiv(out_features, config.block_n), in_turn)

    def workspace(self, gate_up: bool) -> tuple[int, int]:
        """Counters and partial sums."""
        if self.in_turn or self.config.split_k == 1:
            return 0, 0
        tiles = self.row_tiles * self.feature_tiles
        return tiles, tiles * self.config.split_k * (2 if gate_up else 1) * self.block_m * self.config.block_n


def strict_tile(out_features: int, in_features: int, gate_up: bool, dtype: torch.dtype, device: Device) -> StrictTile:
    """The one way for a weight on a GPU: up to 64 rows the most promising that could be timed in fast mode.

    For ``gate_up``, ``out_features`` counts the features of the result.
    """
    if dtype == torch.float32:
        return StrictTile(16, _FLOAT32)
    found = candidates(64, out_features, in_features, gate_up, device, limit=1)
    config = found[0] if found else _SMALL
    many = SkinnyConfig(_MANY_BLOCK_N, _MANY_BLOCK_K, config.split_k, _MANY_STAGES, _MANY_WARPS)
    fits = shared_memory(many, _MANY_ROWS, gate_up) <= device.shared_memory
    return StrictTile(64, config, many if fits else None, device.num_sms // 2)


def strict_workspace(tile: StrictTile, out_features: int, gate_up: bool, device: torch.device | str) -> MatmulWorkspace:
    """For launches of any number of rows with this tile; empty where sums are not split."""
    needs = [_Launch.of(tile, rows, out_features).workspace(gate_up) for rows in range(1, _LAUNCH_ROWS + 1)]
    tiles, elements = (max(sizes) for sizes in zip(*needs, strict=True))
    return MatmulWorkspace(
        torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


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
    IN_TURN: tl.constexpr,
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
        IN_TURN,
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
    if len(out) != rows or weight.shape != ((2 if gate_up else 1) * out_features, in_features) or (add and gate_up):
        raise ValueError(f"{tuple(x.shape)} times {tuple(weight.shape)} transposed to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError("a strict matmul needs contiguous columns and a contiguous weight of x's dtype")
    few = tile.config
    split_size = math.ceil(in_features / (few.block_k * few.split_k)) * few.block_k
    for first in range(0, rows, _LAUNCH_ROWS):
        part, out_part = x[first : first + _LAUNCH_ROWS], out[first : first + _LAUNCH_ROWS]
        launch = _Launch.of(tile, len(part), out_features)
        config = launch.config
        tiles, elements = launch.workspace(gate_up)
        if workspace.partials.numel() < elements or workspace.counters.numel() < tiles:
            raise ValueError(f"the workspace is too small for {elements} partial sums of {tiles} tiles")
        _strict_matmul[(launch.row_tiles, launch.feature_tiles, 1 if launch.in_turn else config.split_k)](
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
            BLOCK_M=launch.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLIT_K=config.split_k,
            EVEN_N=out_features % config.block_n == 0,
            EVEN_K=split_size * config.split_k == in_features,
            ADD=add,
            GATE_UP=gate_up,
            # Triton's interpreter, which alone takes tensors that are not on a GPU, does not multiply bfloat16.
            WIDEN=not x.is_cuda and x.dtype != torch.float32,
            IN_TURN=launch.in_turn,
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
        self._workspace = strict_workspace(StrictTile(16, _FLOAT32), 0, False, device)

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
