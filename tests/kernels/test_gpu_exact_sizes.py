"""Test GPU kernels over tensors that end at their last element, in shapes that no tile divides.

The memory after them belongs to no tensor. So a tool that watches memory
(tests/gpu/test_memory_check.py) sees every access outside a tensor; elsewhere a tensor is often a
part of a larger one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.activation import silu_and_multiply
from foretoken_kernels.gpu.embedding import copy_rows, embed, fill_rows
from foretoken_kernels.gpu.kv_commit import copy_kv_slots
from foretoken_kernels.gpu.qkv_rope import qkv_rope
from foretoken_kernels.gpu.rms_norm import rms_norm
from foretoken_kernels.gpu.rope_kv_write import Rope, rope_kv_write
from foretoken_kernels.gpu.skinny_configs import SkinnyConfig
from foretoken_kernels.gpu.skinny_matmul import skinny_matmul, skinny_matmul_workspace
from foretoken_kernels.gpu.strict_attention import strict_attention
from foretoken_kernels.gpu.strict_matmul import StrictTile, strict_matmul, strict_workspace
from foretoken_kernels.gpu.tree_attention import tree_attention
from foretoken_kernels.gpu.wide_gate_up import wide_gate_up

from tests.kernels.attention_cases import Attention, assert_defined, case, prefill, tree
from tests.kernels.draft_courses import Course, Head, TreeRequest

LOWEST, HIGHEST = -(2**31), 2**31 - 1
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("kernel", [tree_attention, strict_attention])
@pytest.mark.parametrize("is_split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention(kernel: Attention, is_split: bool, device: str) -> None:
    """Sequences fill their blocks, the cache has no others, the longest table has no free entry."""
    generator = np.random.default_rng(0)
    seqs, num_kv_slots = [tree(100, 12, generator), prefill(0, 32), tree(251, 5, generator)], 112 + 32 + 256
    if is_split:
        seqs, num_kv_slots = [tree(1000, 24, generator)], 1024
    made = case(seqs, (6, 2, 80), 16, device, torch.bfloat16, slack=0, kernel=kernel)
    made = replace(made, query=made.query.contiguous(), block_tables=made.block_tables[:, :-2].contiguous())
    assert len(made.keys) == num_kv_slots and (made.block_tables[-1] < num_kv_slots // 16).all()
    assert_defined(made)


def test_norm_activation_and_rows(device: str) -> None:
    x = torch.randn(3, 1300, device=device)
    index = torch.tensor([2, LOWEST, HIGHEST, 0], dtype=torch.int32, device=device)
    chosen = x[[2, 0, 2, 0]]
    weight, out = torch.rand(1300, device=device), torch.empty(4, 1300, device=device)
    rms_norm(x, weight, 1e-5, out, index)
    torch.testing.assert_close(out, reference.rms_norm(chosen, weight, 1e-5), **CLOSE)
    kept = torch.empty(4, 1300, device=device)
    rms_norm(x, weight, 1e-5, out, index, kept)
    assert torch.equal(kept, chosen)
    half = torch.empty(3, 650, device=device)
    silu_and_multiply(x, half)
    torch.testing.assert_close(half, reference.silu_and_multiply(x[:, :650], x[:, 650:]), **CLOSE)
    copy_rows(x, out, index)
    assert torch.equal(out, chosen)
    embed(index, x, out)
    assert torch.equal(out, chosen)
    fill_rows(weight, out)
    assert torch.equal(out, weight.expand(4, 1300))


@pytest.mark.parametrize("with_matmul", [False, True])
@pytest.mark.parametrize("head_dim", [20, 128])
def test_rope_kv_write(head_dim: int, with_matmul: bool, device: str) -> None:
    """Some positions and KV slots are out of range."""
    x, weight = torch.randn(5, 18, device=device), torch.randn(5 * head_dim, 18, device=device)
    qkv, bias = reference.linear(x, weight).view(5, 5, head_dim), torch.randn(5, head_dim, device=device)
    norms, cos_sin = torch.rand(2, head_dim, device=device), torch.randn(7, 2, head_dim // 2, device=device)
    if with_matmul and head_dim == 20:
        # Only tiles of whole heads can be normed, and their sizes are powers of two.
        norms = [None, None]
    positions = torch.tensor([6, 7, LOWEST, HIGHEST, 0], dtype=torch.int32, device=device)
    kv_slots = torch.tensor([3, 4, LOWEST, HIGHEST, 0], dtype=torch.int32, device=device)
    keys, values = torch.zeros(4, 1, head_dim, device=device), torch.zeros(4, 1, head_dim, device=device)
    expected_keys, expected_values, real = keys.clone(), values.clone(), [0, 4]
    expected = reference.rope_kv_write(
        qkv[real], bias, *norms, 1e-6, cos_sin, positions[real], kv_slots[real], expected_keys, expected_values
    )
    rope = Rope(bias, *norms, 1e-6, cos_sin, positions, kv_slots, keys, values, 3)
    if with_matmul:
        config = SkinnyConfig(32 if head_dim == 20 else head_dim, 16, 3, 2, 4)
        qkv_rope(x, weight, qkv.view(5, -1), rope, skinny_matmul_workspace(5 * head_dim, 3, device), config)
    else:
        rope_kv_write(qkv, *rope)
    torch.testing.assert_close(qkv[real, :3], expected, **CLOSE)
    torch.testing.assert_close(keys, expected_keys, **CLOSE)
    torch.testing.assert_close(values, expected_values, **CLOSE)


def test_copy_kv_slots(device: str) -> None:
    cache = torch.randn(2, 4, 1030, device=device)
    expected = cache.clone()
    expected[:, 3] = expected[:, 0]
    source, target = (
        torch.tensor(ids, dtype=torch.int32, device=device) for ids in ([0, 4, HIGHEST, -1], [3, 0, 1, 2])
    )
    copy_kv_slots(cache, source, target)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("mode", ["store", "add", "gate_up"])
def test_matmul(mode: str, is_strict: bool, device: str) -> None:
    config = SkinnyConfig(32, 16, 3, 2, 4)
    x, out = torch.randn(19, 50, device=device), torch.randn(19, 33, device=device)
    weight = torch.randn(66 if mode == "gate_up" else 33, 50, device=device)
    expected = reference.linear(x, weight)
    if mode == "gate_up":
        expected = reference.silu_and_multiply(*expected.chunk(2, dim=1))
    elif mode == "add":
        expected = expected + out
    if is_strict:
        tile = StrictTile(16, config)
        workspace = strict_workspace(tile, 33, mode == "gate_up", device)
        strict_matmul(x, weight, out, workspace, tile, add=mode == "add", gate_up=mode == "gate_up")
    elif mode == "gate_up":
        skinny_matmul(x, weight, out, skinny_matmul_workspace(66, 3, device), config, gate_up=True)
    else:
        skinny_matmul(x, weight, out, skinny_matmul_workspace(33, 3, device), config, mode == "add")
    torch.testing.assert_close(out, expected, **CLOSE)


def test_wide_gate_up(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight = (torch.randn(rows, 72, device=device, dtype=dtype) / 8 for rows in (200, 280))
    out = torch.zeros(200, 140, device=device, dtype=dtype)
    wide_gate_up(x, weight, out, 3)
    expected = reference.silu_and_multiply(*reference.linear(x.float(), weight.float()).chunk(2, dim=1))
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_draft_trees(device: str) -> None:
    """With a reduced vocabulary, noise and cuts; the last tree is the largest."""
    tree_requests = [
        TreeRequest(1, 0, 0),
        TreeRequest(7, 3, 2, temperature=0.7, top_k=9, top_p=0.9),
        TreeRequest(16, 4, 4, temperature=1.0, min_p=0.1, length=40),
    ]
    target_ids = torch.randperm(9000, generator=torch.Generator().manual_seed(5))[:1500].sort().values.int()
    course = Course(tree_requests, branches=4, depth=4, head=Head(1500), nodes=16, target_ids=target_ids, spare=0)
    course.check(device, against_cpu=False)
