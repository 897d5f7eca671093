"""SwiGLU's activation of gate and up in one buffer.

foretoken_kernels.reference.silu_and_multiply defines it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Eight elements a lane (16 bytes of bfloat16). A single row of 14336 gets 28 programs, so no SM has
# to process a whole row.
_BLOCK = 512
_NUM_WARPS = 2


def _silu_and_multiply_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    start = gate_up + row * gate_up_stride
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + size + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


_silu_and_multiply: Any = triton.jit(_silu_and_multiply_kernel)


def silu_and_multiply(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Compute ``out = gate * sigmoid(gate) * up``, element by element (SwiGLU, arXiv 2002.05202).

    Args:
        gate_up: [rows, 2 * size], 16-bit or float32: gate, then up. Rows may be apart, columns
            may not.
        out: [rows, size], 16-bit or float32; rows may be apart, columns may not. Written.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    rows, size = out.shape
    if gate_up.shape != (rows, 2 * size):
        raise ValueError(f"gate_up is {tuple(gate_up.shape)} for an output of {tuple(out.shape)}")
    if gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("silu_and_multiply needs contiguous columns")
    if rows == 0:
        return
    _silu_and_multiply[(rows, triton.cdiv(size, _BLOCK))](
        gate_up, out, size, gate_up.stride(0), out.stride(0), BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
