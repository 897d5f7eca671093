"""Unusable checkpoints and configs: each error names the file and the tensor, or the feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.config import MODEL_TYPES, RopeConfig, load_config
from foretoken.models.decoder_weights import TensorReader, load_decoder_weights
from foretoken.models.weight_layout import RowLayout
from foretoken.models.weights import Checkpoint, hash_files

KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> None:
    config = load_config(folder)
    with Checkpoint(folder) as checkpoint:
        load_decoder_weights(config, checkpoint, torch.float32, lambda done, total, what: None)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def shard(folder: Path) -> list[Path]:
    """Split the weights into two shards with an index; return the shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    shards = []
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        shards.append(folder / f"model-0000{i + 1}-of-00002.safetensors")
        save_file({name: tensors[name] for name in part}, shards[-1])
        weight_map.update(dict.fromkeys(part, shards[-1].name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return shards


def test_a_sharded_checkpoint_loads_the_same_tensors(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        expected = {name: checkpoint.read(name, tuple(checkpoint.read(name, shape).shape)) for name, shape in shapes()}
    shard(folder)
    load(folder)
    with Checkpoint(folder) as checkpoint:
        for name, shape in shapes():
            assert torch.equal(checkpoint.read(name, shape), expected[name])


def shapes() -> list[tuple[str, tuple[int, ...]]]:
    return [(KEY, (16, 32)), ("model.norm.weight", (32,)), ("lm_head.weight", (100, 32))]


def test_progress_ends_at_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Checkpoint(folder) as checkpoint:
        load_decoder_weights(
            load_config(folder), checkpoint, torch.float32, lambda done, total, what: seen.append((done, total))
        )
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(KEY))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {KEY} is missing"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({KEY: torch.zeros(16, 31)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {KEY} has shape \[16, 31\].*\[16, 32\]"):
        load(folder)


def test_wrong_dtype(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({KEY: torch.zeros(16, 32, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {KEY} has type I8"):
        load(folder)


def test_a_tensor_without_a_place(folder: Path) -> None:
    name = KEY.replace("weight", "bias")
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(16)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} is not part of this model"):
        load(folder)


def test_leftovers_of_old_exporters_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -40])
def test_a_file_cut_short(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)


def test_a_shard_cut_short_and_a_shard_that_is_gone(folder: Path) -> None:
    second = shard(folder)[1]
    second.write_bytes(second.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=second.name):
        load(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name} does not exist"):
        load(folder)


def test_a_shard_without_a_tensor_of_the_index(folder: Path) -> None:
    first = shard(folder)[0]
    tensors = load_file(first)
    gone = sorted(tensors)[0]
    tensors.pop(gone)
    save_file(tensors, first)
    with pytest.raises(CheckpointError, match=f"{first.name}: tensor {gone} is missing"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_bad_index(folder: Path, content: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only safetensors checkpoints are loaded, not pytorch_model\.bin"):
        load(folder)


def test_no_weights_no_config_no_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(folder)
    with pytest.raises(CheckpointError, match="not a folder"):
        load(folder / "nowhere")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"auto_map": {"AutoConfig": "code.Config"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "attention_bias": True, "mlp_bias": True}, "mlp_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"hidden_size": 40}, "hidden_size"),
        ({"intermediate_size": 50}, "intermediate_size"),
        ({"head_dim": 24}, "head_dim"),
        (
            {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16},
            "num_attention_heads",
        ),
    ],
)
def test_unsupported_features_are_refused_by_name(folder: Path, changes: dict[str, Any], named: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=named):
        load_config(folder)


def test_end_tokens_of_both_files_count(folder: Path) -> None:
    change_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert load_config(folder).eos_token_ids == (2, 5, 7)


def test_rope_fields_of_older_configs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500000.0, "rope_scaling": scaling}))
    assert load_config(folder).rope == RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)


def test_the_hash_follows_the_contents(folder: Path) -> None:
    files = [folder / "config.json", folder / "model.safetensors"]
    before = hash_files(files)
    assert hash_files(files) == before
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    assert hash_files(files) != before


OPTIONAL_FIELDS = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "eos_token_id",
    "rope_parameters",
    "sliding_window",
)


@pytest.mark.parametrize("absent", ["", *OPTIONAL_FIELDS])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_fields_mean_what_transformers_makes_of_them(model_type: str, absent: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 48, "num_attention_heads": 32, "num_key_value_heads": 16}
    limits = {"vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 64, "sliding_window": None}
    rope = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    fields: dict[str, Any] = {"head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": [5, 7]}
    # MiMo's own class is Qwen2's with one field more.
    theirs = "qwen2" if model_type == "mimo" else model_type
    AutoConfig.for_model(theirs, **sizes, **limits, **rope, **fields).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop(absent, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    want = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    if model_type == "mistral" and want.sliding_window is not None:
        with pytest.raises(ConfigError, match="sliding_window"):
            load_config(tmp_path)
        return
    have = load_config(tmp_path)
    assert (have.num_heads, have.num_kv_heads) == (want.num_attention_heads, want.num_key_value_heads)
    head_dim = getattr(want, "head_dim", None) or want.hidden_size // want.num_attention_heads
    assert (have.head_dim, have.rms_norm_eps) == (head_dim, want.rms_norm_eps)
    assert have.tie_word_embeddings == want.tie_word_embeddings
    eos = want.eos_token_id
    assert have.eos_token_ids == tuple(eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert (have.rope.kind, have.rope.theta) == (want.rope_parameters["rope_type"], want.rope_parameters["rope_theta"])
    assert have.rope.factor == want.rope_parameters.get("factor", 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size: Input should be a valid integer"),
        ({"vocab_size": "many"}, "vocab_size: Input should be a valid integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater than 0"),
    ],
)
def test_a_config_with_a_wrong_value_names_the_field(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        load_config(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [KEY, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_nan_and_infinity_are_refused_by_name(folder: Path, name: str, value: float, dtype: torch.dtype) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name].view(-1)[-1] = value

    change_tensors(folder, spoil)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} holds NaN or infinity"):
        load(folder)


def test_numbers_whose_sum_is_none_are_weights_all_the_same(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors[KEY].view(-1)[:4].fill_(3e38))
    load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_on_a_device_are_checked_as_they_are_served(folder: Path, value: float) -> None:
    """The weights are checked in the GPU's type: 1e30 is more than float16 holds."""
    layout = RowLayout(torch.device("cpu"), torch.float16)
    with Checkpoint(folder) as checkpoint:
        reader = TensorReader(checkpoint, layout)
        matrix = reader.matrix(KEY, (16, 32))
        reader.check_finite([matrix])
    change_tensors(folder, lambda tensors: tensors[KEY].view(-1)[:1].fill_(-1e30))
    with Checkpoint(folder) as checkpoint:
        reader = TensorReader(checkpoint, layout)
        with pytest.raises(CheckpointError, match=f"tensor {KEY} holds 1e[+]30, which is too large for float16"):
            reader.check_finite([reader.matrix(KEY, (16, 32))])
    change_tensors(folder, lambda tensors: tensors[KEY].view(-1)[:1].fill_(value))
    with Checkpoint(folder) as checkpoint:
        reader = TensorReader(checkpoint, layout)
        with pytest.raises(CheckpointError, match=f"tensor {KEY} holds NaN or infinity"):
            reader.check_finite([reader.matrix(KEY, (16, 32))])
