"""The model runner: warm-up, commit, fingerprint and sizes, on a small random model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.errors import ConfigError
from foretoken.models.batch import ForwardBatch
from foretoken.tree import ancestor_mask, depths
from verifier_svc.model.runner import ModelRunner, cache_bytes_per_token

VOCAB = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        eos_token_id=7,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return path


def build(folder: Path, **changes: Any) -> ModelRunner:
    return ModelRunner(folder, **{"threads": 1, "block_size": 16, "num_blocks": 12, **changes})


def prefill(tokens: np.ndarray, first: int, end: int) -> ForwardBatch:
    return tree(tokens[first:end], np.arange(-1, end - first - 1, dtype=np.int32), first)


def tree(tokens: np.ndarray, parents: np.ndarray, root: int) -> ForwardBatch:
    nodes = np.arange(len(tokens), dtype=np.int32)
    return ForwardBatch(
        token_ids=tokens.astype(np.int32),
        positions=root + depths(parents),
        kv_slots=root + nodes,
        row_seqs=np.zeros(len(tokens), np.int32),
        context_lens=np.full(len(tokens), root, np.int32),
        masks=ancestor_mask(parents),
        tree_starts=np.array([root], np.int32),
        block_tables=np.arange(12, dtype=np.int32)[None],
        logit_rows=nodes,
    )


def test_attributes(folder: Path) -> None:
    runner = build(folder, dtype="auto")
    assert (runner.config.vocab_size, runner.max_model_len, runner.config.eos_token_ids) == (VOCAB, 128, (7,))
    assert runner.dtype == torch.float32
    # 12 blocks of 16 tokens, 2 layers, keys and values, 2 heads of 16 float32.
    assert runner.cache.num_bytes == 13 * 16 * 2 * 2 * 2 * 16 * 4
    assert cache_bytes_per_token(runner.config, torch.float32) == runner.cache.num_bytes // (13 * 16)
    assert cache_bytes_per_token(runner.config, torch.float16) * 2 == cache_bytes_per_token(
        runner.config, torch.float32
    )
    # Every parameter once, in float32; panels are filled up to 32 outputs.
    assert runner.weights_bytes >= 4 * (VOCAB * 48 * 2 + 2 * (48 * 128 + 64 * 48 + 3 * 80 * 48))


def test_a_longer_context_than_the_checkpoints_is_refused(folder: Path) -> None:
    assert build(folder, context_length=100).max_model_len == 100
    with pytest.raises(ConfigError, match="context-length 129"):
        build(folder, context_length=129)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_warm_up_finds_strict_mode(folder: Path, dtype: str) -> None:
    seen: list[tuple[int, int]] = []
    runner = build(folder, dtype=dtype, threads=2)
    runner.warm_up(lambda done, total, what: seen.append((done, total)))
    assert runner.mode == "strict"
    assert seen[-1][0] == seen[-1][1] > 1


def test_warm_up_fits_a_cache_smaller_than_its_longest_text(folder: Path) -> None:
    runner = build(folder, num_blocks=1)
    runner.warm_up()
    assert runner.mode == "strict"


@pytest.mark.parametrize("is_other", [lambda batch: batch.num_rows > 8, lambda batch: batch.masks.any()])
def test_rows_that_depend_on_their_batch_mean_fast_mode_and_a_warning(
    folder: Path,
    is_other: Callable[[ForwardBatch], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Use a kernel that adds in another order in a tree, or, as libraries do, in nine rows."""
    runner = build(folder)
    strict_fingerprint = runner.fingerprint
    plain = runner._model.forward

    def forward(batch: ForwardBatch) -> torch.Tensor:
        logits = plain(batch)
        return logits * (1 + 2**-23) if is_other(batch) else logits

    monkeypatch.setattr(runner._model, "forward", forward)
    with caplog.at_level(logging.WARNING):
        runner.warm_up()
    assert runner.mode == "fast"
    assert "numerics: fast" in caplog.text
    assert runner.fingerprint != strict_fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_committed_path_is_plain_text(folder: Path, dtype: str) -> None:
    """After the commit of path 0-2-4 the next rows have the same bits as without any tree."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40)
    parents = np.array([-1, 0, 0, 1, 2], np.int32)
    nodes = np.array([tokens[20], 1, tokens[21], 2, tokens[22]])
    runner = build(folder, dtype=dtype)
    runner.forward(prefill(tokens, 0, 20))
    runner.forward(tree(nodes, parents, 20))
    runner.commit(np.array([20, 22, 24], np.int32), np.array([20, 21, 22], np.int32))
    found = runner.forward(prefill(tokens, 23, 40))
    plain = build(folder, dtype=dtype)
    plain.forward(prefill(tokens, 0, 23))
    assert torch.equal(found, plain.forward(prefill(tokens, 23, 40)))


def test_commit_refuses_kv_slots_that_are_not_there(folder: Path) -> None:
    runner = build(folder)
    with pytest.raises(ValueError, match="KV slot"):
        runner.commit(np.array([192], np.int32), np.array([0], np.int32))
    with pytest.raises(ValueError, match="KV slot"):
        runner.commit(np.array([0], np.int32), np.array([-1], np.int32))
    with pytest.raises(ValueError, match="length"):
        runner.commit(np.array([0, 1], np.int32), np.array([0], np.int32))
    runner.commit(np.zeros(0, np.int32), np.zeros(0, np.int32))


def test_the_fingerprint_is_that_of_checkpoint_and_numerics(folder: Path, tmp_path: Path) -> None:
    first = build(folder)
    assert build(folder, threads=2, num_blocks=5).fingerprint == first.fingerprint
    assert len({build(folder, dtype=dtype).fingerprint for dtype in ("float32", "bfloat16", "float16")}) == 3
    LlamaForCausalLM.from_pretrained(folder).apply(_double_norms).save_pretrained(tmp_path)
    assert build(tmp_path).fingerprint != first.fingerprint


def test_what_decides_which_tokens_a_grammar_allows_is_part_of_the_fingerprint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(folder).fingerprint
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert build(tmp_path).fingerprint == first
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert build(tmp_path).fingerprint != first
    monkeypatch.setattr("verifier_svc.model.runner.LLGUIDANCE_VERSION", "0.0")
    assert build(folder).fingerprint != first


def _double_norms(module: torch.nn.Module) -> None:
    if type(module).__name__ == "LlamaRMSNorm":
        module.weight.data *= 2
