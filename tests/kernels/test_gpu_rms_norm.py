from __future__ import annotations

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.rms_norm import rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def check(rows: int, size: int, x_dtype: torch.dtype, out_dtype: torch.dtype, gathered: bool, device: str) -> None:
    torch.manual_seed(size)
    wide = torch.randn(rows, size + 48, device=device).to(x_dtype)
    x = wide[:, 16 : 16 + size]
    weight = torch.rand(size, device=device) + 0.5
    index = torch.tensor([rows - 1, 0, rows - 1, -3, rows + 5], dtype=torch.int32, device=device) if gathered else None
    n = 5 if gathered else rows
    buffer = torch.full((n, size + 32), 7.0, device=device, dtype=out_dtype)
    rms_norm(x, weight, 1e-5, buffer[:, 32:], index)
    chosen = x.float() if index is None else x.float()[index.long().clamp(0, rows - 1)]
    expected = reference.rms_norm(chosen, weight, 1e-5).to(out_dtype)
    torch.testing.assert_close(buffer[:, 32:], expected, rtol=TOLERANCE[out_dtype], atol=1e-6)
    assert (buffer[:, :32] == 7).all()


@pytest.mark.parametrize("size", [8, 200, 4096])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("x_dtype", list(TOLERANCE))
@pytest.mark.parametrize("out_dtype", list(TOLERANCE))
def test_rms_norm(size: int, gathered: bool, x_dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    check(3, size, x_dtype, out_dtype, gathered, device)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm_of_rows_that_are_kept(gathered: bool, dtype: torch.dtype, device: str) -> None:
    """The norm is computed from the kept, rounded rows."""
    torch.manual_seed(2)
    x, weight = torch.randn(7, 200, device=device), torch.rand(200, device=device)
    index = torch.tensor([6, 0, 6, -3, 9], dtype=torch.int32, device=device) if gathered else None
    chosen = x if index is None else x[index.long().clamp(0, 6)]
    out, kept = torch.empty_like(chosen), torch.full((len(chosen), 600), 7.0, device=device, dtype=dtype)
    rms_norm(x, weight, 1e-5, out, index, kept[:, 200:400])
    # The interpreter does not round to bfloat16 as a GPU does.
    torch.testing.assert_close(kept[:, 200:400], chosen.to(dtype), rtol=TOLERANCE[dtype], atol=1e-6)
    assert (kept[:, :200] == 7).all() and (kept[:, 400:] == 7).all()
    expected = reference.rms_norm(kept[:, 200:400].float(), weight, 1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_in_place(device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 96, device=device)
    weight = torch.rand(96, device=device)
    expected = reference.rms_norm(x, weight, 1e-6)
    rms_norm(x, weight, 1e-6, x)
    torch.testing.assert_close(x, expected)


def test_rms_norm_refuses_what_it_would_misread(device: str) -> None:
    x = torch.zeros(2, 64, device=device)
    weight = torch.ones(64, device=device)
    with pytest.raises(ValueError, match="contiguous columns"):
        rms_norm(x.repeat(1, 2)[:, ::2], weight, 1e-6, torch.empty_like(x))
    with pytest.raises(ValueError, match="row of x for each"):
        rms_norm(x[:1], weight, 1e-6, torch.empty_like(x))
    with pytest.raises(ValueError, match="with a weight"):
        rms_norm(x, weight[:32], 1e-6, torch.empty_like(x))
    with pytest.raises(ValueError, match="with a copy"):
        rms_norm(x, weight, 1e-6, torch.empty_like(x), copy=torch.empty(2, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4096, 5120, 8192, 16384])
def test_rms_norm_of_real_sizes(size: int, device: str) -> None:
    for rows in (1, 7, 64, 1024):
        check(rows, size, torch.bfloat16, torch.bfloat16, False, device)
