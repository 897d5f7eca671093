"""The decoder's logits equal transformers', and a row has the same bits in all batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import load_config
from foretoken.models.decoder_weights import load_decoder_weights
from foretoken.models.llama import HostLlama
from foretoken.models.weights import Checkpoint
from foretoken.tree import ancestor_mask, depths
from tests.support.logit_errors import FLOAT16_BAR, relative_error

VOCAB = 1003
BLOCK_SIZE = 8
NUM_BLOCKS = 64
LLAMA31_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        **changes,
    }


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes(tie_word_embeddings=False))),
    "llama tied, four queries a key": lambda: LlamaForCausalLM(
        LlamaConfig(**sizes(num_key_value_heads=1, tie_word_embeddings=True))
    ),
    "llama, head dimension 80, no groups": lambda: LlamaForCausalLM(
        LlamaConfig(**sizes(num_key_value_heads=4, head_dim=80))
    ),
    "llama 3.1 scaling": lambda: LlamaForCausalLM(LlamaConfig(**sizes(head_dim=64, rope_parameters=LLAMA31_SCALING))),
    "llama linear scaling": lambda: LlamaForCausalLM(
        LlamaConfig(**sizes(rope_parameters={"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}))
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes(sliding_window=None))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes(tie_word_embeddings=False))),
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes(tie_word_embeddings=True))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes(head_dim=32, tie_word_embeddings=False))),
    "qwen3 tied": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes(head_dim=48, tie_word_embeddings=True))),
}


def random_model(name: str) -> PreTrainedModel:
    """Return a random model with random norms and biases too: ones and zeros hide mistakes."""
    torch.manual_seed(len(name))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.08)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32, threads: int = 1, block_size: int = BLOCK_SIZE) -> HostLlama:
    return load_with_cache(folder, dtype, threads, block_size)[0]


def load_with_cache(
    folder: Path, dtype: torch.dtype = torch.float32, threads: int = 1, block_size: int = BLOCK_SIZE
) -> tuple[HostLlama, KVCache]:
    config = load_config(folder)
    with Checkpoint(folder) as checkpoint:
        weights = load_decoder_weights(config, checkpoint, dtype, lambda done, total, what: None)
    blocks = NUM_BLOCKS * BLOCK_SIZE // block_size
    cache = KVCache(config.num_layers, blocks, block_size, config.num_kv_heads, config.head_dim, dtype)
    return HostLlama(config, weights, cache, config.max_position_embeddings, threads), cache


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, HostLlama]:
    model = random_model(request.param)
    model.save_pretrained(tmp_path)
    return model, load(tmp_path)


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    random_model("llama").save_pretrained(tmp_path)
    return tmp_path


def oracle(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """Return transformers' logits, float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]


class Paged:
    """Sequences over shuffled blocks of one model."""

    def __init__(self, num_seqs: int, seed: int = 0, block_size: int = BLOCK_SIZE) -> None:
        blocks = NUM_BLOCKS * BLOCK_SIZE // block_size
        order = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        each = blocks // num_seqs
        self.tables = order[: num_seqs * each].reshape(num_seqs, each)
        self.block_size = block_size

    def kv_slots(self, seq: int, logical: np.ndarray) -> np.ndarray:
        return (self.tables[seq][logical // self.block_size] * self.block_size + logical % self.block_size).astype(
            np.int32
        )

    def prefill(self, seq: int, tokens: np.ndarray, first: int, end: int) -> ForwardBatch:
        positions = np.arange(first, end, dtype=np.int32)
        return self._batch(
            seq, tokens[first:end], positions, positions, positions + 1, np.zeros((end - first, 1), np.uint64), 0
        )

    def tree(self, seq: int, tokens: np.ndarray, parents: np.ndarray, root: int) -> ForwardBatch:
        nodes = np.arange(len(parents))
        contexts = np.full(len(parents), root, np.int32)
        return self._batch(seq, tokens, root + depths(parents), root + nodes, contexts, ancestor_mask(parents), root)

    def _batch(
        self,
        seq: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        logical: np.ndarray,
        contexts: np.ndarray,
        masks: np.ndarray,
        tree_start: int,
    ) -> ForwardBatch:
        rows = len(tokens)
        starts = np.zeros(len(self.tables), np.int32)
        starts[seq] = tree_start
        return ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.ascontiguousarray(positions, np.int32),
            kv_slots=self.kv_slots(seq, logical),
            row_seqs=np.full(rows, seq, np.int32),
            context_lens=contexts,
            masks=masks,
            tree_starts=starts,
            block_tables=self.tables,
            logit_rows=np.arange(rows, dtype=np.int32),
        )


def merged(*batches: ForwardBatch) -> ForwardBatch:
    """Return batches of different sequences as one; all logits are wanted."""
    rows = sum(batch.num_rows for batch in batches)
    words = max(batch.masks.shape[1] for batch in batches)
    join = {
        name: np.concatenate([getattr(batch, name) for batch in batches])
        for name in ("token_ids", "positions", "kv_slots", "row_seqs", "context_lens")
    }
    return ForwardBatch(
        **join,
        masks=np.concatenate([np.pad(batch.masks, ((0, 0), (0, words - batch.masks.shape[1]))) for batch in batches]),
        tree_starts=np.max([batch.tree_starts for batch in batches], axis=0).astype(np.int32),
        block_tables=batches[0].block_tables,
        logit_rows=np.arange(rows, dtype=np.int32),
    )


def some_tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


# A tree with branches at two depths, and the path 0-1-3-6 in it.
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3], np.int32)


def paths(parents: np.ndarray) -> list[list[int]]:
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def test_prefill_equals_transformers(pair: tuple[PreTrainedModel, HostLlama]) -> None:
    model, ours = pair
    tokens = some_tokens(130)
    found = ours.forward(Paged(1).prefill(0, tokens, 0, 130))
    torch.testing.assert_close(found, oracle(model, tokens), rtol=0, atol=1e-4)


def test_chunks_and_decode_equal_transformers(pair: tuple[PreTrainedModel, HostLlama]) -> None:
    model, ours = pair
    tokens, paged = some_tokens(60, 1), Paged(1, seed=1)
    cuts = [0, 7, 8, 29, 45, *range(46, 61)]
    found = torch.cat([ours.forward(paged.prefill(0, tokens, a, b)).clone() for a, b in pairwise(cuts)])
    torch.testing.assert_close(found, oracle(model, tokens), rtol=0, atol=1e-4)


def test_tree_nodes_equal_transformers_on_their_paths(pair: tuple[PreTrainedModel, HostLlama]) -> None:
    model, ours = pair
    prefix, nodes, paged = some_tokens(43, 2), some_tokens(len(PARENTS), 3), Paged(1, seed=2)
    ours.forward(paged.prefill(0, prefix, 0, 43))
    found = ours.forward(paged.tree(0, nodes, PARENTS, 43))
    for node, path in enumerate(paths(PARENTS)):
        expected = oracle(model, np.concatenate([prefix, nodes[path]]))[-1]
        torch.testing.assert_close(found[node], expected, rtol=0, atol=1e-4)


def test_a_mixed_batch_equals_transformers(pair: tuple[PreTrainedModel, HostLlama]) -> None:
    """One pass has a prefill chunk, a tree and a decode row of three sequences."""
    model, ours = pair
    texts, nodes, paged = [some_tokens(50, seed) for seed in (4, 5, 6)], some_tokens(len(PARENTS), 7), Paged(3, seed=3)
    ours.forward(
        merged(paged.prefill(0, texts[0], 0, 20), paged.prefill(1, texts[1], 0, 33), paged.prefill(2, texts[2], 0, 49))
    )
    found = ours.forward(
        merged(
            paged.prefill(0, texts[0], 20, 50), paged.tree(1, nodes, PARENTS, 33), paged.prefill(2, texts[2], 49, 50)
        )
    )
    torch.testing.assert_close(found[:30], oracle(model, texts[0])[20:], rtol=0, atol=1e-4)
    for node, path in enumerate(paths(PARENTS)):
        expected = oracle(model, np.concatenate([texts[1][:33], nodes[path]]))[-1]
        torch.testing.assert_close(found[30 + node], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[-1], oracle(model, texts[2])[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_in_every_batch(llama_folder: Path, dtype: torch.dtype) -> None:
    """Rows run token by token, in chunks, as tree nodes, beside others, on two threads."""
    ours, tokens = load(llama_folder, dtype), some_tokens(150, 8)
    plain = Paged(1)
    expected = torch.cat([ours.forward(plain.prefill(0, tokens, i, i + 1)).clone() for i in range(150)])
    for size in (2, 5, 8, 13, 64, 150):
        for threads, block_size in ((1, 8), (2, 32)):
            model, paged = load(llama_folder, dtype, threads, block_size), Paged(1, 5, block_size)
            for first in range(0, 150, size):
                end = min(first + size, 150)
                found = model.forward(paged.prefill(0, tokens, first, end))
                assert torch.equal(found, expected[first:end])
    beside = Paged(3, seed=6)
    model = load(llama_folder, dtype, threads=2)
    model.forward(merged(beside.prefill(2, tokens, 0, 100), beside.prefill(0, some_tokens(9), 0, 9)))
    nodes = some_tokens(len(PARENTS), 9)
    path = paths(PARENTS)[6]
    nodes[path] = tokens[100:104]
    found = model.forward(merged(beside.prefill(0, some_tokens(40), 9, 40), beside.tree(2, nodes, PARENTS, 100)))
    assert torch.equal(found[31:][path], expected[100:104])
    # The rest of the text, after another tree was written over this one's KV slots.
    model.forward(beside.tree(2, some_tokens(20, 10), np.arange(-1, 19, dtype=np.int32), 100))
    assert torch.equal(model.forward(beside.prefill(2, tokens, 100, 150)), expected[100:])


def test_only_wanted_rows_have_logits(llama_folder: Path) -> None:
    ours, tokens = load(llama_folder), some_tokens(30)
    batch = Paged(1).prefill(0, tokens, 0, 30)
    everything = ours.forward(batch).clone()
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    some = ours.forward(ForwardBatch(**{**fields, "logit_rows": np.array([3, 17, 29], np.int32)}))
    assert torch.equal(some, everything[[3, 17, 29]])
    none = ours.forward(ForwardBatch(**{**fields, "logit_rows": np.zeros(0, np.int32)}))
    assert none.shape == (0, VOCAB)


def test_a_wide_tree_uses_all_mask_words(llama_folder: Path) -> None:
    """A chain of 150 nodes is a prefill of 150 tokens."""
    ours, tokens, paged = load(llama_folder), some_tokens(160), Paged(1)
    expected = ours.forward(paged.prefill(0, tokens, 0, 160)).clone()
    ours.forward(paged.prefill(0, tokens, 0, 10))
    chain = ours.forward(paged.tree(0, tokens[10:], np.arange(-1, 149, dtype=np.int32), 10))
    assert torch.equal(chain, expected[10:])


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("qwen2 tied", torch.float16)])
def test_a_16_bit_checkpoint_serves_float32_from_half_the_memory(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    random_model(name).to(dtype).save_pretrained(tmp_path)
    ours, tokens = load(tmp_path), some_tokens(40)
    found = ours.forward(Paged(1).prefill(0, tokens, 0, 40))
    # Read again, because .float() would leave the rotary frequencies rounded.
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(found, oracle(model, tokens), rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path / "wide")
    wide = load(tmp_path / "wide")
    assert torch.equal(wide.forward(Paged(1).prefill(0, tokens, 0, 40)), found)
    assert 2 * ours._weights.head.nbytes == wide._weights.head.nbytes


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.05), (torch.float16, 0.002)])
def test_16_bits_are_near_float32(llama_folder: Path, dtype: torch.dtype, share: float) -> None:
    ours, tokens = load(llama_folder, dtype), some_tokens(40)
    found = ours.forward(Paged(1).prefill(0, tokens, 0, 40)).clone()
    expected = load(llama_folder).forward(Paged(1).prefill(0, tokens, 0, 40))
    assert 0 < (found - expected).abs().max() < share * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_float16_logits_are_those_of_transformers_in_float16(tmp_path: Path, name: str) -> None:
    """A prompt and a decode row. Float32 sums bring ours nearer to the exact logits."""
    random_model(name).save_pretrained(tmp_path)
    ours, tokens, paged = load(tmp_path, torch.float16), some_tokens(60), Paged(1)
    found = torch.cat([ours.forward(paged.prefill(0, tokens, *cut)).clone() for cut in ((0, 59), (59, 60))])
    narrow, wide = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=each) for each in (torch.float16, torch.float32)
    )
    expected, exact = oracle(narrow, tokens), oracle(wide, tokens)
    assert 0 < relative_error(found, expected) < FLOAT16_BAR
    assert relative_error(found, exact) < relative_error(expected, exact)


def test_an_index_out_of_range_is_refused_before_anything_is_written(llama_folder: Path) -> None:
    ours, tokens = load(llama_folder), some_tokens(10)
    batch = Paged(1).prefill(0, tokens, 0, 10)
    before = ours.forward(batch).clone()
    batch.token_ids[4] = VOCAB
    with pytest.raises(ValueError, match="row 4 of the batch"):
        ours.forward(batch)
    batch.token_ids[4] = tokens[4]
    assert torch.equal(ours.forward(batch), before)
