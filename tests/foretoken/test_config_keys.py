"""Keys of config.json that are not read: published configs pass, and what changes numbers fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.config import load_config, parse_config, unread_keys
from foretoken.models.draft_config import head_config
from foretoken.models.target_check import config_notes
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
    "EAGLE3 of SafeAILab": {"transformers_version": "4.28.1", "use_cache": True, "torch_dtype": "float16"},
    "EAGLE3 of SpecForge": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_window_layers": 48,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "pretraining_tp": 1,
        "target_model_type": "gemma3_text",
        "target_hidden_size": head_files.HIDDEN,
        "additional_fc": False,
        "reuse_target_lm_head": True,
    },
    "EAGLE3 of NVIDIA": {
        "mlp_bias": False,
        "num_eagle_features": 1,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
            "has_lm_head": True,
        },
    },
    "EAGLE3 for Llama 4": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": head_files.MIDDLE,
        "attention_chunk_size": None,
        "attn_scale": 0.1,
        "attn_temperature_tuning": False,
        "floor_scale": 8192,
        "num_experts_per_tok": 1,
        "router_aux_loss_coef": 0.001,
    },
}


@pytest.mark.parametrize("name", HEAD_KEYS)
def test_keys_of_heads_are_taken(name: str, tmp_path: Path) -> None:
    config, tensors = head_files.eagle_files() if name == "EAGLE" else head_files.eagle3_files()
    head_files.write_folder(tmp_path, config | HEAD_KEYS[name], tensors)
    head = head_config(tmp_path)
    assert (head.family, head.unread_keys) == (name.lower().partition(" ")[0], ())


def speculators_head(folder: Path, layer: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Save a head in the dialect of vLLM's speculators; ``layer``: more fields of its layers."""
    config, tensors = head_files.eagle3_files(layer="layers.0")
    config = head_files.speculators_config(config, **fields)
    config["transformer_layer_config"] |= layer or {}
    return head_files.write_folder(folder, config, tensors)


def test_keys_of_speculators_are_taken(tmp_path: Path) -> None:
    """The config of its layers has all fields of transformers' class and of its base class."""
    layer = LlamaConfig().to_dict() | head_files.HEAD_CONFIG | {"head_dim": head_files.DIM, "rope_parameters": None}
    fields = {
        "speculators_version": "0.4.0",
        "has_no_defaults_at_init": False,
        "embed_requires_grad": True,
        "base_model_ep_plan": {"layers.*": "colwise"},
        "tie_word_embeddings": True,
        "vocab_size": head_files.VOCAB,
        "model_type": "speculator_model",
        "transformers_version": "5.0",
        "dtype": "bfloat16",
    }
    assert head_config(speculators_head(tmp_path, layer, **fields)).unread_keys == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_scale_foo", 0.5), ("logits_scaling", 8.0), ("post_block_norm", True), ("use_mtp_layernorm", True)],
)
def test_keys_of_heads_that_change_the_numbers_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    eagle, eagle3 = head_files.eagle_files(), head_files.eagle3_files()
    folders = {
        key: [
            head_files.write_folder(tmp_path / "eagle", eagle[0] | {key: value}, eagle[1]),
            head_files.write_folder(tmp_path / "eagle3", eagle3[0] | {key: value}, eagle3[1]),
            speculators_head(tmp_path / "top", **{key: value}),
        ],
        f"eagle_config.{key}": [
            head_files.write_folder(tmp_path / "nested", eagle3[0] | {"eagle_config": {key: value}}, eagle3[1])
        ],
    }
    for name, heads in folders.items():
        for head in heads:
            with pytest.raises(ConfigError, match=rf"{head.name}/config\.json: {name} .* is not supported"):
                head_config(head)
    # Keys that are refused in targets too are refused where the layers are read.
    with pytest.raises(ConfigError, match=rf"{key} .* is not supported"):
        head_config(speculators_head(tmp_path / "layer", {key: value}))


@pytest.mark.parametrize("theta", [0, -1, "10000", True, float("inf")])
def test_a_rope_theta_that_is_no_positive_number_is_refused(theta: object, tmp_path: Path) -> None:
    config = PUBLISHED["Llama 3.1"]
    for fields in ({"rope_parameters": {"rope_theta": theta}, "rope_scaling": None}, {"rope_theta": theta}):
        with pytest.raises((ConfigError, CheckpointError), match="rope_theta"):
            parse_config(config | fields, tmp_path / "config.json", {})


def test_a_factor_that_is_no_positive_number_is_refused(tmp_path: Path) -> None:
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        config = PUBLISHED["Llama 3.1"] | {"rope_scaling": LLAMA31_ROPE | {name: 0}}
        with pytest.raises(ConfigError, match=f"^{name} must be a number above 0, got 0$"):
            parse_config(config, tmp_path / "config.json", {})


def test_an_end_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, PUBLISHED["Llama 3.1"] | {"eos_token_id": [2, 128256, 999999]})
    (note,) = config_notes(folder, load_config(folder))
    assert note == f"{folder / 'config.json'}: eos_token_id 128256, 999999 is not in the vocabulary"


def test_keys_of_eagle3_are_not_read_of_an_eagle_head(tmp_path: Path) -> None:
    config, tensors = head_files.eagle_files()
    head_files.write_folder(tmp_path, config | {"norm_output": True}, tensors)
    with pytest.raises(ConfigError, match="norm_output true is not supported"):
        head_config(tmp_path)


def test_other_keys_of_heads_are_named(tmp_path: Path) -> None:
    for name, (config, tensors) in {"eagle": head_files.eagle_files(), "eagle3": head_files.eagle3_files()}.items():
        nested = {"hidden_size": 7, "head_dim": config.get("head_dim"), "note": "x"}
        fields = {"my_key": 3, "eagle_config": nested}
        head = head_config(head_files.write_folder(tmp_path / name, config | fields, tensors))
        assert head.unread_keys == ("my_key", "eagle_config.hidden_size", "eagle_config.note")
    head = head_config(speculators_head(tmp_path / "speculators", {"a_note": "x"}, my_key=3))
    assert head.unread_keys == ("my_key", "transformer_layer_config.a_note")


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
        ("n_shared_experts", 1),
        ("sliding_window_layers", 1),
        ("use_bidirectional_attention", True),
        ("use_bidirectional_attention", "all"),
        ("bidirectional_layers", [1]),
        # A false that asks for something.
        ("is_causal", False),
        ("use_rope", False),
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
        ("use_bidirectional_attention", False),
        ("is_causal", True),
        ("is_causal", None),
    ],
)
def test_values_that_ask_for_nothing_are_taken(key: str, value: object, tmp_path: Path) -> None:
    load_config(save(tmp_path, PUBLISHED["Llama 3.1"] | {key: value}))
    assert unread_keys(tmp_path) == []


def test_other_keys_are_named(tmp_path: Path) -> None:
    save(tmp_path, PUBLISHED["Llama 3.1"] | {"trained_by": "us", "a_note": "x"})
    load_config(tmp_path)
    assert unread_keys(tmp_path) == ["a_note", "trained_by"]


@pytest.mark.parametrize(
    "name",
    [
        *("LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering"),
        *("LlamaBidirectionalModel", "LlamaBidirectionalForSequenceClassification", "Qwen2ForRewardModel"),
        "LlavaForConditionalGeneration",
    ],
)
def test_a_class_of_another_task_is_refused_by_name(name: str, tmp_path: Path) -> None:
    message = rf'config\.json: architectures \["{name}"\] is not supported: not a causal language model'
    with pytest.raises(ConfigError, match=message):
        load_config(save(tmp_path, PUBLISHED["Llama 3.1"] | {"architectures": [name]}))


@pytest.mark.parametrize("name", ["FooForCausalLM", "LlamaModel", "Qwen2ForCausalLM"])
def test_an_unknown_class_is_named(name: str, tmp_path: Path) -> None:
    load_config(save(tmp_path, PUBLISHED["Llama 3.1"] | {"architectures": [name]}))
    (note,) = config_notes(tmp_path, load_config(tmp_path))
    assert note.endswith(f"architectures {name} not known for model_type llama: run as LlamaForCausalLM")


@pytest.mark.parametrize(
    ("model", "architectures"),
    [
        *(("Llama 2", ["LLaMAForCausalLM"]), ("Llama 2", []), ("Llama 2", None), ("Qwen3", ["Qwen3ForCausalLM"])),
        *(("Mistral", ["MistralForCausalLM"]), ("MiMo", ["MiMoForCausalLM"]), ("MiMo", ["MiMoMTP"])),
    ],
)
def test_known_classes_are_taken(model: str, architectures: list[str] | None, tmp_path: Path) -> None:
    load_config(save(tmp_path, PUBLISHED[model] | {"architectures": architectures}))
    assert config_notes(tmp_path, load_config(tmp_path)) == ()


def test_a_heads_layer_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: residual_multiplier 0\.22 is not supported"):
        parse_config(PUBLISHED["Llama 3.1"] | {"residual_multiplier": 0.22}, tmp_path / "config.json", {})
