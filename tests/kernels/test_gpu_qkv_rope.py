from __future__ import annotations

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.qkv_rope import fits, qkv_rope
from foretoken_kernels.gpu.rope_kv_write import Rope
from foretoken_kernels.gpu.skinny_configs import SkinnyConfig
from foretoken_kernels.gpu.skinny_matmul import skinny_matmul_workspace

Heads = tuple[int, int, int]


def small(block_n: int, split_k: int) -> SkinnyConfig:
    return SkinnyConfig(block_n, 16, split_k, 2, 4)


def rope_of(
    rows: int, heads: Heads, has_bias: bool, has_norm: bool, cache: torch.Tensor, device: str, positions: int = 20
) -> Rope:
    num_heads, num_kv_heads, head_dim = heads
    norms = torch.rand(2, head_dim, device=device) + 0.5 if has_norm else (None, None)
    return Rope(
        torch.randn(num_heads + 2 * num_kv_heads, head_dim, device=device) if has_bias else None,
        norms[0],
        norms[1],
        1e-6,
        torch.randn(positions, 2, head_dim // 2, device=device),
        torch.randint(positions, (rows,), dtype=torch.int32, device=device),
        torch.randperm(cache.shape[1], device=device)[:rows].int(),
        cache[0, :, :num_kv_heads],
        cache[1, :, :num_kv_heads],
        num_heads,
    )


def check(
    rows: int,
    heads: Heads,
    config: SkinnyConfig,
    has_bias: bool,
    has_norm: bool,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: str,
    in_features: int = 96,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    features = (num_heads + 2 * num_kv_heads) * head_dim
    torch.manual_seed(head_dim + rows)
    x = torch.randn(rows, in_features + 16, device=device).to(dtypes[0])[:, 16:]
    weight = (torch.randn(features, in_features, device=device) * in_features**-0.5).to(dtypes[0])
    buffer = torch.randn(rows, features + 16, device=device).to(dtypes[1])
    # A cache with gaps between KV slots: one layer's slice of a wider pool.
    pool = torch.full((2, rows + 4, num_kv_heads + 1, head_dim), 7.0, device=device).to(dtypes[2])
    rope = rope_of(rows, heads, has_bias, has_norm, pool, device)
    expected_pool = pool.clone()
    expected = reference.rope_kv_write(
        reference.linear(x.float(), weight.float()).view(rows, -1, head_dim),
        *rope[:7],
        expected_pool[0, :, :num_kv_heads],
        expected_pool[1, :, :num_kv_heads],
    )
    workspace = skinny_matmul_workspace(features, config.split_k, device)
    workspace.partials.fill_(torch.nan)  # A kernel must use only what it has written itself.
    before, width = buffer.clone(), num_heads * head_dim
    tolerance = [1e-4 if dtype == torch.float32 else 2e-2 for dtype in dtypes]
    for _ in range(2):  # The second run starts with the counters that the first one left.
        pool.fill_(7.0)
        buffer.copy_(before)
        qkv_rope(x, weight, buffer[:, :features], rope, workspace, config)
        torch.testing.assert_close(
            buffer[:, :width].float(), expected.reshape(rows, width), rtol=tolerance[1], atol=tolerance[1]
        )
        torch.testing.assert_close(pool.float(), expected_pool.float(), rtol=tolerance[2], atol=tolerance[2])
        assert torch.equal(buffer[:, width:], before[:, width:])
    assert not workspace.counters.any()


@pytest.mark.parametrize(
    "heads", [(4, 2, 64), (3, 1, 32), (2, 1, 20), pytest.param((5, 5, 96), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("split_k", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_qkv_rope(heads: Heads, split_k: int, has_bias: bool, device: str) -> None:
    check(3, heads, small(32, split_k), has_bias, False, (torch.float32,) * 3, device)


@pytest.mark.parametrize("rows", [1, 17, 64, 100])
@pytest.mark.parametrize("split_k", [1, 2])
def test_heads_that_are_normed(rows: int, split_k: int, device: str) -> None:
    check(rows, (3, 1, 32), small(32, split_k), True, True, (torch.float32,) * 3, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_element_types(dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    check(3, (4, 2, 64), small(64, 1), False, True, (dtype, dtype, cache_dtype), device)


def test_sums_that_no_part_divides(device: str) -> None:
    check(2, (4, 2, 16), small(32, 3), True, False, (torch.float32,) * 3, device, in_features=50)


def test_bad_positions_are_clamped_and_bad_kv_slots_not_written(device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 32, device=device), torch.randn(4 * 16, 32, device=device)
    cache = torch.zeros(2, 6, 1, 16, device=device)
    rope = rope_of(4, (2, 1, 16), False, False, cache, device)._replace(
        positions=torch.tensor([-3, 400, 19, 0], dtype=torch.int32, device=device),
        kv_slots=torch.tensor([-1, 6, 2, 1 << 30], dtype=torch.int32, device=device),
    )
    out = torch.zeros(4, 64, device=device)
    qkv_rope(x, weight, out, rope, skinny_matmul_workspace(64, 1, device), small(32, 1))
    turned = reference.linear(x, weight).view(4, 4, 16)
    angles = torch.tensor([0, 19, 19, 0], device=device)
    expected = reference.rotate(turned, rope.cos_sin, angles)
    torch.testing.assert_close(out[:, :32].view(4, 2, 16), expected[:, :2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache[0, 2, 0], expected[2, 2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache[1, 2, 0], turned[2, 3], rtol=1e-4, atol=1e-4)
    cache[:, 2] = 0
    assert not cache.any()


def test_refuses_what_it_cannot_do(device: str) -> None:
    cache = torch.zeros(2, 6, 1, 32, device=device)
    rope = rope_of(3, (2, 1, 32), False, True, cache, device)
    workspace = skinny_matmul_workspace(128, 2, device)
    x, weight, out = (torch.zeros(shape, device=device) for shape in ((3, 16), (128, 16), (3, 128)))
    assert fits(small(32, 1), 32, True) and not fits(small(64, 1), 32, True) and fits(small(64, 1), 32, False)
    with pytest.raises(ValueError, match="whole heads of 32"):
        qkv_rope(x, weight, out, rope, workspace, small(64, 1))
    with pytest.raises(ValueError, match="2 and 1 heads of 32 are not 64 features"):
        qkv_rope(x, weight[:64], out[:, :64], rope, workspace, small(32, 1))
    with pytest.raises(ValueError, match="transposed"):
        qkv_rope(x, weight, out[:, :64], rope, workspace, small(32, 1))
    with pytest.raises(ValueError, match="x's dtype"):
        qkv_rope(x.bfloat16(), weight, out, rope, workspace, small(32, 1))
    with pytest.raises(ValueError, match="too small"):
        qkv_rope(x, weight, out, rope, skinny_matmul_workspace(0, 2, device), small(32, 2))
