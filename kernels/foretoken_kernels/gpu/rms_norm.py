"""RMSNorm of rows; foretoken_kernels.reference.rms_norm defines it.

One program holds one row, so the row is read once. The unchanged row (an embedding, a hidden state
to keep) can be copied in the same launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_SIZE = 16384
_ELEMENTS_PER_WARP = 512  # sixteen elements a lane: two 16-byte loads of 16-bit numbers


def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    copy: tl.tensor,
    num_x_rows: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    copy_stride: tl.tensor,
    epsilon: tl.tensor,
    HAS_ROWS: tl.constexpr,
    HAS_COPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row).to(tl.int64)
        source = tl.minimum(tl.maximum(source, 0), num_x_rows - 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    # Before the sum, so that both loads run at the same time.
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + source * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_COPY:
        copied = value.to(copy.dtype.element_ty)
        tl.store(copy + row * copy_stride + columns, copied, mask=inside)
        value = copied.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / size
    result = value * tl.rsqrt(mean + epsilon) * scale
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


_rms_norm: Any = triton.jit(_rms_norm_kernel, do_not_specialize=["num_x_rows"])


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> None:
    """Set ``out[i] = x[rows[i]] / sqrt(mean(x^2) + epsilon) * weight`` (arXiv 1910.07467).

    Args:
        x: [num_rows, size], 16-bit or float32; rows may be apart, columns may not. size is at
            most 16384.
        weight: float32 [size].
        out: [n, size], 16-bit or float32; rows may be apart, columns may not. May be x itself if
            ``rows`` is None.
        rows: int32 [n], clamped to x's rows; None means all rows in order.
        copy: None, or a tensor like ``out``, not x: first ``copy[i] = x[rows[i]]``, then the norm
            of ``copy``.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    num_rows, size = out.shape
    if copy is not None and (copy.shape != out.shape or copy.stride(1) != 1):
        raise ValueError(f"rms_norm of {tuple(out.shape)} with a copy {tuple(copy.shape)}")
    if size > MAX_SIZE or x.shape[1] != size or weight.shape != (size,):
        raise ValueError(f"rms_norm of {tuple(x.shape)} with a weight {tuple(weight.shape)} to {tuple(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1 or (rows is None and len(x) < num_rows):
        raise ValueError("rms_norm needs contiguous columns, and a row of x for each row of out")
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm[(num_rows,)](
        x,
        weight,
        out,
        rows if rows is not None else x,
        copy if copy is not None else out,
        len(x),
        size,
        x.stride(0),
        out.stride(0),
        copy.stride(0) if copy is not None else 0,
        epsilon,
        HAS_ROWS=rows is not None,
        HAS_COPY=copy is not None,
        BLOCK=block,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), 16),
    )
