from __future__ import annotations

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.activation import silu_and_multiply


def check(rows: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(size)
    gate_up = (torch.randn(rows, 2 * size + 16, device=device) * 4).to(dtype)[:, 16:]
    buffer = torch.full((rows, size + 8), 7.0, device=device, dtype=out_dtype)
    silu_and_multiply(gate_up, buffer[:, :size])
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = reference.silu_and_multiply(gate, up).to(out_dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[out_dtype]
    torch.testing.assert_close(buffer[:, :size], expected, rtol=tolerance, atol=1e-6)
    assert (buffer[:, size:] == 7).all()


@pytest.mark.parametrize("size", [24, 512, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_silu_and_multiply(size: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    check(3, size, dtype, out_dtype, device)


@pytest.mark.filterwarnings("ignore:overflow")  # exp(200) overflows to infinity on purpose
def test_large_gates_neither_overflow_nor_turn_to_nan(device: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 2.0, 3.0, 4.0, 5.0]], device=device)
    out = torch.empty(1, 4, device=device)
    silu_and_multiply(gate_up, out)
    assert out.tolist()[0] == pytest.approx([0.0, 600.0, 0.0, 0.0], abs=1e-30)


def test_refuses_other_shapes(device: str) -> None:
    with pytest.raises(ValueError, match="for an output of"):
        silu_and_multiply(torch.zeros(2, 30, device=device), torch.zeros(2, 16, device=device))


@pytest.mark.gpu
def test_silu_and_multiply_of_real_sizes(device: str) -> None:
    for rows in (1, 64, 700):
        check(rows, 14336, torch.bfloat16, torch.bfloat16, device)
