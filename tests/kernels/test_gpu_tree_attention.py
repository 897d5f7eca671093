"""Test the GPU's attention against its definition; without a GPU in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu import tree_attention as attention
from foretoken_kernels.gpu.tree_attention import attention_workspace, tree_attention

from tests.kernels.attention_cases import Heads, Rows, assert_defined, case, prefill, ragged, rooted, tree


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.bfloat16, torch.float16))],
)
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [
        ((2, 2, 16), 16),
        ((6, 2, 64), 1),
        ((8, 2, 32), 24),
        ((7, 1, 32), 16),
        ((8, 1, 80), 24),
    ],
)
def test_equals_its_definition(heads: Heads, block_size: int, dtype: torch.dtype, device: str) -> None:
    """Prefill chunks, root-only rows and trees side by side, and padding after them."""
    seqs = ragged(np.random.default_rng(heads[0] * block_size))
    assert_defined(case(seqs, heads, block_size, device, dtype, padding=3))


@pytest.mark.parametrize("seed", range(4))
def test_random_trees(seed: int, device: str) -> None:
    """More nodes than a word has bits, on more than one tile."""
    generator = np.random.default_rng(seed)
    seqs = [tree(int(generator.integers(0, 90)), int(generator.integers(1, 100)), generator) for _ in range(2)]
    seqs[0] = rooted(seqs[0])
    assert_defined(case(seqs, (2, 1, 16), (1, 16, 24)[seed % 3], device, words=2, seed=seed))


def test_rows_of_one_sequence_may_be_of_all_kinds(device: str) -> None:
    """A tree sees KV slots by its mask bits, a prefill chunk sees the same ones as context."""
    nodes = tree(37, 5, np.random.default_rng(1))
    mixed = replace(nodes, rows=nodes.rows + prefill(37, 5).rows)
    assert_defined(case([mixed], (4, 2, 16), 8, device))


def test_beams_have_any_bits(device: str) -> None:
    """Beams of a draft see scattered KV slots, with the highest bit of a word among them."""
    masks = [1 << 63 | 1 << 31 | 1, 1 << 62 | 1 << 32, 1 << 64, 1 << 127 | 1 << 5, 0, 1 << 31]
    beams = Rows([(20, mask) for mask in masks], tree_start=22, context_start=7)
    assert_defined(case([beams, prefill(3, 2)], (6, 2, 16), 16, device, words=2))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_splits", [1, 8, pytest.param(2, marks=pytest.mark.slow)])
def test_splits_add_up(num_splits: int, dtype: torch.dtype, device: str) -> None:
    """All launches share one workspace: what one leaves in it must not change the next."""
    heads = (2, 1, 16)
    generator = np.random.default_rng(num_splits)
    workspace = attention_workspace(16, *heads, device, num_splits)
    for part in (workspace.sums, workspace.maxima, workspace.weights):
        part.fill_(torch.nan)
    for context in (1000, 129, 400):
        seqs = [tree(context, 6, generator, context_start=3), prefill(context - 100, 3), prefill(2, 1)]
        batch = case(seqs, heads, 24, device, dtype, padding=2)
        assert torch.equal(assert_defined(batch, workspace), batch.attend(workspace)[:10])
    assert workspace.sums.isfinite().any() == (num_splits > 1)


def test_large_scores_of_one_split_do_not_drown_the_others(device: str) -> None:
    """The splits' maxima differ by more than a float32 factor can hold, in either direction."""
    batch = case([prefill(599, 1)], (1, 1, 16), 16, device)
    for low, high, sign in ((0, 200, 1.0), (400, 600, 1.0), (0, 200, -1.0)):
        keys = batch.keys.clone()
        logical = torch.arange(low, high, device=device)
        kv_slots = batch.block_tables[0, logical // 16].long() * 16 + logical % 16
        keys[kv_slots, 0] = sign * 40 * batch.query[0, 0]
        assert_defined(replace(batch, keys=keys))


def test_a_row_that_sees_nothing_is_zero(device: str) -> None:
    nothing = Rows([(5, 0), (6, 0), (0, 0), (0, 2)], tree_start=9, context_start=5)
    out = case([nothing], (4, 2, 16), 16, device).attend()
    assert not out[[0, 2]].any()
    assert out[[1, 3]].all()


def test_a_bit_of_another_tile_does_not_matter(device: str) -> None:
    """A sequence with more rows than a tile: every tile has its own keys."""
    chain = [(9, (2 << i) - 1) for i in range(60)]
    assert_defined(case([Rows(chain, 9)], (8, 1, 16), 16, device))


@pytest.mark.parametrize("words", [1, 2])
def test_rows_that_end_within_a_block_or_one_key_before_its_end(words: int, device: str) -> None:
    """Masks of one word use one loop, masks of two words use the other."""
    for rows in (prefill(62, 9), Rows([(63, 0), (63, 0)], 63), Rows([(127, 0), (126, 0), (64, 0)], 127)):
        assert_defined(case([rows], (2, 1, 16), 16, device, words=words))


@pytest.mark.parametrize("nodes", [3, 12, pytest.param(60, marks=pytest.mark.slow)])
def test_what_is_not_in_the_table_is_seen_by_no_row(nodes: int, device: str) -> None:
    chain = Rows([(9, (2 << i) - 1) for i in range(nodes)], 9)
    batch = case([chain], (8, 1, 16), 4, device)
    # 16 KV slots: 9 of the context and 7 of the tree; then 8 of the context only.
    short = replace(batch, block_tables=batch.block_tables[:, :4])
    expected = replace(short, masks=batch.masks & 0x7F).defined()
    torch.testing.assert_close(short.attend().double(), expected, rtol=0, atol=1e-5)
    shorter = replace(batch, block_tables=batch.block_tables[:, :2])
    lens = torch.full_like(batch.context_lens, 8)
    expected = replace(shorter, masks=batch.masks * 0, context_lens=lens).defined()
    torch.testing.assert_close(shorter.attend().double(), expected, rtol=0, atol=1e-5)
    # A tree that begins before the table does.
    early = replace(batch, tree_starts=torch.full_like(batch.tree_starts, -2))
    expected = replace(batch, masks=batch.masks >> 2, tree_starts=torch.zeros_like(batch.tree_starts)).defined()
    torch.testing.assert_close(early.attend().double(), expected, rtol=0, atol=1e-5)


def test_garbage_makes_no_illegal_address(device: str) -> None:
    """Rows of an invalid batch become padding or garbage, and nothing else happens."""
    batch = case([prefill(20, 3), prefill(30, 2)], (4, 2, 16), 16, device)
    sane = batch.attend()
    lowest, highest = -(2**31), 2**31 - 1
    wild = replace(
        batch,
        context_lens=torch.tensor([21, 22, 23, highest, lowest], dtype=torch.int32, device=device),
        tree_starts=torch.tensor([20, highest], dtype=torch.int32, device=device),
        context_starts=torch.tensor([0, lowest], dtype=torch.int32, device=device),
        masks=torch.tensor([[0], [0], [0], [-1], [-1]], device=device),
        block_tables=batch.block_tables.clone(),
    )
    wild.block_tables[1] = torch.tensor([highest, lowest, -1, 2**30], device=device)[: wild.block_tables.shape[1]]
    assert torch.equal(wild.attend()[:3], sane[:3])
    late = replace(batch, row_starts=torch.tensor([0, 3, highest], dtype=torch.int32, device=device))
    assert torch.equal(late.attend(), sane)
    early = replace(batch, row_starts=torch.tensor([lowest, 3, 5], dtype=torch.int32, device=device))
    assert torch.equal(early.attend(), sane)
    descending = replace(batch, row_starts=torch.tensor([0, highest, 3], dtype=torch.int32, device=device))
    descending.attend()


def test_a_workspace_that_is_too_small_is_refused(device: str) -> None:
    batch = case([prefill(4, 3)], (4, 2, 16), 16, device)
    with pytest.raises(ValueError, match="2 rows, not for 3"):
        batch.attend(attention_workspace(2, 4, 2, 16, device))


@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 2, 256), (6, 2, 64), (64, 1, 64), (71, 1, 64)])
def test_a_tile_is_the_largest_that_keeps_a_gpu_busy(heads: Heads) -> None:
    num_heads, num_kv_heads, head_dim = heads
    group = num_heads // num_kv_heads
    block_group = 1 << (group - 1).bit_length()

    def warps(tile: attention._Tile, seqs: int, rows: int) -> int:
        return seqs * -(-rows // tile.rows) * num_kv_heads * tile.num_warps

    found = set()
    for seqs, most_keys in itertools.product((1, 2, 4, 16, 40, 64), (2112, 4160)):
        for power in range(11):
            tile = attention._tile(seqs, 1 << power, num_kv_heads, group, head_dim, False, most_keys)
            rows, products = 1 << power, tile.rows * block_group
            smallest = max(16 // block_group, 1)
            assert smallest <= tile.rows <= max(rows, smallest)
            assert products <= max(64 if head_dim > 128 else 128, block_group)
            assert tile.rows == smallest or warps(tile, seqs, rows) >= attention._WARPS
            is_tree_half = rows <= 64 and head_dim <= 128 and products == 64 and tile.rows < rows
            assert tile.splits == (2 if rows <= 64 and products <= 32 and most_keys == 4160 else 1)
            if not is_tree_half and tile.rows < min(rows, (64 if head_dim > 128 else 128) // block_group):
                # With twice the rows, even in eight warps, there would be too few programs.
                doubled = tile._replace(rows=2 * tile.rows, num_warps=4)
                assert warps(doubled, seqs, rows) < attention._WARPS
            assert not tile.one_loop or (power > 0 and products <= 64 and most_keys == 2112)
            found.add(tile._replace(splits=1))
    # Each is a kernel of its own; except for root-only batches, a deployment uses those with one
    # loop or the others.
    assert len({tile for tile in found if not tile.one_loop}) <= 4 and len(found) <= 8


@pytest.mark.parametrize(
    ("rows", "least", "warps", "most_keys", "splits"),
    [
        (1, 1, 32, 32768, 32),
        (1, 1, 32, 2048, 8),  # each split has at least 256 keys
        (32, 2, 128, 32768, 8),  # they run side by side on the GPU
        (512, 1, 1024, 32768, 1),
        (512, 2, 8192, 32768, 2),  # or are the least
        (300, 1, 32, 32768, 6),  # the workspace has no room for more
        (2048, 2, 8192, 32768, 1),
        (1, 2, 32, 255, 1),
    ],
)
def test_splits_are_as_many_as_pay(rows: int, least: int, warps: int, most_keys: int, splits: int) -> None:
    workspace = attention_workspace(512, 1, 1, 16, "cpu", 32)
    assert attention._num_splits(rows, least, warps, most_keys, workspace) == splits


COMPILE = """
import json
import sys
import traceback
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foretoken_kernels.gpu import tree_attention as module


def shared_memory(dtype, heads, kv_heads, head_dim, seqs, rows, splits, block_size, words, most_keys):
    tile = module._tile(seqs, rows, kv_heads, heads // kv_heads, head_dim, dtype == "fp32", most_keys)
    constants = module._constants(tile, heads, kv_heads, head_dim, block_size, 2 * words, splits, dtype == "fp32")
    types = dict.fromkeys(("query", "keys", "values", "out"), "*" + dtype)
    types |= dict.fromkeys(("part_sums", "part_maxima", "part_weights"), "*fp32") | {"scale": "fp32"}
    integers = "row_starts", "context_lens", "masks", "tree_starts", "block_tables", "context_starts", "arrived"
    types |= dict.fromkeys(integers, "*i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in module._tree_attention.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name.endswith("_stride")]
    source = ASTSource(
        module._tree_attention, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


for shape in json.load(sys.stdin):
    try:
        outcome = shared_memory(*shape)
    except Exception:
        outcome = traceback.format_exc()
    print(json.dumps(outcome))
"""
SHAPES: list[tuple[str | int, ...]] = [
    ("bf16", 32, 8, 128, 1, 1, 32, 16, 1, 8192),
    ("fp16", 32, 8, 128, 1, 1, 32, 16, 1, 8192),
    ("fp16", 32, 8, 128, 16, 64, 1, 16, 2, 8192),
    ("bf16", 32, 8, 128, 1, 32, 32, 16, 1, 8192),
    ("bf16", 32, 8, 128, 1, 8, 32, 16, 1, 2112),
    ("bf16", 32, 8, 128, 16, 8, 1, 16, 1, 2112),
    ("bf16", 32, 8, 128, 8, 32, 1, 16, 1, 8192),
    ("bf16", 32, 8, 128, 16, 64, 1, 16, 2, 8192),
    ("bf16", 28, 4, 128, 16, 16, 8, 1, 1, 8192),
    ("bf16", 8, 2, 256, 16, 64, 2, 24, 1, 8192),
    ("bf16", 8, 2, 256, 1, 8, 2, 24, 1, 2112),
    ("fp32", 6, 2, 64, 1, 8, 16, 16, 1, 8192),
    ("fp32", 6, 2, 64, 1, 8, 16, 16, 1, 2112),
]


@pytest.fixture(scope="module")
def compiled() -> list[int | str]:
    """Return the bytes of shared memory of each of ``SHAPES``, or an error.

    One process compiles all, because it takes seconds to start.
    """
    kernels = Path(reference.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(SHAPES),
        env=environment | {"PYTHONPATH": str(kernels)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiles_for_a_gpu(shape: tuple[str | int, ...], compiled: list[int | str]) -> None:
    """The compiler rejects more than the interpreter; it needs no GPU. Shared memory is 227 KiB."""
    outcome = compiled[SHAPES.index(shape)]
    assert isinstance(outcome, int), outcome
    assert outcome <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("context", [1, 63, 320, 1025, 4096, 16384])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 6), (1, 64), (4, 16), (16, 6), (16, 32), (64, 1), (64, 8)])
def test_the_shapes_of_an_engine(batch: int, rows: int, context: int) -> None:
    """The heads of a model of 8 billion parameters, against PyTorch's attention in float32."""
    generator = np.random.default_rng(context + batch)
    seqs = [tree(max(context - 7 * seq, 1), rows, generator) for seq in range(batch)]
    made = case(seqs, (32, 8, 128), 16, "cuda", torch.bfloat16, padding=1)
    found = made.attend()
    for seq in {0, batch // 2, batch - 1}:
        first, end = made.row_starts[seq : seq + 2].tolist()
        expected = made.defined_of(seq)
        error = (found[first:end].float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < 5e-3


@pytest.mark.gpu
def test_a_long_prefill_on_a_gpu() -> None:
    assert_defined(case([prefill(300, 500), prefill(0, 77)], (32, 8, 128), 16, "cuda", torch.bfloat16))


@pytest.mark.gpu
def test_a_graph_replays_over_other_lengths() -> None:
    """Grids come from shapes only, and every launch leaves the counters of splits at zero."""
    heads = (32, 8, 128)
    generator = np.random.default_rng(0)
    long = case([tree(3000, 6, generator), tree(900, 6, generator)], heads, 16, "cuda", torch.bfloat16, seed=1)
    short = case([tree(700, 6, generator), tree(3, 6, generator)], heads, 16, "cuda", torch.bfloat16, seed=2)
    workspace = attention_workspace(12, *heads, "cuda")
    expected = [batch.attend(workspace) for batch in (long, short)]
    # In the order of the function's parameters.
    names = [name for name, value in vars(long).items() if isinstance(value, torch.Tensor)]
    static = [getattr(long, name).clone() for name in names]
    out = torch.empty_like(static[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(*static, 16, 6, workspace, out)
    for turn in range(6):
        batch = (long, short)[turn % 2]
        for target, source in zip(static, [getattr(batch, name) for name in names], strict=True):
            target[tuple(slice(size) for size in source.shape)] = source
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected[turn % 2])
        assert not workspace.arrived.any()
