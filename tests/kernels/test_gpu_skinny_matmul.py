from __future__ import annotations

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, block_rows, candidates, shared_memory
from foretoken_kernels.gpu.skinny_matmul import skinny_matmul, skinny_matmul_workspace


def small(block_n: int, split_k: int) -> SkinnyConfig:
    return SkinnyConfig(block_n, 16, split_k, 2, 4)


def check(
    rows: int,
    shape: tuple[int, int],
    config: SkinnyConfig,
    dtypes: tuple[torch.dtype, torch.dtype],
    mode: str,
    device: str,
) -> None:
    out_features, in_features = shape
    torch.manual_seed(rows)
    x = torch.randn(rows, in_features + 16, device=device).to(dtypes[0])[:, 16:]
    weight = torch.randn(out_features * (2 if mode == "gate_up" else 1), in_features, device=device) * in_features**-0.5
    weight = weight.to(dtypes[0])
    buffer = torch.randn(rows, out_features + 16, device=device).to(dtypes[1])
    before = buffer.clone()
    out = buffer[:, :out_features]
    workspace = skinny_matmul_workspace(len(weight), config.split_k, device)
    workspace.partials.fill_(torch.nan)  # A kernel must use only what it has written itself.
    expected = reference.linear(x.double(), weight.double())
    if mode == "gate_up":
        expected = reference.silu_and_multiply(*expected.chunk(2, dim=1))
    for _ in range(2):  # The second run starts with the counters that the first one left.
        buffer.copy_(before)
        if mode == "gate_up":
            skinny_matmul(x, weight, out, workspace, config, gate_up=True)
        else:
            skinny_matmul(x, weight, out, workspace, config, mode == "add")
        wanted = expected + (before[:, :out_features].double() if mode == "add" else 0.0)
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtypes[1]]
        torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance * 0.3)
        assert torch.equal(buffer[:, out_features:], before[:, out_features:])
    assert not workspace.counters.any()


@pytest.mark.parametrize("rows", [1, 20, 97, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (3, 64))])
@pytest.mark.parametrize("split_k", [1, 4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["store", "add", "gate_up"])
def test_skinny_matmul(rows: int, split_k: int, mode: str, device: str) -> None:
    check(rows, (64, 128), small(32, split_k), (torch.float32, torch.float32), mode, device)


@pytest.mark.parametrize("shape", [(40, 128), (64, 72), (33, 50), (5, 8)])
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("mode", ["add", "gate_up"])
def test_shapes_that_no_tile_divides(shape: tuple[int, int], split_k: int, mode: str, device: str) -> None:
    check(3, shape, small(32, split_k), (torch.float32, torch.float32), mode, device)


@pytest.mark.parametrize("mode", ["store", "add", "gate_up"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_16_bit_results(mode: str, dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    check(3, (64, 128), small(16, 2), dtypes, mode, device)


def test_a_product_may_be_larger_than_float16_if_its_sum_is_not(device: str) -> None:
    x = torch.tensor([[300.0, 300.0] + [0.0] * 14], dtype=torch.float16, device=device)
    weight = torch.tensor([[300.0, -300.0] + [1.0] * 14] * 32, dtype=torch.float16, device=device)
    out = torch.full((1, 32), 7.0, dtype=torch.float16, device=device)
    skinny_matmul(x, weight, out, skinny_matmul_workspace(32, 1, device), small(32, 1))
    assert not out.any()


def test_refuses_other_shapes(device: str) -> None:
    workspace = skinny_matmul_workspace(32, 2, device)
    x, weight, out = (torch.zeros(shape, device=device) for shape in ((3, 16), (32, 16), (3, 32)))
    with pytest.raises(ValueError, match="transposed"):
        skinny_matmul(x, weight[:16], out, workspace, small(16, 1))
    with pytest.raises(ValueError, match="transposed"):
        skinny_matmul(x.repeat(43, 1), weight, out.repeat(43, 1), workspace, small(16, 1))
    with pytest.raises(ValueError, match="x's dtype"):
        skinny_matmul(x.bfloat16(), weight, out, workspace, small(16, 1))
    with pytest.raises(ValueError, match="too small"):
        skinny_matmul(x, weight, out, skinny_matmul_workspace(0, 2, device), small(16, 2))


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (14336, 4096)])
@pytest.mark.parametrize("gate_up", [False, True])
def test_candidates_fit(rows: int, shape: tuple[int, int], gate_up: bool) -> None:
    found = candidates(rows, *shape, gate_up)
    assert 1 <= len(found) <= 6 and len(set(found)) == len(found)
    for config in found:
        programs = -(-shape[0] // config.block_n) * config.split_k
        assert 64 <= programs <= 2200
        assert shared_memory(config, rows, gate_up) <= 220_000
        assert shape[1] % (config.block_k * config.split_k) == 0
    assert not candidates(rows, *shape, gate_up, Device(132, 10_000))


def test_tiny_matrices_have_no_candidates() -> None:
    assert candidates(4, 128, 64) == []


def test_tall_tiles_are_for_what_a_library_does_not_fuse() -> None:
    assert not candidates(65, 14336, 4096) and not candidates(96, 14336, 4096, gate_up=True)
    found = candidates(128, 14336, 4096, gate_up=True)
    assert found and found == candidates(97, 14336, 4096, gate_up=True)
    assert all(shared_memory(config, 128, True) <= Device().shared_memory for config in found)


def test_block_rows() -> None:
    assert [block_rows(n) for n in (1, 16, 17, 32, 33, 64, 65, 128)] == [16, 16, 32, 32, 64, 64, 128, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 64, 128])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (14336, 4096)])
@pytest.mark.parametrize("mode", ["store", "add", "gate_up"])
def test_candidates_of_real_sizes(rows: int, shape: tuple[int, int], mode: str, device: str) -> None:
    for config in candidates(rows, *shape, mode == "gate_up"):
        check(rows, shape, config, (torch.bfloat16, torch.bfloat16), mode, device)


@pytest.mark.gpu
def test_split_sums_have_the_same_bits_every_time(device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 4096, device=device).bfloat16()
    weight = torch.randn(4096, 4096, device=device).bfloat16()
    workspace = skinny_matmul_workspace(4096, 4, device)
    outs = torch.empty(50, 32, 4096, device=device)
    for out in outs:
        skinny_matmul(x, weight, out, workspace, SkinnyConfig(32, 128, 4, 4, 4))
    assert (outs == outs[0]).all()
