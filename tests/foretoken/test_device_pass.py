"""A model's pass on a GPU (or in Triton's interpreter) equals the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.drafting import FINAL_NORM
from foretoken.kv_cache import KVCache
from foretoken.models.backend import CPU, Backend
from foretoken.models.batch import ForwardBatch, blank_batch
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.decoder_weights import DecoderWeights, load_decoder_weights
from foretoken.models.device_batch import bucket, runs_of, seq_bucket, table_bucket
from foretoken.models.device_batches import DeviceBatches, prompt_bucket
from foretoken.models.device_llama import DeviceLlama
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.llama import HostLlama
from foretoken.models.weights import Checkpoint
from foretoken.tree import ancestor_mask, depths
from tests.foretoken.test_models import random_model
from tests.references import head_files

BLOCK, NUM_BLOCKS = 4, 24
SIZES = PassSizes(rows=40, wanted=40, seqs=4, blocks=12)
LAYERS = (1, 2, FINAL_NORM)


def llama(
    folder: Path,
    backend: Backend,
    sizes: PassSizes,
    dtype: torch.dtype = torch.float32,
    strict: bool = False,
    planned: bool = False,
) -> DeviceLlama:
    config, weights, cache = loaded(folder, backend, dtype)
    flashinfer = FlashInferAttention(config, cache, every_pass=True) if planned else None
    return DeviceLlama(config, weights, cache, 64, sizes, strict=strict, flashinfer=flashinfer)


def host_llama(folder: Path) -> HostLlama:
    return HostLlama(*loaded(folder, CPU, torch.float32), 64, 1)


def loaded(folder: Path, backend: Backend, dtype: torch.dtype) -> tuple[ModelConfig, DecoderWeights, KVCache]:
    config = load_config(folder)
    with Checkpoint(folder) as checkpoint:
        weights = load_decoder_weights(config, checkpoint, dtype, lambda *_: None, backend)
    cache = KVCache(config.num_layers, NUM_BLOCKS, BLOCK, config.num_kv_heads, config.head_dim, dtype, backend.device)
    return config, weights, cache


def prompt(tokens: list[int], seq_blocks: list[int], first: int = 0) -> dict[str, np.ndarray]:
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    table = np.array(seq_blocks, np.int32)
    return {
        "token_ids": np.array(tokens, np.int32),
        "positions": positions,
        "kv_slots": table[positions // BLOCK] * BLOCK + positions % BLOCK,
        "context_lens": positions + 1,
        "masks": np.zeros((len(tokens), 1), np.uint64),
    }


def tree(tokens: list[int], parents: list[int], seq_blocks: list[int], root: int) -> dict[str, np.ndarray]:
    """Return the rows of a tree whose root is at position ``root``."""
    table = np.array(seq_blocks, np.int32)
    logical = root + np.arange(len(tokens), dtype=np.int32)
    parent_ids = np.array(parents, np.int32)
    masks = ancestor_mask(parent_ids)
    masks[:, 0] &= ~np.uint64(1)
    return {
        "token_ids": np.array(tokens, np.int32),
        "positions": root + depths(parent_ids),
        "kv_slots": table[logical // BLOCK] * BLOCK + logical % BLOCK,
        "context_lens": np.full(len(tokens), root + 1, np.int32),
        "masks": masks,
    }


def batch(parts: list[dict[str, np.ndarray]], tables: list[list[int]], tree_starts: list[int]) -> ForwardBatch:
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    width = max(map(len, tables))
    counts = [len(part["token_ids"]) for part in parts]
    return ForwardBatch(
        **joined,
        row_seqs=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        tree_starts=np.array(tree_starts, np.int32),
        block_tables=np.array([table + [0] * (width - len(table)) for table in tables], np.int32),
        logit_rows=np.arange(sum(counts), dtype=np.int32),
    )


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make = head_files.random_target if request.param == "llama" else head_files.qwen3_mtp_target
    make(folder)
    return folder


def run_both(
    folder: Path, device: str, strict: bool, planned: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return logits and hidden states of a prompt, chunks, and a mixed batch with trees.

    The CPU's come first, then the device's.
    """
    found = []
    backend = Backend("gpu", torch.device(device))
    for model in (host_llama(folder), llama(folder, backend, SIZES, strict=strict, planned=planned)):
        first, second = [3, 7, 1, 12], [2, 9, 5]
        results = []

        def keep(
            chunk: ForwardBatch, model: HostLlama | DeviceLlama = model, results: list[torch.Tensor] = results
        ) -> None:
            results.append(model.forward(chunk, LAYERS).float().cpu().clone())
            results.append(model.hidden_states.float().cpu().clone())

        text = [int(token) for token in np.arange(1, 12) * 5 % 30]
        keep(batch([prompt(text[:6], first)], [first], [0]))
        keep(batch([prompt(text[6:], first, 6), prompt(text[:9], second)], [first, second], [0, 0]))
        keep(
            batch(
                [tree([4, 8, 9, 8, 2], [-1, 0, 0, 1, 2], first, 10), prompt([6], second, 9)],
                [first, second],
                [10, 0],
            )
        )
        # Filled up to more sequences than there are rows.
        third = [6, 8]
        keep(
            batch(
                [prompt([9], first, 11), prompt([3], second, 10), prompt([4], third)], [first, second, third], [0, 0, 0]
            )
        )
        found.append(results)
    return found[0], found[1]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_device_computes_what_the_cpu_computes(folder: Path, strict: bool, device: str) -> None:
    ours, theirs = run_both(folder, device, strict)
    for expected, found in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("strict_products")
def test_in_strict_mode_a_row_has_the_same_bits_in_any_batch(folder: Path, dtype: torch.dtype, device: str) -> None:
    """A text's logits and hidden states are the same in three batches.

    Its tokens come one by one, as a prompt beside another sequence, and as nodes of a tree that has
    other nodes too.
    """
    model = llama(folder, Backend("gpu", torch.device(device)), SIZES, dtype, strict=True)
    text = [int(token) for token in np.arange(1, 8) * 5 % 30]
    first, second, third = [3, 7, 1], [2, 9, 5], [6, 8]

    def run(parts: list[dict[str, np.ndarray]], tables: list[list[int]], tree_starts: list[int]) -> list[torch.Tensor]:
        logits = model.forward(batch(parts, tables, tree_starts), LAYERS)
        return [logits.clone(), model.hidden_states.clone()]

    run([prompt(text[:3], first)], [first], [0])
    steps = [run([prompt([text[at]], first, at)], [first], [0]) for at in range(3, 7)]
    whole = run([prompt([4, 4, 8], third), prompt(text, second)], [third, second], [0, 0])
    # Nodes 0, 2 and 5 are the text.
    nodes = tree([text[4], 8, text[5], 9, 3, text[6]], [-1, 0, 0, 2, 1, 2], second, 4)
    trees = run([nodes, prompt([3], third, 3)], [second, third], [4, 0])
    for rows, chunk, node_rows in zip(zip(*steps, strict=True), whole, trees, strict=True):
        alone = torch.cat(rows)
        assert torch.equal(chunk[6:], alone)
        assert torch.equal(node_rows[[0, 2, 5]], alone[1:])
        assert alone.isfinite().all() and not torch.equal(node_rows[1], node_rows[2])


@pytest.mark.usefixtures("strict_products")
@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_rows_whose_logits_nobody_wants_need_no_last_layer(folder: Path, strict: bool, device: str) -> None:
    """Logits, hidden states and KV entries are the CPU's, and in
    strict mode those of a pass that wants all.
    """
    text, table = [int(token) for token in np.arange(1, 12) * 5 % 30], [3, 7, 1]
    whole = batch([prompt(text, table)], [table], [0])
    config, weights, cache = loaded(folder, Backend("gpu", torch.device(device)), torch.float32)
    model = DeviceLlama(config, weights, cache, 64, SIZES, strict=strict)
    cache.data.fill_(0)
    expected, hidden_states = model.forward(whole, (1,)).clone(), model.hidden_states.clone()
    entries, ours = cache.data.clone(), host_llama(folder)
    close = {"rtol": 0, "atol": 0} if strict else {"rtol": 1e-3, "atol": 1e-4}
    for wanted in ([2, 10], []):
        few = replace(whole, logit_rows=np.array(wanted, np.int32))
        cache.data.fill_(0)
        found = model.forward(few, (1,)).clone()
        torch.testing.assert_close(found, expected[wanted], **close)
        torch.testing.assert_close(model.hidden_states, hidden_states, **close)
        torch.testing.assert_close(cache.data, entries, **close)
        torch.testing.assert_close(found.cpu(), ours.forward(few, (1,)), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_no_memory_moves_after_matmuls_are_tuned(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's own graphs know the buffers, which are
    larger here for passes that want few logits.
    """
    random_model("qwen3 tied").save_pretrained(tmp_path)
    model = llama(tmp_path, Backend("gpu", torch.device(device)), SIZES)
    monkeypatch.setattr(model._passes, "tune", lambda path: None)
    model.tune(None)
    before = model.generation
    text, table = [int(token) for token in np.arange(1, 12) * 5 % 30], [3, 7, 1]
    for wanted in (range(len(text)), [10], []):
        model.forward(replace(batch([prompt(text, table)], [table], [0]), logit_rows=np.array(wanted, np.int32)))
        assert model.generation == before


def test_buckets_hold_what_they_are_asked_to() -> None:
    sizes = [bucket(count) for count in range(1, 700)]
    assert all(size >= count for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert max(size / count for count, size in enumerate(sizes, 1)) <= 1.5
    widths = [table_bucket(blocks) for blocks in range(1, 5000)]
    assert all(width >= blocks for blocks, width in enumerate(widths, 1)) and widths == sorted(widths)
    assert set(widths) == {128, 1024, 2048, 4096, 8192}
    rows = [prompt_bucket(count) for count in range(1, 2049)]
    assert all(0 <= size - count < 128 for count, size in enumerate(rows, 1)) and rows == sorted(rows)


@pytest.mark.parametrize("blocks", [1, 129])
def test_a_blank_batch_stands_for_all_of_its_size(blocks: int) -> None:
    """It has the graph of a batch whose sequences have
    so many blocks, however wide the table is.
    """
    batches = DeviceBatches(PassSizes(64, 64, 4, 2000), BLOCK, torch.device("cpu"), graphs=True)
    blank = blank_batch(40, 3, blocks, BLOCK)
    other = replace(blank, context_lens=np.full(40, BLOCK * (blocks - 1), np.int32))
    other = replace(other, block_tables=np.zeros((3, 1500), np.int32))
    shapes = {batches.upload(batch, runs_of(batch)).graph_shape for batch in (blank, other)}
    assert len(shapes) == 1 and {shape.blocks for shape in shapes if shape} == {table_bucket(blocks)}


def test_few_numbers_of_sequences_have_graphs_of_their_own(folder: Path, device: str) -> None:
    """Otherwise each sequence that joins or leaves a batch would wait for a capture."""
    assert {seq_bucket(count) for count in range(1, 17)} == {1, 2, 4, 8, 16}
    assert all(count <= seq_bucket(count) < 2 * count for count in range(1, 700))
    model = llama(folder, Backend("gpu", torch.device(device)), SIZES._replace(seqs=7))
    batches = [model.overlap_pass((), 8, seqs, 2, 2).batch for seqs in range(1, 8)]
    assert [batch.shape.seqs for batch in batches] == [1, 2, 4, 4, 7, 7, 7]
    assert len({id(batch) for batch in batches}) == 4
