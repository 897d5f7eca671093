"""Test that strict matmuls compute each row independently, bit for bit, at all row counts.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu import strict_matmul as module
from foretoken_kernels.gpu.matmul_tile import MatmulWorkspace
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, shared_memory
from foretoken_kernels.gpu.strict_matmul import (
    StrictMatmuls,
    StrictTile,
    strict_matmul,
    strict_tile,
    strict_workspace,
)

pytestmark = pytest.mark.usefixtures("strict_products")
HALVES = (torch.bfloat16, torch.float16)
MODES = ("store", "add", "gate_up")
# Shapes of Llama-3.1-8B; for gate and up, the features of the result.
SHAPES = [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False)]


class Matmul:
    """One weight, rows to multiply it with, and a workspace filled with NaN."""

    def __init__(
        self,
        rows: int,
        shape: tuple[int, int],
        tile: StrictTile,
        dtype: torch.dtype,
        mode: str,
        device: str,
        whole: bool = False,
    ) -> None:
        """``whole``: use whole numbers, whose sums are exact in any order."""
        out_features, in_features = shape
        generator = torch.Generator(device).manual_seed(rows)

        def noise(*sizes: int) -> torch.Tensor:
            if whole:
                return torch.randint(-1, 2, sizes, generator=generator, device=device).float()
            return torch.randn(sizes, generator=generator, device=device)

        scale = 1.0 if whole else in_features**-0.5
        self.tile, self.mode = tile, mode
        self.x = noise(rows, in_features + 16).to(dtype)[:, 16:]
        self.weight = (noise(out_features * (2 if mode == "gate_up" else 1), in_features) * scale).to(dtype)
        self.before = noise(rows, out_features + 16).to(dtype)
        self.workspace = strict_workspace(tile, out_features, mode == "gate_up", device)
        self.workspace.partials.fill_(torch.nan)

    def run(self, rows: slice) -> torch.Tensor:
        """Return [rows, out_features] of these rows, computed in one launch."""
        buffer = self.before[rows].clone()
        out = buffer[:, :-16]
        strict_matmul(
            self.x[rows],
            self.weight,
            out,
            self.workspace,
            self.tile,
            add=self.mode == "add",
            gate_up=self.mode == "gate_up",
        )
        assert torch.equal(buffer[:, -16:], self.before[rows][:, -16:])
        assert not self.workspace.counters.any()
        return out

    def defined(self) -> torch.Tensor:
        product = reference.linear(self.x.double(), self.weight.double())
        if self.mode == "gate_up":
            return reference.silu_and_multiply(*product.chunk(2, dim=1))
        return product + (self.before[:, :-16].double() if self.mode == "add" else 0.0)


def tile(block_m: int, split_k: int) -> StrictTile:
    return StrictTile(block_m, SkinnyConfig(32, 16, split_k, 2, 4))


def with_many(tile: StrictTile) -> StrictTile:
    """Return the tile with larger tiles, of other sizes, for more rows than it has.

    Triton's tiles have at least 16 features.
    """
    return tile._replace(many=SkinnyConfig(16, 16, tile.config.split_k, 2, 4))


def assert_rows_are_independent(made: Matmul, counts: tuple[int, ...]) -> None:
    """Check that each row has its bits of a launch of its own, in any place, and is right."""
    rows = len(made.x)
    alone = torch.cat([made.run(slice(row, row + 1)) for row in range(rows)])
    for count in counts:
        for first in range(0, rows, count):
            assert torch.equal(made.run(slice(first, first + count)), alone[first : first + count]), (first, count)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[alone.dtype]
    torch.testing.assert_close(alone.double(), made.defined(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in HALVES)])
@pytest.mark.parametrize("split_k", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("mode", MODES)
def test_rows_have_the_bits_that_they_have_alone(mode: str, split_k: int, dtype: torch.dtype, device: str) -> None:
    made = Matmul(19, (40, 56), tile(16, split_k), dtype, mode, device)
    assert_rows_are_independent(made, (3, 16, 19))


@pytest.mark.parametrize("split_k", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_tiles_of_many_rows_change_no_bit(
    mode: str, split_k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MANY_ROWS", 32)
    # In the interpreter NumPy multiplies, and its order of sums differs between tiles.
    whole = device == "cpu"
    made = Matmul(35, (40, 56), with_many(tile(16, split_k)), torch.float32, mode, device, whole)
    assert_rows_are_independent(made, (16, 17, 33, 35))


@pytest.mark.parametrize("mode", MODES)
def test_no_two_programs_share_partial_sums(mode: str, device: str) -> None:
    """On a GPU, programs run at once: each of three parts of two by two tiles has its own sums."""
    made = Matmul(19, (40, 56), tile(16, 3), torch.float32, mode, device)
    made.run(slice(0, 19))
    assert int(made.workspace.partials.isfinite().sum()) == 19 * 64 * 3 * (2 if mode == "gate_up" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_launches_of_many_rows_are_cut(mode: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAUNCH_ROWS", 32)
    made = Matmul(35, (24, 32), tile(16, 2), torch.float32, mode, device)
    assert_rows_are_independent(made, (33, 35))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_table_of_one_tile(dtype: torch.dtype, device: str) -> None:
    """The tiles of a model, with the calls of a forward pass; logits are float32."""
    generator = torch.Generator(device).manual_seed(1)
    x, weight, gate_up = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for shape in ((70, 48), (72, 48), (80, 48))
    )
    matmuls = StrictMatmuls(device)
    assert not matmuls.reserve(weight, False) and not matmuls.reserve(gate_up, True)
    logits, gated = torch.zeros(70, 72, device=device), torch.zeros(70, 40, dtype=dtype, device=device)
    matmuls.matmul(x, weight, logits)
    matmuls.gate_up(x, gate_up, gated)
    torch.testing.assert_close(logits.double(), reference.linear(x.double(), weight.double()), rtol=1e-4, atol=1e-4)
    for row in (0, 13, 64, 69):
        alone, alone_gated = torch.zeros(1, 72, device=device), torch.zeros(1, 40, dtype=dtype, device=device)
        matmuls.matmul(x[row : row + 1], weight, alone)
        matmuls.gate_up(x[row : row + 1], gate_up, alone_gated)
        assert torch.equal(alone[0], logits[row]) and torch.equal(alone_gated[0], gated[row])


def test_reserving_makes_room_for_the_largest() -> None:
    matmuls = StrictMatmuls("cpu")
    sizes, moved = [], []
    for out_features, in_features, gate_up in (*SHAPES, (64, 64, False)):
        weight = torch.empty(out_features * (1 + gate_up), in_features, dtype=torch.bfloat16)
        moved.append(matmuls.reserve(weight, gate_up))
        sizes.append(matmuls._workspace.partials.numel())
    # 512 rows of 4096 sums in four parts; the other sums are not split.
    assert sizes == sorted(sizes) and sizes[-1] == 512 * 4096 * 4
    assert len(matmuls._workspace.counters) == 4 * 32
    assert moved == [False, True] + 4 * [False]


def test_what_cannot_be_multiplied_is_refused(device: str) -> None:
    x, weight, out = (torch.zeros(shape, device=device) for shape in ((3, 16), (32, 16), (3, 32)))
    whole, parted = tile(16, 1), tile(16, 2)
    workspace = strict_workspace(whole, 32, False, device)
    with pytest.raises(ValueError, match="transposed"):
        strict_matmul(x, weight[:16], out, workspace, whole)
    with pytest.raises(ValueError, match="transposed"):
        strict_matmul(x, weight.repeat(2, 1), out, workspace, whole, add=True, gate_up=True)
    with pytest.raises(ValueError, match="x's dtype"):
        strict_matmul(x.bfloat16(), weight, out, workspace, whole)
    with pytest.raises(ValueError, match="too small"):
        strict_matmul(x, weight, out, workspace, parted)
    strict_matmul(x[:0], weight, out[:0], MatmulWorkspace(torch.zeros(0), torch.zeros(0)), parted)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_a_large_model(shape: tuple[int, int, bool]) -> None:
    """There are enough programs for 132 multiprocessors, and they fit in shared memory."""
    out_features, in_features, gate_up = shape
    block_m, config, many = strict_tile(*shape, torch.bfloat16, Device())
    assert many is not None and shared_memory(many, 128, gate_up) <= Device().shared_memory
    assert many.split_k == config.split_k and config.block_k % many.block_k == 0
    assert block_m == 64 and in_features % (config.block_k * config.split_k) == 0
    assert -(-out_features // config.block_n) * config.split_k >= 96
    assert shared_memory(config, block_m, gate_up) <= Device().shared_memory
    small = Device(84, 90_000)
    few, many = strict_tile(*shape, torch.bfloat16, small)[1:]
    assert shared_memory(few, block_m, gate_up) <= small.shared_memory
    # So that loads run beside products.
    assert many is not None and min(few.num_stages, many.num_stages) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_real_sizes_are_independent(shape: tuple[int, int, bool], mode: str, device: str) -> None:
    out_features, in_features, _ = shape
    made = Matmul(
        160,
        (out_features, in_features),
        strict_tile(out_features, in_features, mode == "gate_up", torch.bfloat16, Device()),
        torch.bfloat16,
        mode,
        device,
    )
    assert_rows_are_independent(made, (2, 7, 16, 63, 64, 65, 128, 160))
