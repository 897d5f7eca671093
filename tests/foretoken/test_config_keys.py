"""Keys of config.json that are not read: published configs pass, and what changes numbers fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ConfigError
from foretoken.models.config import load_config, parse_config, unread_keys
from foretoken.models.draft_config import head_config
from tests.references import head_files

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
}


def sizes(hidden: int, middle: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = (hidden, middle, layers, heads, kv_heads)
    return COMMON | dict(zip(names, values, strict=True)) | {"vocab_size": vocab, "max_position_embeddings": longest}


LLAMA31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# The keys of configs as they are published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {
        **sizes(4096, 11008, 32, 32, 32, 32000, 4096),
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": None,
        "_name_or_path": "x",
        "pad_token_id": 0,
    },
    "Llama 3.1": {
        **sizes(4096, 14336, 32, 32, 8, 128256, 131072),
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA31_ROPE,
        "head_dim": 128,
        "eos_token_id": [128001, 128008, 128009],
    },
    "a Llama of transformers 5": {
        **sizes(4096, 14336, 32, 32, 8, 128256, 131072),
        "model_type": "llama",
        "dtype": "bfloat16",
        "rope_parameters": {**LLAMA31_ROPE, "rope_theta": 500000.0},
    },
    "SmolLM2": {
        **sizes(576, 1536, 30, 9, 3, 49152, 8192),
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "transformers.js_config": {"dtype": "q4"},
    },
    "Vicuna": {
        **sizes(4096, 11008, 32, 32, 32, 32000, 4096),
        "model_type": "llama",
        "max_sequence_length": 4096,
        "rope_scaling": {"factor": 2.0, "type": "linear"},
    },
    "a Llama of Unsloth": {
        **sizes(4096, 14336, 32, 32, 8, 128256, 8192),
        "model_type": "llama",
        "unsloth_version": "2024.9",
        "unsloth_fixed": True,
        "pad_token_id": 128255,
    },
    "Mistral": {
        **sizes(4096, 14336, 32, 32, 8, 32768, 32768),
        "model_type": "mistral",
        "sliding_window": None,
        "attention_dropout": 0.0,
        "head_dim": 128,
    },
    "Qwen2.5": {
        **sizes(3584, 18944, 28, 28, 4, 152064, 32768),
        "model_type": "qwen2",
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "use_mrope": False,
        "attention_dropout": 0.0,
        "rope_theta": 1000000.0,
    },
    "Qwen3": {
        **sizes(4096, 12288, 36, 32, 8, 151936, 40960),
        "model_type": "qwen3",
        "head_dim": 128,
        "attention_bias": False,
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_scaling": None,
        "attention_dropout": 0.0,
    },
    "MiMo": {
        **sizes(4096, 11008, 36, 32, 8, 151680, 32768),
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "head_dim": 128,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "use_mrope": False,
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "rope_theta": 640000,
    },
}


def save(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_taken(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    have = load_config(save(tmp_path, config))
    assert (have.num_layers, have.vocab_size) == (config["num_hidden_layers"], config["vocab_size"])
    assert unread_keys(tmp_path) == (["transformers.js_config"] if name == "SmolLM2" else [])


# Keys of published heads, beside their layers' own: EAGLE, SafeAILab's and SpecForge's EAGLE-3.
HEAD_KEYS: dict[str, dict[str, Any]] = {
    "EAGLE": {"bias": True, "hot_vocab_size": 32768, "pretraining_tp": 1},
    "EAGLE3": {
        "draft_vocab_size": head_files.DRAFT_VOCAB,
        "use_aux_norm": False,
        "norm_before_fc": False,
        "bias": False,
        "norm_output": False,
        "torch_dtype": "float16",
        "pad_token_id": 0,
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    },
}


@pytest.mark.parametrize("name", HEAD_KEYS)
def test_keys_of_heads_are_taken(name: str, tmp_path: Path) -> None:
    config, tensors = head_files.eagle_files() if name == "EAGLE" else head_files.eagle3_files()
    head_files.write_folder(tmp_path, config | HEAD_KEYS[name], tensors)
    assert head_config(tmp_path).family == name.lower()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 1),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("query_pre_attn_scalar", 224),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("clip_qkv", 8.0),
        ("use_qk_norm", True),
        ("rope_interleaved", True),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("num_local_experts", 8),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("compression_config", {"format": "int-quantized"}),
        ("partial_rotary_factor", 0.5),
        # Not in the table: the name says it.
        ("hidden_scaling", 2.5),
        ("post_block_norm", True),
        ("attention_window_size", 512),
        ("expert_interval", 2),
    ],
)
def test_keys_that_change_the_numbers_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key}.* is not supported"):
        load_config(save(tmp_path, PUBLISHED["Llama 3.1"] | {key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_multiplier", 1.0),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", 0.0),
        ("clip_qkv", None),
        ("use_qk_norm", False),
        ("no_rope_layers", []),
        ("num_local_experts", 1),
        ("partial_rotary_factor", 1.0),
        ("hidden_scaling", 1.0),
        ("post_block_norm", False),
    ],
)
def test_values_that_ask_for_nothing_are_taken(key: str, value: object, tmp_path: Path) -> None:
    load_config(save(tmp_path, PUBLISHED["Llama 3.1"] | {key: value}))
    assert unread_keys(tmp_path) == []


def test_other_keys_are_named(tmp_path: Path) -> None:
    save(tmp_path, PUBLISHED["Llama 3.1"] | {"trained_by": "us", "a_note": "x"})
    load_config(tmp_path)
    assert unread_keys(tmp_path) == ["a_note", "trained_by"]


def test_a_heads_layer_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: residual_multiplier 0\.22 is not supported"):
        parse_config(PUBLISHED["Llama 3.1"] | {"residual_multiplier": 0.22}, tmp_path / "config.json", {})
