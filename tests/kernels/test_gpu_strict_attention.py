"""Test that strict attention computes each row independently, bit for bit.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu import strict_attention as module
from foretoken_kernels.gpu.strict_attention import strict_attention
from foretoken_kernels.gpu.tree_attention import attention_workspace

from tests.kernels.attention_cases import Case, Heads, Rows, assert_defined, case, prefill, ragged, rooted, tree

pytestmark = pytest.mark.usefixtures("strict_products")
DTYPES = [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.bfloat16, torch.float16))]


def strict(seqs: list[Rows], heads: Heads, block_size: int, device: str, **options: object) -> Case:
    return case(seqs, heads, block_size, device, kernel=strict_attention, **options)  # type: ignore[arg-type]


def decode_step(batch: Case, row: int, block_size: int) -> Case:
    """Return the row as the only one of a decode step, with its path's KV entries in order.

    They are stored in another cache.
    """
    seq = int((batch.row_starts[1:] <= row).sum())
    first, context = int(batch.context_starts[seq]), int(batch.context_lens[row])
    kv_slots = reference.path_kv_slots(
        first,
        context,
        batch.masks[row].cpu(),
        int(batch.tree_starts[seq]),
        batch.block_tables[seq].cpu(),
        batch.block_size,
    ).to(batch.keys.device)
    length = first + len(kv_slots) + (context - first if context < first else 0)
    alone = strict(
        [Rows([(length, 0)], length, first)],
        (batch.query.shape[1], *batch.keys.shape[1:]),
        block_size,
        str(batch.query.device),
        dtype=batch.query.dtype,
    )
    logical = torch.arange(first, length, device=kv_slots.device)
    where = alone.block_tables[0, logical // block_size].long() * block_size + logical % block_size
    alone.keys[where], alone.values[where] = batch.keys[kv_slots], batch.values[kv_slots]
    return replace(alone, query=batch.query[row : row + 1])


def assert_rows_are_decode_steps(batch: Case, block_size: int = 16, every: int = 1) -> torch.Tensor:
    """Check that each row has the bits of a decode step of its own, with blocks of another size."""
    out = batch.attend()
    for row in range(0, int(batch.row_starts[-1]), every):
        assert torch.equal(decode_step(batch, row, block_size).attend()[0], out[row]), row
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [
        ((2, 2, 16), 16),
        ((6, 2, 64), 1),
        pytest.param((8, 2, 32), 24, marks=pytest.mark.slow),
        pytest.param((7, 1, 32), 16, marks=pytest.mark.slow),
        pytest.param((20, 1, 80), 24, marks=pytest.mark.slow),
    ],
)
def test_equals_its_definition(heads: Heads, block_size: int, dtype: torch.dtype, device: str) -> None:
    """Prefill chunks, root-only rows and trees side by side, and padding after them."""
    seqs = ragged(np.random.default_rng(heads[0] * block_size))
    assert_defined(strict(seqs, heads, block_size, device, dtype=dtype, padding=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "block_size"), [((2, 1, 16), 5), pytest.param((8, 1, 32), 24, marks=pytest.mark.slow)]
)
def test_a_row_of_a_batch_has_the_bits_of_a_decode_step(
    heads: Heads, block_size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, bushy trees and single rows whose paths end near borders of blocks and of splits."""
    monkeypatch.setattr(module, "SPLIT_KEYS", 64)
    generator = np.random.default_rng(block_size)
    seqs = [
        prefill(60, 7),
        tree(61, 9, generator),
        Rows([(128, 0)], 128),
        rooted(tree(126, 6, generator, context_start=100)),
        prefill(0, 2),
        replace(tree(29, 5, generator), rows=tree(29, 5, generator).rows + prefill(29, 4).rows),
    ]
    batch = strict(seqs, heads, block_size, device, dtype=dtype, padding=3, seed=block_size)
    if dtype == torch.float32:
        assert_defined(batch)
    assert_rows_are_decode_steps(batch, every=2)


def test_a_chain_is_the_same_in_any_guise(device: str) -> None:
    """Five tokens after 40: a chunk, one by one, a chain, a tree with its root as context."""
    heads = (4, 2, 16)
    chain = [(40, (2 << i) - 1) for i in range(5)]
    guises = [prefill(40, 5), Rows(chain, 40), rooted(Rows(chain, 40))]
    whole = strict([guises[0]], heads, 16, device)
    outs = []
    for guise in guises:
        lens = torch.tensor([context for context, _ in guise.rows], dtype=torch.int32, device=device)
        masks = torch.tensor([[mask] for _, mask in guise.rows], device=device)
        batch = replace(whole, context_lens=lens, masks=masks)
        outs.append(assert_rows_are_decode_steps(batch))
    assert torch.equal(outs[1], outs[0]) and torch.equal(outs[2], outs[0])
    assert not torch.equal(outs[0][0], outs[0][1])


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_random_trees(seed: int, device: str) -> None:
    """More nodes than a word has bits; a path may be as long as the tree."""
    generator = np.random.default_rng(seed)
    seqs = [tree(int(generator.integers(0, 90)), int(generator.integers(60, 100)), generator), Rows([(9, 0)], 9)]
    if seed == 2:
        seqs[0] = Rows([(20, (2 << i) - 1) for i in range(0, 90, 7)], 20)
    batch = strict(seqs, (2, 1, 16), (1, 16, 24)[seed], device, words=2, seed=seed)
    assert_defined(batch)
    assert_rows_are_decode_steps(batch, every=11)


def test_beams_have_any_bits(device: str) -> None:
    masks = [1 << 63 | 1 << 31 | 1, 1 << 62 | 1 << 32, 1 << 64, 1 << 127 | 1 << 5, 0, 1 << 31]
    beams = Rows([(20, mask) for mask in masks], tree_start=22, context_start=7)
    batch = strict([beams, prefill(3, 2)], (6, 2, 16), 16, device, words=2)
    assert_defined(batch)
    assert_rows_are_decode_steps(batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_change_no_bit(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits by one program each or by one for all give the same bits.

    There are more splits than are added up at once, with large scores in either of two; all
    launches share one workspace.
    """
    monkeypatch.setattr(module, "SPLIT_KEYS", 64)
    heads = (2, 1, 16)
    generator = np.random.default_rng(0)
    parted, whole = (attention_workspace(16, *heads, device, splits) for splits in (16, 1))
    for part in (parted.sums, parted.maxima, parted.weights):
        part.fill_(torch.nan)
    for context in (310, 130):
        seqs = [tree(context, 6, generator, context_start=70), prefill(context - 60, 3), prefill(2, 1)]
        batch = strict(seqs, heads, 24, device, dtype=dtype, padding=2)
        # The scores of the chunk's first row then differ between splits by more than a float32
        # factor can hold.
        logical = torch.arange(3, 40, device=device)
        kv_slots = batch.block_tables[1, logical // 24].long() * 24 + logical % 24
        batch.keys[kv_slots, 0] = 40 * batch.query[6, 0]
        split = assert_defined(batch, parted)
        assert torch.equal(split, batch.attend(parted)[:10])
        assert torch.equal(split, batch.attend(whole)[:10])
    assert parted.sums.isfinite().any()


def test_a_row_that_sees_nothing_is_zero(device: str) -> None:
    nothing = Rows([(5, 0), (6, 0), (0, 0), (0, 2)], tree_start=9, context_start=5)
    out = strict([nothing], (4, 2, 16), 16, device).attend()
    assert not out[[0, 2]].any()
    assert out[[1, 3]].all()


def test_garbage_makes_no_illegal_address(device: str) -> None:
    """Rows of an invalid batch become padding or garbage, and nothing else happens."""
    batch = strict([prefill(20, 3), prefill(30, 2)], (4, 2, 16), 16, device)
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
    for starts in ([0, 3, highest], [lowest, 3, 5]):
        moved = replace(batch, row_starts=torch.tensor(starts, dtype=torch.int32, device=device))
        assert torch.equal(moved.attend(), sane)
    replace(batch, row_starts=torch.tensor([0, highest, 3], dtype=torch.int32, device=device)).attend()


def test_a_workspace_that_is_too_small_is_refused(device: str) -> None:
    batch = strict([prefill(4, 3)], (4, 2, 16), 16, device)
    with pytest.raises(ValueError, match="2 rows, not for 3"):
        batch.attend(attention_workspace(2, 4, 2, 16, device))


@pytest.mark.parametrize(
    ("rows", "programs", "most_keys", "expected"),
    [
        (1, 8, 4160, 9),
        (1, 8, 512, 1),
        (32, 64, 16384, 32),
        (512, 1024, 4160, 1),  # enough programs without splits
        (70, 144, 16384, 1),  # no room for all partial results
    ],
)
def test_splits_are_programs_where_few_rows_would_leave_a_gpu_idle(
    rows: int, programs: int, most_keys: int, expected: int
) -> None:
    assert module._num_programs(rows, programs, most_keys, attention_workspace(512, 1, 1, 16, "cpu", 32)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("context", [1, 63, 320, 1025, 4096, 16384])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 64), (4, 16), (16, 6), (64, 1)])
def test_the_shapes_of_an_engine(batch: int, rows: int, context: int) -> None:
    generator = np.random.default_rng(context + batch)
    seqs = [tree(max(context - 7 * seq, 1), rows, generator) for seq in range(batch)]
    made = strict(seqs, (32, 8, 128), 16, "cuda", dtype=torch.bfloat16, padding=1)
    assert_rows_are_decode_steps(made, every=max(batch * rows // 24, 1))
    if context < 2000:
        assert_defined(made)


@pytest.mark.gpu
def test_a_long_prefill_on_a_gpu() -> None:
    made = strict([prefill(300, 500), prefill(0, 77)], (32, 8, 128), 16, "cuda", dtype=torch.bfloat16)
    assert_defined(made)
    assert_rows_are_decode_steps(made, every=37)
