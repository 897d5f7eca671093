"""Copy rows: token embeddings, gathered and converted copies, one row for all."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # eight elements a lane: 16 bytes of bfloat16
_NUM_WARPS = 4


def _gather_rows_kernel(
    x: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    num_x_rows: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    zero_position: tl.tensor,
    HAS_ROWS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row).to(tl.int64)
        source = tl.minimum(tl.maximum(source, 0), num_x_rows - 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    read_size = size
    if HAS_POSITIONS:
        # Rows to be zeroed are not read.
        read_size = tl.where(tl.load(positions + row) == zero_position, 0, size)
    value = tl.load(x + source * x_stride + columns, mask=columns < read_size, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)


_gather_rows: Any = triton.jit(_gather_rows_kernel, do_not_specialize=["num_x_rows", "zero_position"])


def _gather(
    x: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    positions: torch.Tensor | None,
    zero_position: int,
) -> None:
    num_rows, size = out.shape
    if x.shape[1] != size or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"cannot copy rows of {tuple(x.shape)} to {tuple(out.shape)}: columns differ or lie apart")
    if num_rows == 0:
        return
    _gather_rows[(num_rows, triton.cdiv(size, _BLOCK))](
        x,
        rows if rows is not None else x,
        positions if positions is not None else x,
        out,
        len(x),
        size,
        x.stride(0),
        out.stride(0),
        zero_position,
        HAS_ROWS=rows is not None,
        HAS_POSITIONS=positions is not None,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def embed(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    positions: torch.Tensor | None = None,
    zero_position: int = -1,
) -> None:
    """Set ``out[r] = table[token_ids[r]]``, or zeros in rows whose position is ``zero_position``.

    Args:
        token_ids: int32 or int64 [rows]; clamped to the table.
        table: [vocab, size], 16-bit or float32.
        out: [rows, size], 16-bit or float32; rows may be apart, columns may not.
        positions: int32 [rows], or None: no row is zeroed.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    _check_rows(token_ids, out)
    _check_rows(positions, out)
    _gather(table, out, token_ids, positions, zero_position)


def copy_rows(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Set ``out[i] = x[rows[i]]``, converted to out's dtype. x and out must not overlap.

    Args:
        x: [num_rows, size], 16-bit or float32; rows may be apart, columns may not.
        out: [n, size], 16-bit or float32; rows may be apart, columns may not.
        rows: int32 or int64 [n], clamped to x's rows; None means all rows in order.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    _check_rows(rows if rows is not None else x, out)
    _gather(x, out, rows, None, 0)


def fill_rows(row: torch.Tensor, out: torch.Tensor) -> None:
    """Set ``out[i] = row`` for all i, for example a bias to which a matmul adds.

    Args:
        row: [size], 16-bit or float32, contiguous.
        out: [n, size], 16-bit or float32; rows may be apart, columns may not.
    """
    _gather(row.expand(out.shape), out, None, None, 0)


def _check_rows(indices: torch.Tensor | None, out: torch.Tensor) -> None:
    if indices is not None and len(indices) < len(out):
        raise ValueError(f"{len(indices)} indices for {len(out)} rows")
