"""Test the CPU kernels, except attention: results against definitions, bits across row counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.cpu.batch_check import longest_path
from foretoken_kernels.cpu.compile import inlined
from foretoken_kernels.cpu.kv_commit import kv_commit
from foretoken_kernels.cpu.linear import (
    ADD,
    PANEL,
    SILU_AND_MULTIPLY,
    STORE,
    SUM_FLOATS,
    linear,
    pack,
    pack_gate_up,
    panel_product,
)
from foretoken_kernels.cpu.rms_norm import rms_norm
from foretoken_kernels.cpu.rope_kv_write import rope_kv_write
from foretoken_kernels.cpu.simd import load, store
from foretoken_kernels.cpu.vector_math import exp
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.tree import ancestor_mask

# How panels and caches hold 16-bit types, for numba.
BITS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# A quarter of the distance of two neighbours at 1.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(BITS[tensor.dtype]).numpy()


def run_linear(
    x: torch.Tensor,
    packed: np.ndarray,
    out_features: int,
    mode: int = STORE,
    out: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    rows, in_features = x.shape
    result = torch.full((rows, out_features), torch.nan) if out is None else out.clone()
    for thread in range(threads):
        linear(
            x.contiguous().view(-1).numpy(),
            rows,
            in_features,
            packed,
            result.view(-1).numpy(),
            out_features,
            mode,
            (thread, threads),
            np.zeros(SUM_FLOATS, np.float32),
        )
    return result


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 100), st.integers(1, 3), st.sampled_from(list(BITS)))
def test_linear(rows: int, in_features: int, out_features: int, threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * 1000 + in_features)
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    stored = weight.to(dtype)
    weight, packed = stored.float(), pack(bits(stored))
    found = run_linear(x, packed, out_features, threads=threads)
    expected = reference.linear(x.double(), weight.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    base = torch.randn(rows, out_features)
    added = run_linear(x, packed, out_features, ADD, base, threads)
    torch.testing.assert_close(added, base + found, rtol=0, atol=0)


def test_a_row_of_linear_has_the_same_bits_at_every_row_count() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, 384), torch.randn(100, 384)
    packed = pack(weight.numpy())
    expected = torch.cat([run_linear(row[None], packed, 100) for row in x])
    for rows in range(1, 38):
        assert torch.equal(run_linear(x[:rows], packed, 100), expected[:rows])
        assert torch.equal(run_linear(x[-rows:], packed, 100, threads=2), expected[-rows:])


@pytest.mark.parametrize("dtype", BITS)
def test_a_panel_has_the_same_bits_however_many_registers_there_are(dtype: torch.dtype) -> None:
    few, many = panel_product(8, 6), panel_product(32, 8)

    @inlined
    def run_few(x: Any, depth: int, rows: int, weight: Any, out: Any) -> None:
        few(x, 0, depth, rows, weight, 0, out)

    @inlined
    def run_many(x: Any, depth: int, rows: int, weight: Any, out: Any) -> None:
        many(x, 0, depth, rows, weight, 0, out)

    torch.manual_seed(2)
    x, weight = torch.randn(8, 70), torch.randn(PANEL, 70)
    packed = pack(bits(weight.to(dtype)))
    whole = run_linear(x, packed, PANEL)
    for rows in range(1, 9):
        for run in (run_few, run_many)[rows > 6 :]:
            out = np.zeros(8 * PANEL, np.float32)
            run(x.view(-1).numpy(), 70, rows, packed, out)
            assert np.array_equal(out.reshape(8, PANEL)[:rows], whole[:rows].numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_give_the_bits_of_their_float32_copies(dtype: torch.dtype) -> None:
    """The smallest of them are subnormal in float16."""
    torch.manual_seed(1)
    scales = torch.logspace(-8, 0, 48)[:, None]
    x, weight = torch.randn(9, 64), (scales * torch.randn(48, 64)).to(dtype)
    narrow = run_linear(x, pack(bits(weight)), 48)
    assert torch.equal(narrow, run_linear(x, pack(weight.float().numpy()), 48))


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_gate_up(rows: int) -> None:
    torch.manual_seed(rows)
    x, gate, up = torch.randn(rows, 48), torch.randn(80, 48), torch.randn(80, 48)
    found = run_linear(x, pack_gate_up(gate.numpy(), up.numpy()), 80, SILU_AND_MULTIPLY)
    expected = reference.silu_and_multiply(reference.linear(x, gate), reference.linear(x, up))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    alone = run_linear(x[-1:], pack_gate_up(gate.numpy(), up.numpy()), 80, SILU_AND_MULTIPLY)
    assert torch.equal(alone[0], found[-1])


@inlined
def _exp_all(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, len(x), 16):
        store(out, i, exp(load(x, i)))


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 16 * 4096, dtype=np.float32)
    found = np.empty_like(x)
    _exp_all(x, found)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(found - expected) / np.spacing(expected.astype(np.float32))).max() <= 2


def test_exp_far_out() -> None:
    x = np.array([-np.inf, -1000.0, 0.0, 1000.0] * 4, np.float32)
    found = np.empty_like(x)
    _exp_all(x, found)
    assert found[2] == 1.0
    assert (found[:2] < 2e-38).all()
    assert np.isfinite(found).all()


def test_rms_norm_by_hand() -> None:
    """Rows of one value v: the mean of squares is v^2."""
    x = np.repeat(np.array([3.0, -0.5], np.float32), 16)
    out = np.empty(32, np.float32)
    weight = np.arange(16, dtype=np.float32)
    rms_norm((x, 16, 0), np.array([1, 0], np.int32), 2, 16, weight, np.float32(0.0), (out, 16, 0), (0, 1))
    np.testing.assert_allclose(out, np.concatenate([-weight, weight]), rtol=1e-6)


@pytest.mark.parametrize("size", [16, 64, 384])
def test_rms_norm(size: int) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(5, size), torch.randn(size)
    rows = np.array([4, 0, 0], np.int32)
    out = torch.full((3, size), torch.nan)
    for thread in range(2):
        arguments = (3, size, weight.numpy(), np.float32(1e-6))
        rms_norm((x.view(-1).numpy(), size, 0), rows, *arguments, (out.view(-1).numpy(), size, 0), (thread, 2))
    torch.testing.assert_close(out, reference.rms_norm(x[rows], weight, 1e-6), rtol=1e-5, atol=1e-6)


def test_rms_norm_between_columns_of_wider_rows() -> None:
    torch.manual_seed(2)
    x, weight, out = torch.randn(4, 48), torch.randn(16), torch.zeros(4, 64)
    rows = np.arange(4, dtype=np.int32)
    arguments = (rows, 4, 16, weight.numpy(), np.float32(1e-6))
    rms_norm((x.view(-1).numpy(), 48, 32), *arguments, (out.view(-1).numpy(), 64, 16), (0, 1))
    torch.testing.assert_close(out[:, 16:32], reference.rms_norm(x[:, 32:], weight, 1e-6), rtol=1e-5, atol=1e-6)
    assert not out[:, :16].any() and not out[:, 32:].any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", BITS)
def test_rope_kv_write(bias: bool, norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows, num_heads, num_kv_heads, head_dim, num_kv_slots = 7, 4, 2, 32, 20
    heads = num_heads + 2 * num_kv_heads
    qkv, bias_values = torch.randn(rows, heads, head_dim), torch.randn(heads, head_dim)
    query_norm, key_norm = torch.randn(head_dim), torch.randn(head_dim)
    cos_sin = torch.randn(50, 2, head_dim // 2)
    positions = np.array([0, 1, 2, 9, 49, 3, 3], np.int32)
    kv_slots = np.array([19, 0, 5, 6, 7, 2, 11], np.int32)
    keys, values = torch.zeros(2, num_kv_slots, num_kv_heads, head_dim, dtype=dtype)
    expected_keys, expected_values = keys.clone(), values.clone()
    queries = reference.rope_kv_write(
        qkv,
        bias_values if bias else None,
        query_norm if norm else None,
        key_norm if norm else None,
        1e-6,
        cos_sin,
        torch.from_numpy(positions),
        torch.from_numpy(kv_slots),
        expected_keys,
        expected_values,
    )
    weights = (bias_values.view(-1).numpy(), query_norm.numpy(), key_norm.numpy(), bias, norm, np.float32(1e-6))
    for thread in range(3):
        rope_kv_write(
            (num_heads, num_kv_heads, head_dim),
            (rows, positions, kv_slots),
            qkv.view(-1).numpy(),
            weights,
            cos_sin.view(-1).numpy(),
            bits(keys.view(-1)),
            bits(values.view(-1)),
            (thread, 3),
        )
    torch.testing.assert_close(qkv[:, :num_heads], queries, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, expected_keys, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_to_even(dtype: torch.dtype) -> None:
    @inlined
    def narrow(x: np.ndarray, out: np.ndarray) -> None:
        store(out, 0, load(x, 0))

    generator = np.random.default_rng(0)
    values = generator.integers(0, 2**32, 16 * 64, dtype=np.uint64).astype(np.uint32).view(np.float32)
    # Half way between two numbers of either type, the largest float32, minus zero; of float16 the
    # largest number and what rounds to infinity, a half of the smallest, and subnormal numbers.
    values[:4] = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x80000000], np.uint32).view(np.float32)
    values[4:12] = [1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 2**-25, 1.5 * 2**-24, -(2**-15) / 3, 6e-8]
    values[16:512] = generator.normal(size=496) * 10.0 ** generator.integers(-9, 5, 496)
    for x in values.reshape(-1, 16):
        out = torch.empty(16, dtype=dtype)
        narrow(x, bits(out))
        expected = torch.from_numpy(x.copy()).to(dtype)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=8))
def test_kv_commit(moves: list[tuple[int, int]]) -> None:
    cache = torch.arange(3 * 12 * 4, dtype=torch.float32).view(3, 12, 4)
    expected = cache.clone()
    src = np.array([move[0] for move in moves], np.int32)
    dst = np.array([move[1] for move in moves], np.int32)
    reference.kv_commit(expected, torch.from_numpy(src), torch.from_numpy(dst))
    kv_commit(cache.numpy(), src, dst)
    assert torch.equal(cache, expected)


def test_kv_commit_of_a_path_by_hand() -> None:
    """Path 0 -> 2 -> 3 of a tree at KV slots 5.. becomes KV slots 5, 6, 7."""
    cache = np.arange(10, dtype=np.float32).reshape(1, 10, 1)
    kv_commit(cache, np.array([5, 7, 8], np.int32), np.array([5, 6, 7], np.int32))
    assert cache.reshape(-1).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 8, 9]


def batch_arrays() -> dict[str, np.ndarray]:
    return {
        "token_ids": np.array([3, 4, 5], np.int32),
        "positions": np.array([4, 5, 5], np.int32),
        "kv_slots": np.array([8, 9, 10], np.int32),
        "row_seqs": np.zeros(3, np.int32),
        "context_lens": np.full(3, 4, np.int32),
        "masks": ancestor_mask(np.array([-1, 0, 0], np.int32)),
        "tree_starts": np.array([4], np.int32),
        "block_tables": np.array([[0, 2, 0]], np.int32),
        "logit_rows": np.array([2], np.int32),
        "context_starts": np.array([0], np.int32),
    }


# vocabulary, positions, blocks, block size
LIMITS = (6, 6, 3, 4)


def test_longest_path() -> None:
    assert longest_path(*batch_arrays().values(), LIMITS) == 6


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("token_ids", 1, 6),
        ("token_ids", 1, -1),
        ("positions", 1, 6),
        ("kv_slots", 1, 12),
        ("row_seqs", 1, 1),
        ("context_lens", 1, 13),
        ("context_lens", 1, -1),
        ("masks", (1, 0), 1 << 8),
    ],
)
def test_an_index_out_of_range_names_its_row(field: str, index: int, value: int) -> None:
    arrays = batch_arrays()
    arrays[field][index] = value
    assert longest_path(*arrays.values(), LIMITS) == -2


def test_bad_blocks_and_logit_rows_are_found() -> None:
    arrays = batch_arrays()
    arrays["block_tables"][0, 1] = 3
    assert longest_path(*arrays.values(), LIMITS) < 0
    arrays = batch_arrays()
    arrays["logit_rows"][0] = 3
    assert longest_path(*arrays.values(), LIMITS) < 0


def test_a_path_that_begins_later_is_shorter_and_its_first_blocks_are_not_read() -> None:
    arrays = batch_arrays()
    arrays["context_starts"][0], arrays["block_tables"][0, 0] = 4, 77
    assert longest_path(*arrays.values(), LIMITS) == 2


@pytest.mark.parametrize("start", [-1, 5])
def test_a_context_start_out_of_range_is_refused(start: int) -> None:
    arrays = batch_arrays()
    arrays["context_starts"][0] = start
    assert longest_path(*arrays.values(), LIMITS) == -1


def test_a_context_that_begins_where_it_ends_needs_a_tree() -> None:
    arrays = batch_arrays()
    arrays["context_starts"][0], arrays["masks"][1] = 4, 0
    assert longest_path(*arrays.values(), LIMITS) == -2


def test_an_empty_path_is_refused() -> None:
    arrays = batch_arrays()
    arrays["context_lens"][0], arrays["masks"][0] = 0, 0
    assert longest_path(*arrays.values(), LIMITS) == -1
