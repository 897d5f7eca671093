"""Random checkpoints load, have finite and different logits, and split large ones into files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.gpu.checkpoint import DEMO, SHAPES, random_eagle3, random_target
from benchmarks.gpu.sharded import TensorSpec, write_checkpoint
from foretoken.models.config import load_config
from foretoken.models.draft_config import head_config
from foretoken.models.tokenizer_size import num_token_ids
from foretoken.models.weights import Checkpoint
from tests.foretoken.test_draft_heads import PagedHead
from tests.foretoken.test_draft_heads import load as load_head
from tests.foretoken.test_models import Paged
from tests.foretoken.test_models import load as load_target

TINY = SHAPES["tiny"]
TOKENS = np.arange(20) * 397 % TINY.vocab_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    random_target(folder / "target", TINY)
    random_eagle3(folder / "eagle3", folder / "target", draft_vocab_size=1000)
    return folder


def test_target_loads_and_its_logits_differ(folder: Path) -> None:
    logits = load_target(folder / "target").forward(Paged(1).prefill(0, TOKENS, 0, len(TOKENS)))
    assert logits.shape == (len(TOKENS), TINY.vocab_size)
    assert torch.isfinite(logits).all()
    assert (logits.std(dim=1) > 0.01).all()
    assert len(set(logits.argmax(dim=1).tolist())) > 10


def test_target_is_stored_as_the_shape_says(folder: Path) -> None:
    config = load_config(folder / "target")
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (128, 12, 8256)
    assert config.rope.kind == "llama3" and not config.tie_word_embeddings
    with Checkpoint(folder / "target") as checkpoint:
        assert {checkpoint.dtype(name) for name in checkpoint.names} == {torch.bfloat16}


def test_same_seed_same_weights(folder: Path, tmp_path: Path) -> None:
    random_target(tmp_path / "again", TINY)
    random_target(tmp_path / "other", TINY, seed=5)
    first = (folder / "target" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != first


def test_tokenizer_has_every_id_and_encodes_as_before(folder: Path) -> None:
    padded = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    demo = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    text = "def read_json(path):\n    return <|unused-8200|>"
    assert padded.encode(text).ids == demo.encode(text).ids
    assert num_token_ids(folder / "target", TINY.vocab_size) == TINY.vocab_size


def test_head_loads_with_its_own_vocabulary(folder: Path) -> None:
    head = load_head(folder / "eagle3", folder / "target")
    assert head.captured_layers == (2, 6, 9)
    assert head.target_ids is not None and len(head.target_ids) == 1000
    assert head.target_ids[0] == 0 and head.target_ids[-1] == 8256 * 999 // 1000
    hidden_states = torch.randn(len(TOKENS) - 1, head.hidden_width, generator=torch.Generator().manual_seed(0))
    logits, _ = PagedHead(head).extend(TOKENS[1:], 1, hidden_states, from_target=True)
    assert logits.shape == (19, 1000) and torch.isfinite(logits).all()
    # Confident enough for a deep tree.
    assert 5 < logits.std() < 20 and logits.softmax(dim=1).max(dim=1).values.median() > 0.4


def test_llama_3_1_8b_is_its_public_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"].config()))
    config = load_config(tmp_path)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 14336, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (32, 8, 128, 128256)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("llama3", 500000.0, 8.0)


def test_a_small_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8191"):
        random_target(tmp_path, replace(TINY, vocab_size=4096))


def test_large_checkpoints_are_sharded_and_read_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.arange(7),
        "c": torch.tensor([True, False, True]),
        "d": torch.randn(11),
    }
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, {"x": 1}, specs, tensors.__getitem__, shard_bytes=64)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == tensors.keys()
        assert torch.equal(checkpoint.read("a", (3, 5)), tensors["a"])
        assert torch.equal(checkpoint.read("d", (11,)), tensors["d"])
        assert checkpoint.read_integers("b", 7).tolist() == list(range(7))
    write_checkpoint(tmp_path, {"x": 1}, specs, tensors.__getitem__)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a is"):
        write_checkpoint(tmp_path, {}, {"a": TensorSpec((2,))}, lambda name: torch.zeros(3, dtype=torch.bfloat16))


def test_head_config_names_the_family(folder: Path) -> None:
    config = head_config(folder / "eagle3")
    assert config.family == "eagle3" and config.draft_vocab_size == 1000 and config.layer_ids is None
