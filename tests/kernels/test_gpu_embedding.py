from __future__ import annotations

import pytest
import torch
from foretoken_kernels.gpu.embedding import copy_rows, embed, fill_rows

# All values are bfloat16 and float16 numbers, so that no test depends on how a conversion rounds.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [40, 1100])
def test_embed(table_dtype: torch.dtype, out_dtype: torch.dtype, id_dtype: torch.dtype, size: int, device: str) -> None:
    torch.manual_seed(size)
    table = torch.randn(9, size, device=device).half().bfloat16().to(table_dtype)
    ids = torch.tensor([3, 8, 0, -1, 9, 2**30], dtype=id_dtype, device=device)
    buffer = torch.full((6, size + 24), 7.0, device=device, dtype=out_dtype)
    embed(ids, table, buffer[:, 8 : 8 + size])
    expected = torch.full_like(buffer, 7.0)
    expected[:, 8 : 8 + size] = table[[3, 8, 0, 0, 8, 8]].to(out_dtype)
    assert torch.equal(buffer, expected)


def test_embed_is_zero_at_the_zero_position(device: str) -> None:
    table = torch.randn(5, 16, device=device)
    table[2] = torch.nan  # zeros are written, not the row times zero
    ids = torch.tensor([1, 2, 4], device=device)
    positions = torch.tensor([7, 0, 3], dtype=torch.int32, device=device)
    out = torch.full((3, 16), 7.0, device=device)
    embed(ids, table, out, positions, zero_position=0)
    assert torch.equal(out, torch.stack([table[1], torch.zeros(16, device=device), table[4]]))
    embed(ids, table, out, positions, zero_position=3)
    assert torch.equal(out[2], torch.zeros(16, device=device)) and out[1].isnan().all()


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("gathered", [False, True])
def test_copy_rows(x_dtype: torch.dtype, out_dtype: torch.dtype, gathered: bool, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1200, device=device).half().bfloat16().to(x_dtype)[:, 100:1130]
    rows = torch.tensor([3, 3, -2, 4], dtype=torch.int32, device=device) if gathered else None
    buffer = torch.full((4, 1040), 7.0, device=device, dtype=out_dtype)
    copy_rows(x, buffer[:, 10:], rows)
    expected = (x[[3, 3, 0, 3]] if gathered else x).to(out_dtype)
    assert torch.equal(buffer[:, 10:], expected) and (buffer[:, :10] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fill_rows(dtype: torch.dtype, device: str) -> None:
    row = torch.randn(1030, device=device).half().bfloat16().float()
    buffer = torch.full((3, 1040), 7.0, device=device, dtype=dtype)
    fill_rows(row, buffer[:, :1030])
    assert torch.equal(buffer[:, :1030], row.to(dtype).expand(3, 1030)) and (buffer[:, 1030:] == 7).all()


def test_refuses_other_shapes(device: str) -> None:
    x = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match="cannot copy rows"):
        copy_rows(x, torch.zeros(3, 9, device=device))
    with pytest.raises(ValueError, match="3 indices for 4 rows"):
        copy_rows(x, torch.zeros(4, 8, device=device))
    with pytest.raises(ValueError, match="1 indices for 3 rows"):
        embed(torch.zeros(1, dtype=torch.int32, device=device), x, torch.zeros(3, 8, device=device))


@pytest.mark.gpu
def test_embed_from_a_table_of_more_than_2_gib(device: str) -> None:
    table = torch.empty(300_000, 4096, dtype=torch.bfloat16, device=device)
    table[299_999] = torch.arange(4096, device=device)
    out = torch.empty(2, 4096, dtype=torch.bfloat16, device=device)
    embed(torch.tensor([299_999, 2**31 - 1], dtype=torch.int32, device=device), table, out)
    assert torch.equal(out, table[299_999].expand(2, 4096))
