"""Recognize the draft head in a folder by its config.json and tensor names.

Unsupported heads are rejected.

EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858) share one layout. EAGLE-3 (arXiv 2503.01840) has
two spellings and two dialects of its config: one of SafeAILab and SpecForge, one of vLLM's
``speculators``. MTP layers are part of the target's checkpoint. MTP layers with Qwen3-Next's names
run with the arithmetic of their Qwen3 body (plain norms and attention), not Qwen3-Next's.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from foretoken.drafting import FINAL_NORM
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.checkpoint_files import tensor_files, tensor_headers
from foretoken.models.config import READ_KEYS, ModelConfig, parse_config, read_config_file
from foretoken.models.config_keys import HARMLESS_IN_HEADS, OF_LLAMA4, check_keys

Layout = Literal["eagle", "eagle3", "mimo", "qwen3_next"]

# Prefixes of EAGLE-3's tensors and their canonical spelling, applied in order.
_SPELLINGS = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_MTP_NAMES: tuple[tuple[Layout, str, str], ...] = (
    ("mimo", "model.mtp_layers.", r"model\.mtp_layers\.(\d+)\."),
    ("qwen3_next", "mtp.", r"mtp\.layers\.(\d+)\."),
)
# Tensors that only EAGLE-3 has, as stored. Some EAGLE heads have a norm.weight too.
_ONLY_EAGLE3 = re.compile(
    r"(model\.)?(midlayer\.|aux_norm_|fc_norm\.|input_norm\.|layers\.\d+\.hidden_norm\.|d2t$|t2d$)"
)
MTP_PREFIXES = tuple(prefix for _, prefix, _ in _MTP_NAMES)
_HEAD_MODEL_TYPES = ("llama", "llama4_text", "mistral", "qwen2", "qwen3")
_DEFAULT_NUM_LAYERS = 3
# Keys that the config of an EAGLE-3 head has beside its layers' keys, itself or in eagle_config.
_EAGLE3_KEYS = frozenset(
    {
        *("use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"),
        *("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "draft_vocab_size", "target_hidden_size"),
    }
)
# What to do about a head that does not fit.
USE_ANOTHER = "use one that was trained for this model"
OTHER_TARGET = f"this head was made for another target; {USE_ANOTHER}"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """One draft head.

    Attributes:
        body: shape of its decoder layers; ``num_layers`` counts the layers of all modules.
        num_depths: number of modules; a single one is applied recurrently.
        stored_names: tensor names in the file by canonical name (EAGLE's without ``model.``, MTP's
            as stored).
        draft_vocab_size: rows of its own output head; None: it uses the target's.
        target_hidden_size: the target's hidden size, if the config names it.
        layer_ids: the target's layers whose inputs it is fed; None: the usual ones by the target's
            depth.
        norm_before_residual: the first layer's residual is the output of ``hidden_norm``, not its
            input.
        norm_output: the head is fed the output of its last norm, not its input.
        unread_keys: keys of a config of its own that are not known; none changes the numbers.
    """

    layout: Layout
    body: ModelConfig
    num_depths: int
    stored_names: dict[str, str]
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    unread_keys: tuple[str, ...] = ()

    @property
    def family(self) -> Literal["eagle", "eagle3", "mtp"]:
        if self.layout == "eagle" or self.layout == "eagle3":
            return self.layout
        return "mtp"


def head_config(path: Path) -> HeadConfig:
    """Read the config of the draft head in a folder, which for MTP is the target's.

    Raises:
        CheckpointError: no folder, no config.json, no safetensors, or no draft head in it.
        ConfigError: the kind of head or a feature is not supported; names it.
    """
    raw = read_config_file(path)
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigError(
            f"{path / 'config.json'}: speculators_model_type {kind!r} is not supported; supported: eagle3"
        )
    files = tensor_files(path)
    for layout, prefix, layer in _MTP_NAMES:
        if any(name.startswith(prefix) for name in files):
            return _mtp_config(raw, path, layout, {name: name for name in files if name.startswith(prefix)}, layer)
    stored = _canonical_names(files)
    if "fc.weight" not in stored or not any(name.startswith("layers.0.") for name in stored):
        raise CheckpointError(f"{path} holds no draft head: neither fc.weight and a layer, nor MTP layers")
    if any(".kv_a_proj" in name for name in stored):
        raise ConfigError(f"{path}: draft heads with latent attention (MLA, kv_a_proj_with_mqa) are not supported")
    file = path / "config.json"
    for key in ("eagle_config", "transformer_layer_config"):
        if not isinstance(raw.get(key), dict | None):
            raise CheckpointError(f"{file}: {key}: not an object")
    if _is_eagle3(path, stored):
        head = _eagle3_config(raw, path, stored)
        return replace(head, unread_keys=_unread_keys(raw, file, _EAGLE3_KEYS))
    body = _body(raw, path, stored)
    return HeadConfig("eagle", body, num_depths=1, stored_names=stored, unread_keys=_unread_keys(raw, file))


def head_captured_layers(config: HeadConfig, num_target_layers: int) -> tuple[int, ...]:
    """Return the target's hidden states that the head is fed, as in DrafterNeeds.captured_layers.

    Raises:
        ConfigError: the target has no such layer.
    """
    if config.family != "eagle3":
        return (FINAL_NORM,)
    n = num_target_layers
    found = config.layer_ids if config.layer_ids is not None else (2, n // 2, n - 3)
    # Some configs call the last layer's output n + 1, but there is no layer n + 1 to enter.
    found = tuple(n if layer == n + 1 else layer for layer in found)
    if not all(0 <= layer <= n for layer in found):
        raise ConfigError(
            f"the draft head reads the inputs of layers {list(found)}; the target has {n} layers", advice=OTHER_TARGET
        )
    return found


def _canonical_names(files: dict[str, Path]) -> dict[str, str]:
    stored: dict[str, str] = {}
    for name in sorted(files):
        canonical = name.removeprefix("model.")
        for old, new in _SPELLINGS:
            if canonical.startswith(old):
                canonical = new + canonical.removeprefix(old)
        if canonical in stored:
            raise CheckpointError(f"{files[name]}: {name} and {stored[canonical]} are the same tensor")
        stored[canonical] = name
    return stored


def _is_eagle3(path: Path, stored: dict[str, str]) -> bool:
    """Return whether any tensor is one that only EAGLE-3 has, by its name or its shape."""
    if any(_ONLY_EAGLE3.match(name) for name in stored.values()):
        return True
    headers = tensor_headers(path)
    query, joint = (headers.get(stored.get(name, "")) for name in ("layers.0.self_attn.q_proj.weight", "fc.weight"))
    # Attention reads the embedding beside the hidden state.
    return query is not None and joint is not None and query.shape[-1] == 2 * joint.shape[0]


def _mtp_config(raw: dict[str, Any], path: Path, layout: Layout, stored: dict[str, str], layer: str) -> HeadConfig:
    body = parse_config(raw, path / "config.json", {})
    found = {int(match[1]) for name in stored if (match := re.match(layer, name))}
    if body.model_type != {"mimo": "mimo", "qwen3_next": "qwen3"}[layout]:
        raise ConfigError(f"{path}: MTP layers of this layout are not supported for model_type {body.model_type!r}")
    num_depths = max(found, default=-1) + 1
    if found != set(range(num_depths)) or not found:
        raise CheckpointError(f"{path}: MTP layers {sorted(found)} are not counted from 0 without gaps")
    if raw.get("num_nextn_predict_layers", num_depths) != num_depths:
        wanted = raw["num_nextn_predict_layers"]
        raise CheckpointError(f"{path}: num_nextn_predict_layers is {wanted}, but there are {num_depths} MTP layers")
    return HeadConfig(layout, replace(body, num_layers=num_depths), num_depths, stored)


def _eagle3_config(raw: dict[str, Any], path: Path, stored: dict[str, str]) -> HeadConfig:
    nested = raw.get("eagle_config") or {}
    settings = {**nested, **{name: value for name, value in raw.items() if value is not None}}
    if settings.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{path / 'config.json'}: use_aux_hidden_state: false is not supported")
    ids = settings.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        raise CheckpointError(f"{path / 'config.json'}: eagle_aux_hidden_state_layer_ids: not a list of layers")
    # SafeAILab's ids name a layer's output, which enters the layer after it. speculators counts as
    # vLLM does: an id names the input of the layer.
    layers = None if ids is None else tuple(i if "speculators_model_type" in raw else i + 1 for i in ids)
    number = settings.get("num_aux_hidden_states", len(layers) if layers else _DEFAULT_NUM_LAYERS)
    if number != (len(layers) if layers else _DEFAULT_NUM_LAYERS):
        raise ConfigError(f"{path / 'config.json'}: num_aux_hidden_states {number} without the layers' ids")
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if settings.get(flag) and tensor not in stored:
            raise CheckpointError(f"{path}: {flag} is set, but tensor {tensor} is missing")
    return HeadConfig(
        layout="eagle3",
        body=_body(raw.get("transformer_layer_config", raw), path, stored),
        num_depths=1,
        stored_names=stored,
        draft_vocab_size=settings.get("draft_vocab_size"),
        target_hidden_size=settings.get("target_hidden_size"),
        layer_ids=layers,
        norm_before_residual=bool(settings.get("norm_before_residual", False)),
        norm_output=bool(settings.get("norm_output", False)),
    )


def _unread_keys(raw: dict[str, Any], file: Path, read: Collection[str] = ()) -> tuple[str, ...]:
    """Return the keys that are not known. Raises ConfigError for one that changes the numbers.

    ``read``: keys that the head reads, beside those of its layers.
    """
    layer = raw.get("transformer_layer_config")
    nested = raw.get("eagle_config") or {}
    known = {*read, *HARMLESS_IN_HEADS, "eagle_config", "speculators_model_type"}
    of_layer = {*READ_KEYS, "intermediate_size_mlp", *known}
    if (raw if layer is None else layer).get("model_type") == "llama4_text":
        of_layer |= OF_LLAMA4
    if layer is None:
        unread = check_keys(raw, of_layer, file)
    else:
        # A copy of the layer's field says nothing more.
        own = {key: value for key, value in raw.items() if key not in layer or layer[key] != value}
        unread = check_keys(own, {*known, "transformer_layer_config", "model_type", "tie_word_embeddings"}, file)
        unread += check_keys(layer, of_layer, file, "transformer_layer_config.")
    own = {key: value for key, value in nested.items() if key not in raw or raw[key] != value}
    return (*unread, *check_keys(own, known, file, "eagle_config."))


def _body(raw: dict[str, Any], path: Path, stored: dict[str, str]) -> ModelConfig:
    """Return the shape of the head's decoder layers.

    Their tensors decide which biases and norms they have.
    """
    model_type = raw.get("model_type", "llama")
    if model_type not in _HEAD_MODEL_TYPES:
        raise ConfigError(f"{path / 'config.json'}: draft heads of model_type {model_type!r} are not supported")
    fields = {"max_position_embeddings": 2048, "num_hidden_layers": 1, "vocab_size": 1, **raw}
    if model_type == "llama4_text":
        fields |= {"model_type": "llama", "intermediate_size": raw.get("intermediate_size_mlp")}
    # The tensors decide; a bias of anything but q, k or v is an unknown tensor.
    fields.pop("attention_bias", None)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        # For text, the three axes of positions are equal and rotate as one does.
        if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            fields[name] = {**rope, "rope_type": "default"}
    body = parse_config({"model_type": model_type, **fields}, path / "config.json", {})
    return replace(
        body,
        qkv_bias="layers.0.self_attn.q_proj.bias" in stored,
        head_norm="layers.0.self_attn.q_norm.weight" in stored,
    )
