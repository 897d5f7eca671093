"""Read a checkpoint's config.json.

Keep what the forward pass needs, and reject unsupported features by name.

It only reads local files and never runs code from a checkpoint. It does not use transformers'
AutoConfig, whose import takes two seconds, half of a verifier's start, while broken streams wait.
Missing fields mean the same as there; tests compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from foretoken.errors import CheckpointError, ConfigError
from foretoken.json_file import read_object
from foretoken.models.architectures import unknown_architectures
from foretoken.models.config_keys import refusal, refused_key, unknown_keys

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
# transformers has no class for these, so their checkpoints name their own code, which is not needed
# here.
_WITHOUT_A_CLASS = ("mimo",)
# Model types whose queries, keys and values have a bias.
_WITH_BIAS = ("qwen2", "mimo")
# The CPU kernels work on whole vectors.
_WIDTH_MULTIPLE = 16


class _ConfigFile(BaseModel):
    """The fields of config.json that matter here, under their own names; all others are ignored."""

    model_config = ConfigDict(strict=True)

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    # transformers 5 writes rope_parameters; earlier versions wrote rope_theta and rope_scaling.
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    quantization_config: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None


# The keys of config.json that are read here.
READ_KEYS = frozenset(_ConfigFile.model_fields)
# Defaults of fields that differ between model types.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"eos_token_id": 2},
    "mistral": {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mimo": {"num_key_value_heads": 32},
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding.

    The last three fields belong to Llama 3.1's scaling (``rope_type: llama3``).
    """

    kind: Literal["default", "linear", "llama3"]
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder.

    ``vocab_size`` may be larger than the tokenizer's: checkpoints pad their embedding.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    head_norm: bool
    eos_token_ids: tuple[int, ...]


def load_config(path: Path) -> ModelConfig:
    """Read the config of a checkpoint folder.

    Raises:
        CheckpointError: no folder, no config.json, or not JSON.
        ConfigError: the model type or a feature is not supported; names it.
    """
    raw = read_config_file(path)
    if numeric := unknown_keys(raw, READ_KEYS)[0]:
        raise ConfigError(refusal(path / "config.json", {key: raw[key] for key in numeric}))
    unknown_architectures(raw, path / "config.json")
    generation = read_object(path / "generation_config.json") or {}
    return parse_config(raw, path / "config.json", generation)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the fields of the folder's config.json.

    Raises CheckpointError as ``load_config``, and ConfigError for ``auto_map``, which needs code.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder with a checkpoint")
    raw = read_object(path / "config.json")
    if raw is None:
        raise CheckpointError(f"{path / 'config.json'} does not exist")
    # The speculators library names its own class in every head that it writes; the other fields
    # suffice.
    is_known = raw.get("model_type") in _WITHOUT_A_CLASS or "speculators_model_type" in raw
    if raw.get("auto_map") and not is_known:
        raise ConfigError(f"{path / 'config.json'}: auto_map needs code from the checkpoint, which is never run")
    return raw


def unread_keys(path: Path) -> list[str]:
    """Return the keys of the folder's config.json that foretoken does not know.

    None of them changes the numbers.
    """
    return unknown_keys(read_config_file(path), READ_KEYS)[1]


def parse_config(raw: dict[str, Any], file: Path, generation: dict[str, Any]) -> ModelConfig:
    """Return the config of the fields of config.json and generation_config.json.

    ``file`` is named in errors. Raises ConfigError for a model that is not supported,
    CheckpointError for a field of another form.
    """
    if raw.get("model_type") not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        raise ConfigError(f"model_type {raw.get('model_type')!r} is not supported; supported: {supported}")
    if (key := refused_key(raw)) is not None:
        raise ConfigError(refusal(file, {key: raw[key]}))
    try:
        parsed = _ConfigFile.model_validate(_DEFAULTS[raw["model_type"]] | raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{file}: {field}: {first['msg']}") from error
    return _reduce(parsed, generation)


def _reduce(parsed: _ConfigFile, generation: dict[str, Any]) -> ModelConfig:
    _refuse_unsupported(parsed)
    num_heads = parsed.num_attention_heads
    config = ModelConfig(
        model_type=parsed.model_type,
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_layers=parsed.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=parsed.num_key_value_heads or num_heads,
        head_dim=parsed.head_dim or parsed.hidden_size // num_heads,
        rms_norm_eps=parsed.rms_norm_eps,
        rope=_rope(parsed),
        max_position_embeddings=parsed.max_position_embeddings,
        tie_word_embeddings=parsed.tie_word_embeddings,
        qkv_bias=parsed.model_type in _WITH_BIAS,
        head_norm=parsed.model_type == "qwen3",
        eos_token_ids=_eos_token_ids(parsed.eos_token_id, generation.get("eos_token_id")),
    )
    _check_sizes(config)
    return config


def _refuse_unsupported(parsed: _ConfigFile) -> None:
    if parsed.quantization_config is not None:
        raise ConfigError("quantization_config: quantized checkpoints are not supported")
    if parsed.hidden_act != "silu":
        raise ConfigError(f"hidden_act {parsed.hidden_act!r} is not supported; supported: silu")
    # Model types that always have biases may say so.
    if parsed.attention_bias and parsed.model_type not in _WITH_BIAS:
        raise ConfigError("attention_bias is not supported")
    if parsed.mlp_bias:
        raise ConfigError("mlp_bias is not supported")
    # Mistral's files have no switch: the width alone turns it on.
    windowed = parsed.sliding_window is not None and (parsed.model_type == "mistral" or parsed.use_sliding_window)
    if windowed or any(kind != "full_attention" for kind in parsed.layer_types or ()):
        raise ConfigError("sliding_window: attention over a sliding window is not supported")


def _rope(parsed: _ConfigFile) -> RopeConfig:
    parameters = parsed.rope_scaling or parsed.rope_parameters or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", parsed.partial_rotary_factor or 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported")
    theta = 10000.0 if parsed.rope_theta is None else parsed.rope_theta
    theta = _positive("rope_theta", parameters.get("rope_theta", theta))
    if kind == "default":
        return RopeConfig("default", theta)
    try:
        if kind == "linear":
            return RopeConfig("linear", theta, _positive("factor", parameters["factor"]))
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factor, low, high = (_positive(name, parameters[name]) for name in names)
            original = parameters.get("original_max_position_embeddings", parsed.max_position_embeddings)
            longest = int(_positive("original_max_position_embeddings", original))
            return RopeConfig("llama3", theta, factor, low, high, longest)
    except KeyError as error:
        raise ConfigError(f"rope_type {kind!r} needs {error.args[0]}") from error
    raise ConfigError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def _eos_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids of config.json and generation_config.json together, ascending."""
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return tuple(sorted(ids))


def _check_sizes(config: ModelConfig) -> None:
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) < 1 or getattr(config, name) % _WIDTH_MULTIPLE:
            raise ConfigError(f"{name} must be a multiple of {_WIDTH_MULTIPLE}, got {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_heads} must be a multiple of num_key_value_heads {config.num_kv_heads}"
        )
