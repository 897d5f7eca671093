from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu import rope_kv_write as module
from foretoken_kernels.gpu.rope_kv_write import rope_kv_write


def check(
    rows: int,
    heads: tuple[int, int, int],
    has_bias: bool,
    has_norm: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: str,
    joined: bool = True,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    dtype, cache_dtype = dtypes
    torch.manual_seed(head_dim)
    all_heads = num_heads + 2 * num_kv_heads
    wide = torch.randn(rows, all_heads * head_dim + 32, device=device).to(dtype)
    qkv = wide[:, 32:] if joined else wide[:, 32:].reshape(rows, all_heads, head_dim)
    bias = torch.randn(all_heads, head_dim, device=device) if has_bias else None
    norms = torch.rand(2, head_dim, device=device) + 0.5 if has_norm else (None, None)
    cos_sin = torch.randn(20, 2, head_dim // 2, device=device)
    num_kv_slots = rows + 4
    positions = torch.randint(20, (rows,), dtype=torch.int32, device=device)
    kv_slots = torch.randperm(num_kv_slots, device=device)[:rows].int()
    # A cache with gaps between KV slots: one layer's slice of a wider pool.
    pool = torch.full((2, num_kv_slots, num_kv_heads + 1, head_dim), 7.0, device=device).to(cache_dtype)
    keys, values = pool[0, :, :num_kv_heads], pool[1, :, :num_kv_heads]
    expected_pool = pool.clone()
    before = qkv.clone()
    expected = reference.rope_kv_write(
        before.float().view(rows, all_heads, head_dim),
        bias,
        norms[0],
        norms[1],
        1e-6,
        cos_sin,
        positions,
        kv_slots,
        expected_pool[0, :, :num_kv_heads],
        expected_pool[1, :, :num_kv_heads],
    )
    rope_kv_write(qkv, bias, norms[0], norms[1], 1e-6, cos_sin, positions, kv_slots, keys, values, num_heads)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
    width = num_heads * head_dim
    found = qkv.reshape(rows, -1)
    torch.testing.assert_close(
        found[:, :width], expected.reshape(rows, width).to(dtype), rtol=tolerance[dtype], atol=1e-5
    )
    torch.testing.assert_close(pool, expected_pool, rtol=tolerance[cache_dtype], atol=1e-5)
    assert torch.equal(found[:, width:], before.reshape(rows, -1)[:, width:])


@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 128), (2, 1, 20), (5, 5, 96)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_kv_write(heads: tuple[int, int, int], has_bias: bool, has_norm: bool, device: str) -> None:
    check(3, heads, has_bias, has_norm, (torch.float32, torch.float32), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("joined", [False, True])
def test_element_types(dtype: torch.dtype, cache_dtype: torch.dtype, joined: bool, device: str) -> None:
    check(3, (4, 2, 64), True, True, (dtype, cache_dtype), device, joined)


def test_bad_positions_are_clamped_and_bad_kv_slots_not_written(device: str) -> None:
    torch.manual_seed(0)
    cos_sin = torch.randn(5, 2, 8, device=device)
    qkv = torch.randn(5, 4, 16, device=device)
    expected = reference.rotate(qkv[:, :2], cos_sin, torch.tensor([0, 4, 4, 0, 1], device=device))
    key = reference.rotate(qkv[:, 2:3], cos_sin, torch.tensor([0, 4, 4, 0, 1], device=device))
    positions = torch.tensor([-7, 5, 2**31 - 1, 0, 1], dtype=torch.int32, device=device)
    kv_slots = torch.tensor([-1, 3, 2**31 - 1, 2, 1], dtype=torch.int32, device=device)
    pool = torch.full((2, 5, 1, 16), 7.0, device=device)  # two KV slots after the three that the kernel knows of
    rope_kv_write(qkv, None, None, None, 1e-6, cos_sin, positions, kv_slots, pool[0, :3], pool[1, :3], 2)
    torch.testing.assert_close(qkv[:, :2], expected)
    torch.testing.assert_close(pool[0, [1, 2]], key[[4, 3]])
    assert torch.equal(pool[1, [1, 2]], qkv[[4, 3], 3:])
    assert (pool[:, [0, 3, 4]] == 7).all()


def test_refuses_other_shapes(device: str) -> None:
    qkv = torch.zeros(1, 4, 16, device=device)
    index = torch.zeros(1, dtype=torch.int32, device=device)
    cache = torch.zeros(3, 1, 16, device=device)
    cos_sin = torch.zeros(5, 2, 8, device=device)
    norm = torch.ones(16, device=device)
    with pytest.raises(ValueError, match="3 query heads"):
        rope_kv_write(qkv, None, None, None, 1e-6, cos_sin, index, index, cache, cache, 3)
    with pytest.raises(ValueError, match="both normed"):
        rope_kv_write(qkv, None, norm, None, 1e-6, cos_sin, index, index, cache, cache, 2)
    with pytest.raises(ValueError, match="a bias"):
        rope_kv_write(qkv, norm, None, None, 1e-6, cos_sin, index, index, cache, cache, 2)
    with pytest.raises(ValueError, match="0 KV slots for 1 rows"):
        rope_kv_write(qkv, None, None, None, 1e-6, cos_sin, index, index[:0], cache, cache, 2)


def turned(rows: int, strict: bool, device: str) -> torch.Tensor:
    """Return [rows, 4, 16]: the first of 300 rows with normed heads, after the kernel."""
    generator = torch.Generator(device).manual_seed(5)
    qkv = torch.randn(300, 4, 16, generator=generator, device=device)[:rows].clone()
    norm, cos_sin = torch.ones(16, device=device), torch.randn(300, 2, 8, generator=generator, device=device)
    cache = torch.zeros(2, 300, 1, 16, device=device)
    index = torch.arange(rows, dtype=torch.int32, device=device)
    rope_kv_write(qkv, None, norm, norm, 1e-6, cos_sin, index, index, cache[0], cache[1], 2, strict)
    return torch.cat([qkv, cache[:, :rows].transpose(0, 1).flatten(1, 2)], dim=1)


def test_strict_launches_are_alike(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the number of warps may depend on the rows, and warps share a head's sum."""
    warps = []
    plain = module._rope_kv_write

    class Recorder:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def launch(*arguments: object, **options: int) -> None:
                warps.append(options["num_warps"])
                plain[1, 1](*arguments, **options)

            return launch

    monkeypatch.setattr(module, "_rope_kv_write", Recorder())
    for strict in (False, True):
        for rows in (1, 300):
            turned(rows, strict, device)
    assert warps == [4, 1, 4, 4]


@pytest.mark.gpu
def test_in_strict_mode_normed_heads_have_the_same_bits_for_any_rows(device: str) -> None:
    whole = turned(300, True, device)
    for rows in (1, 7, 255, 256):
        assert torch.equal(turned(rows, True, device), whole[:rows])


@pytest.mark.gpu
def test_rope_kv_write_of_real_sizes(device: str) -> None:
    for rows in (1, 33, 512):
        check(rows, (32, 8, 128), False, False, (torch.bfloat16, torch.bfloat16), device)
        check(rows, (32, 8, 128), True, True, (torch.bfloat16, torch.bfloat16), device)
