import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.wide_gate_up import fits_wide_gate_up, pays_wide_gate_up, whole_tiles, wide_gate_up


def check(rows: int, size: int, in_features: int, device: str, apart: int = 0, programs: int = 4) -> None:
    """Compare with the definition; on a GPU in bfloat16, which the interpreter cannot multiply."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(rows * size)
    x = torch.randn(rows, in_features + apart, generator=generator).to(device, dtype)[:, :in_features]
    weight = (torch.randn(2 * size, in_features, generator=generator) / in_features**0.5).to(device, dtype)
    out = torch.full((rows + 1, size + apart), 7.0, device=device, dtype=dtype)
    wide_gate_up(x, weight, out[:rows, :size], programs)
    expected = reference.silu_and_multiply(*reference.linear(x.float(), weight.float()).split(size, dim=1))
    error = (out[:rows, :size].float() - expected).norm() / expected.norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert (out[rows:] == 7).all() and (out[:, size:] == 7).all()


@pytest.mark.parametrize("rows", [1, 64, 129, 256])
def test_every_row_count(rows: int, device: str) -> None:
    check(rows, 256, 128, device)


def test_sizes_that_end_within_a_tile(device: str) -> None:
    check(130, 200, 72, device)


def test_rows_that_are_apart(device: str) -> None:
    check(70, 128, 64, device, apart=8)


@pytest.mark.parametrize("programs", [1, 3, 4, 7, 8, 64])
def test_whole_and_half_tiles_together_are_all(programs: int, device: str) -> None:
    check(200, 384, 64, device, programs=programs)


def test_the_last_round_is_halved_where_it_has_few_tiles() -> None:
    assert whole_tiles(448, 132) == 396
    assert whole_tiles(896, 132) == 896
    assert whole_tiles(5, 132) == 0
    assert whole_tiles(264, 132) == 264


def test_where_it_was_measured_to_pay() -> None:
    """As measured on an H200, against cuBLAS and the activation's kernel."""
    rows = (160, 192, 256, 320, 512, 768, 1024, 2048, 4096)
    assert [pays_wide_gate_up(each, 14336, 132) for each in rows] == [False, False, True, False, *[True] * 5]
    rows = (160, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096)
    assert [pays_wide_gate_up(each, 8192, 132) for each in rows] == [False, False, True, False, *[True] * 6]


def test_what_does_not_fit() -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert fits_wide_gate_up(x, weight) and fits_wide_gate_up(x.half(), weight.half())
    assert not fits_wide_gate_up(x.half(), weight)
    assert not fits_wide_gate_up(x.float(), weight.float())
    assert not fits_wide_gate_up(torch.zeros(4, 65, dtype=torch.bfloat16)[:, :64], weight)
    assert not fits_wide_gate_up(torch.zeros(4, 72, dtype=torch.bfloat16)[:, 1:65], weight)
    with pytest.raises(ValueError, match="transposed"):
        wide_gate_up(x, weight, torch.zeros(4, 17, dtype=torch.bfloat16), 4)
    with pytest.raises(ValueError, match="contiguous"):
        wide_gate_up(x, weight.t().contiguous().t(), torch.zeros(4, 16, dtype=torch.bfloat16), 4)


def test_no_rows(device: str) -> None:
    x, weight, out = (torch.zeros(shape, device=device) for shape in ((0, 64), (32, 64), (0, 16)))
    wide_gate_up(x, weight, out, 4)
