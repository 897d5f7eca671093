"""x W^T whose row r depends on x's row r and the weight alone: foretoken_kernels.reference.linear, for strict mode.

Another instruction is another order of sums, and so are other parts of a split sum. Here both follow from the weight's
shape: an element's products are added 16 at a time by the same instruction, in ascending order of the input features,
in parts of the same length, and the parts are added up in theirs. How many rows and features a program has changes no
bit.

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
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, shared_memory

# Rows of one launch; more are several, one after the other, so that partial sums have a bound.
_LAUNCH_ROWS = 512
# For weights whose input features do not come in blocks of 128.
_SMALL = SkinnyConfig(block_n=64, block_k=64, split_k=1, num_stages=3, num_warps=4)
_FLOAT32 = SkinnyConfig(block_n=32, block_k=32, split_k=1, num_stages=3, num_warps=4)
# Rows of a tile of many rows.
_MANY_ROWS = 128
# Features whose weights a program of few rows reads, and how deep; in how many parts where there are few programs.
_FEATURES, _DEPTH, _PARTS = 64, 128, (4, 2)


class StrictTile(NamedTuple):
    """How a weight is multiplied.

    Attributes:
        block_m: rows of a tile.
        config: how the weight is cut up.
        many: the same for more rows than ``block_m``, in tiles of 128; None: as for few. Its sums have the same parts,
            so ``block_k`` divides the other's.
    """

    block_m: int
    config: SkinnyConfig
    many: SkinnyConfig | None = None

    def of(self, rows: int) -> tuple[int, SkinnyConfig]:
        """Rows of a tile, and how the weight is cut up, for so many rows."""
        if self.many is None or rows <= self.block_m:
            return self.block_m, self.config
        return _MANY_ROWS, self.many


def strict_tile(out_features: int, in_features: int, gate_up: bool, dtype: torch.dtype, device: Device) -> StrictTile:
    """The one way for a weight on a GPU: what was fastest for Llama-3.1-8B's on an H200, of all that give the same bits
    at all row counts. Nothing is timed, since a sum's parts must be those of every start.

    For ``gate_up``, ``out_features`` counts the features of the result.
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
    # One on each multiprocessor has deep pipelines, two side by side wait for each other's memory.
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
    """With as many stages as there is memory for; they change no bit. Two always fit: where memory is as scarce as
    that, on GPUs before Hopper, the compiler has a buffer less than stages."""
    while config.num_stages > 2 and shared_memory(config, rows, gate_up) > device.shared_memory:
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def strict_workspace(tile: StrictTile, out_features: int, gate_up: bool, device: torch.device | str) -> MatmulWorkspace:
    """For launches of any number of rows with this tile; empty where sums are not split."""
    needs = [_needs(tile, out_features, gate_up, rows) for rows in (min(tile.block_m, _LAUNCH_ROWS), _LAUNCH_ROWS)]
    tiles, elements = (max(sizes) for sizes in zip(*needs, strict=True))
    return MatmulWorkspace(
        torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def _needs(tile: StrictTile, out_features: int, gate_up: bool, rows: int) -> tuple[int, int]:
    """Counters and partial sums of a launch."""
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
    if len(out) != rows or weight.shape != ((2 if gate_up else 1) * out_features, in_features) or (add and gate_up):
        raise ValueError(f"{tuple(x.shape)} times {tuple(weight.shape)} transposed to {tuple(out.shape)}")
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
