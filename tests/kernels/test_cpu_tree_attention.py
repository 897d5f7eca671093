"""Test the CPU attention: results against its definition, bits across batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.cpu.attention_blocks import PARTIAL_FLOATS
from foretoken_kernels.cpu.compile import compiled
from foretoken_kernels.cpu.tree_attention import ROW_TILE
from foretoken_kernels.cpu.tree_attention import tree_attention as inlined_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.tree import ancestor_mask

# It takes half a minute to compile for three types: on disk it outlives the run.
tree_attention = compiled(cast(Any, inlined_attention).py_func)


@dataclass
class Rows:
    """The arguments of a call that describe the batch."""

    row_seqs: np.ndarray
    context_lens: np.ndarray
    masks: np.ndarray
    tree_starts: np.ndarray
    block_tables: np.ndarray
    context_starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))

    def select(self, rows: list[int]) -> Rows:
        chosen = self.row_seqs[rows], self.context_lens[rows], self.masks[rows]
        return Rows(*chosen, self.tree_starts, self.block_tables, self.context_starts)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, block_size: int, threads: int = 1
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    stride = 512
    out = torch.full((num_rows * num_heads * head_dim,), torch.nan)
    batch = (
        num_rows,
        rows.row_seqs,
        rows.context_lens,
        rows.masks.reshape(-1),
        rows.masks.shape[1],
        rows.tree_starts,
        rows.block_tables.reshape(-1),
        rows.block_tables.shape[1],
        rows.context_starts,
    )
    for thread in range(threads):
        group = num_heads // num_kv_heads
        scratch = (
            np.full(ROW_TILE * group * stride, np.nan, np.float32),
            np.zeros(ROW_TILE * stride, np.int64),
            np.zeros(ROW_TILE, np.int64),
            np.zeros(PARTIAL_FLOATS, np.float32),
            np.zeros(ROW_TILE * group * head_dim, np.float32),
            np.full(ROW_TILE * group * head_dim, np.nan, np.float32),
        )
        tree_attention(
            (num_heads, num_kv_heads, head_dim, block_size, stride),
            batch,
            (query.contiguous().view(-1).numpy(), num_heads * head_dim),
            keys.view(-1).numpy(),
            values.view(-1).numpy(),
            out.numpy(),
            scratch,
            (thread, threads),
        )
    return out.view(num_rows, num_heads, head_dim)


def defined(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, block_size: int) -> torch.Tensor:
    return reference.tree_attention(
        query.double(),
        keys,
        values,
        torch.from_numpy(rows.row_seqs),
        torch.from_numpy(rows.context_lens),
        torch.from_numpy(rows.masks),
        torch.from_numpy(rows.tree_starts),
        torch.from_numpy(rows.block_tables),
        block_size,
        torch.from_numpy(rows.context_starts),
    )


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[Rows, int]:
    """Draw sequences with a prefill chunk or a tree each, over shuffled blocks."""
    block_size = draw(st.sampled_from([1, 3, 16, 32]))
    num_seqs = draw(st.integers(1, 3))
    max_blocks = -(-200 // block_size)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = generator.permutation(num_seqs * max_blocks).astype(np.int32).reshape(num_seqs, max_blocks)
    seqs, contexts, masks, starts, firsts = [], [], [], [], []
    for seq in range(num_seqs):
        start = draw(st.integers(0, 80))
        starts.append(start)
        firsts.append(draw(st.one_of(st.just(0), st.integers(0, start))))
        if draw(st.booleans()):
            length = draw(st.integers(1, 20))
            seqs += [seq] * length
            contexts += list(range(start + 1, start + 1 + length))
            masks += [np.zeros(2, np.uint64)] * length
        else:
            nodes = draw(st.integers(1, 100))
            parents = np.array([-1] + [generator.integers(0, i) for i in range(1, nodes)], np.int32)
            bits = ancestor_mask(parents)
            masks += list(np.pad(bits, ((0, 0), (0, 2 - bits.shape[1]))))
            seqs += [seq] * nodes
            contexts += [start] * nodes
    return (
        Rows(
            np.array(seqs, np.int32),
            np.array(contexts, np.int32),
            np.array(masks, np.uint64),
            np.array(starts, np.int32),
            tables,
            np.array(firsts, np.int32),
        ),
        block_size,
    )


def random_tensors(
    rows: Rows, block_size: int, heads: tuple[int, int, int], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    num_kv_slots = rows.block_tables.size * block_size
    query = 2 * torch.randn(len(rows.row_seqs), num_heads, head_dim, generator=generator)
    keys = torch.randn(num_kv_slots, num_kv_heads, head_dim, generator=generator)
    return query, keys, torch.randn(num_kv_slots, num_kv_heads, head_dim, generator=generator)


@settings(max_examples=40)
@given(ragged_rows(), st.sampled_from([(6, 2, 64), (4, 4, 16), (4, 1, 80), (2, 1, 128)]), st.integers(0, 1000))
def test_equals_its_definition(drawn: tuple[Rows, int], heads: tuple[int, int, int], seed: int) -> None:
    rows, block_size = drawn
    query, keys, values = random_tensors(rows, block_size, heads, seed)
    found = attend(query, keys, values, rows, block_size)
    torch.testing.assert_close(found.double(), defined(query, keys, values, rows, block_size), rtol=0, atol=5e-6)


@settings(max_examples=25)
@given(ragged_rows(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_a_row_has_the_same_bits_in_any_batch(drawn: tuple[Rows, int], random, threads: int) -> None:  # type: ignore[no-untyped-def]
    rows, block_size = drawn
    query, keys, values = random_tensors(rows, block_size, (6, 2, 64), 1)
    together = attend(query, keys, values, rows, block_size)
    chosen = random.sample(range(len(query)), min(len(query), 11))
    some = attend(query[chosen], keys, values, rows.select(chosen), block_size, threads)
    assert torch.equal(some, together[chosen])
    alone = attend(query[chosen[:1]], keys, values, rows.select(chosen[:1]), block_size)
    assert torch.equal(alone[0], together[chosen[0]])


def test_a_tree_node_has_the_bits_of_its_path_as_plain_text() -> None:
    """The path 0 -> 2 -> 4 after 37 tokens, with siblings between, against contiguous keys."""
    parents = np.array([-1, 0, 0, 1, 2], np.int32)
    table = np.arange(4, dtype=np.int32)[None]
    tree = Rows(
        np.zeros(5, np.int32), np.full(5, 37, np.int32), ancestor_mask(parents), np.array([37], np.int32), table
    )
    query, keys, values = random_tensors(tree, 16, (6, 2, 64), 3)
    in_tree = attend(query, keys, values, tree, 16)[4]
    moved_keys, moved_values = keys.clone(), values.clone()
    for src, dst in ((39, 38), (41, 39)):
        moved_keys[dst], moved_values[dst] = keys[src], values[src]
    plain = Rows(
        np.zeros(1, np.int32), np.array([40], np.int32), np.zeros((1, 1), np.uint64), np.zeros(1, np.int32), table
    )
    assert torch.equal(attend(query[4:], moved_keys, moved_values, plain, 16)[0], in_tree)


@pytest.mark.parametrize("start", [1, 5, 16, 37])
def test_kv_slots_before_the_start_of_a_context_are_invisible_and_shift_nothing(start: int) -> None:
    """A text without its missing part gives the same result, for a tree and a prefill chunk."""
    parents = np.array([-1, 0, 0, 1, 2], np.int32)
    table = np.arange(8, dtype=np.int32)[None]
    whole = Rows(
        np.zeros(9, np.int32),
        np.array([37] * 5 + [38, 39, 40, 41], np.int32),
        np.concatenate([ancestor_mask(parents), np.zeros((4, 1), np.uint64)]),
        np.array([37], np.int32),
        table,
        np.array([start], np.int32),
    )
    query, keys, values = random_tensors(whole, 8, (6, 2, 64), 3)
    late = attend(query, keys, values, whole, 8, threads=2)
    keys[:start], values[:start] = torch.nan, torch.nan
    assert torch.equal(attend(query, keys, values, whole, 8), late)
    cut = Rows(whole.row_seqs, whole.context_lens - start, whole.masks, whole.tree_starts - start, table)
    pad = torch.zeros(start, 2, 64)
    moved = attend(query, torch.cat([keys[start:], pad]), torch.cat([values[start:], pad]), cut, 8)
    assert torch.equal(moved, late)


def test_the_block_size_does_not_change_bits() -> None:
    table = np.arange(96, dtype=np.int32)[None]
    plain = Rows(
        np.zeros(1, np.int32), np.array([93], np.int32), np.zeros((1, 1), np.uint64), np.zeros(1, np.int32), table
    )
    query, keys, values = random_tensors(plain, 1, (2, 1, 64), 5)
    expected = attend(query, keys, values, plain, 1)
    for block_size in (7, 16, 64):
        assert torch.equal(attend(query, keys, values, plain, block_size), expected)


def test_siblings_are_invisible() -> None:
    """A sibling's keys and values may be anything."""
    parents = np.array([-1, 0, 0], np.int32)
    tree = Rows(
        np.zeros(3, np.int32),
        np.full(3, 5, np.int32),
        ancestor_mask(parents),
        np.array([5], np.int32),
        np.arange(1, dtype=np.int32)[None],
    )
    query, keys, values = random_tensors(tree, 16, (2, 1, 16), 7)
    before = attend(query, keys, values, tree, 16)
    keys[6], values[6] = 100.0, -100.0
    after = attend(query, keys, values, tree, 16)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("size", [1, 16, 17])
def test_uniform_keys_give_the_mean_of_the_values(size: int) -> None:
    plain = Rows(
        np.zeros(1, np.int32),
        np.array([size], np.int32),
        np.zeros((1, 1), np.uint64),
        np.zeros(1, np.int32),
        np.arange(2, dtype=np.int32)[None],
    )
    values = torch.arange(32.0)[:, None, None].expand(32, 1, 16).contiguous()
    out = attend(torch.ones(1, 1, 16), torch.ones(32, 1, 16), values, plain, 16)
    torch.testing.assert_close(out, torch.full_like(out, (size - 1) / 2))


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.bfloat16, torch.uint16), pytest.param(torch.float16, torch.int16, marks=pytest.mark.slow)],
)
def test_16_bit_keys_and_values(dtype: torch.dtype, bits: torch.dtype) -> None:
    plain = Rows(
        np.zeros(1, np.int32),
        np.array([30], np.int32),
        np.zeros((1, 1), np.uint64),
        np.zeros(1, np.int32),
        np.arange(2, dtype=np.int32)[None],
    )
    query, keys, values = random_tensors(plain, 16, (4, 2, 64), 9)
    keys, values = keys.to(dtype), values.to(dtype)
    found = attend(query, keys.view(bits), values.view(bits), plain, 16)
    torch.testing.assert_close(found.double(), defined(query, keys, values, plain, 16), rtol=0, atol=5e-6)
