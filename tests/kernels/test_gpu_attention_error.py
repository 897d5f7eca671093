"""Test the relative error of both attentions in 16 bits: lengths to 16k, random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foretoken_kernels.gpu.strict_attention import strict_attention
from foretoken_kernels.gpu.tree_attention import tree_attention

from tests.kernels.attention_cases import Attention, Case, Heads, Rows, case, prefill, ragged, tree

KERNELS = [tree_attention, strict_attention]
MOST_TOKENS, MOST_NODES = 16384, 64
# Rounding a result to bfloat16 changes it by 1.7e-3 (root mean square). The interpreter truncates:
# 3.3e-3. float16 has three bits more, and the interpreter rounds.
MOST_ERROR = {torch.bfloat16: 5e-3, torch.float16: 6e-4}


def random_trees(batch: int, most_tokens: int, seed: int) -> list[Rows]:
    """Return a tree for each sequence, with context lengths even on a logarithmic scale."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.uniform(0, np.log(most_tokens), batch)).round().astype(int)
    nodes = generator.integers(1, MOST_NODES + 1, batch)
    if batch > 1:
        lengths[:2], nodes[:2] = (1, most_tokens), generator.permutation((1, MOST_NODES))
    return [tree(int(length), int(count), generator) for length, count in zip(lengths, nodes, strict=True)]


def check(made: Case) -> None:
    found = made.attend().float()
    expected = torch.cat([made.defined_of(seq) for seq in range(len(made.tree_starts))])
    assert found.isfinite().all() and expected.isfinite().all()
    error = (found - expected).norm() / expected.norm()
    of_rows = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    print(f"{len(found)} rows: relative error {error:.1e}, of the worst row {of_rows.max():.1e}")
    most = MOST_ERROR[made.query.dtype]
    assert error < most and of_rows.max() < most


@pytest.mark.parametrize("dtype", MOST_ERROR)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("heads", "block_size"), [((4, 1, 32), 64), pytest.param((8, 2, 64), 16, marks=pytest.mark.slow)]
)
def test_short_contexts(kernel: Attention, heads: Heads, block_size: int, dtype: torch.dtype, device: str) -> None:
    check(case(random_trees(4, 200, block_size), heads, block_size, device, dtype, kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_may_be_larger_than_float16(kernel: Attention, device: str) -> None:
    """Products of queries and keys reach 1e6.

    One position gets all the weight, the masked get none.
    """
    made = case([prefill(40, 3), *random_trees(1, 90, 3)], (4, 2, 64), 16, device, torch.float16, kernel=kernel)
    made.query.mul_(300)
    made.keys.mul_(300)
    scores = (made.query[0].float() @ made.keys[made.block_tables[0, 0] * 16].float().T).abs()
    assert scores.max() > 65504
    check(made)


def test_a_sequence_at_once_is_defined_as_its_rows_are() -> None:
    generator = np.random.default_rng(0)
    seqs = [*ragged(generator), tree(50, 90, generator), prefill(70, 4), *random_trees(4, 100, 1)]
    made = case(seqs, (6, 2, 16), 24, "cpu", words=2)
    found = torch.cat([made.defined_of(seq) for seq in range(len(seqs))])
    torch.testing.assert_close(found.double(), made.defined(), rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_random_trees(batch: int, block_size: int, kernel: Attention) -> None:
    """The heads of Llama-3.1-8B."""
    batches = [random_trees(batch, MOST_TOKENS, seed=batch)]
    if batch == 1:
        generator = np.random.default_rng(1)
        batches = [[tree(length, MOST_NODES, generator)] for length in (1, MOST_TOKENS)]
    for seqs in batches:
        check(case(seqs, (32, 8, 128), block_size, "cuda", torch.bfloat16, seed=batch, kernel=kernel))
