"""The tensors of a checkpoint: their names and shapes, and what differs from them in a file.

This module does not import torch, because the process that starts the services checks files, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from foretoken.errors import CheckpointError
from foretoken.models.checkpoint_files import INDEX, SINGLE, TensorHeader
from foretoken.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

FLOAT_TYPES = ("F32", "F16", "BF16")
# Prefixes of tensors that belong to a checkpoint's own draft heads (foretoken.models.draft_config).
_DRAFT_PREFIXES = {"mimo": "model.mtp_layers.", "qwen3": "mtp."}


def layer_shapes(
    config: ModelConfig, prefix: str, *, qkv_features: int = 0, input_norm: str = "input_layernorm"
) -> Shapes:
    """Return the shapes of one decoder layer.

    Args:
        qkv_features: input size of the attention's first matrix, if it is not ``hidden_size``.
        input_norm: name of the norm before the attention; empty if there is none.
    """
    size, middle, features = config.hidden_size, config.intermediate_size, qkv_features or config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {f"{prefix}.{input_norm}.weight": (size,)} if input_norm else {}
    for name, out_features in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (out_features, features)
        if config.qkv_bias:
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (out_features,)
    if config.head_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    shapes[f"{prefix}.self_attn.o_proj.weight"] = (size, queries)
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (size,)
    shapes[f"{prefix}.mlp.gate_proj.weight"] = (middle, size)
    shapes[f"{prefix}.mlp.up_proj.weight"] = (middle, size)
    shapes[f"{prefix}.mlp.down_proj.weight"] = (size, middle)
    return shapes


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Return the shape of every tensor in a checkpoint of this model, by its Hugging Face name."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= layer_shapes(config, f"model.layers.{layer}")
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def check_decoder(path: Path, headers: Mapping[str, TensorHeader], config: ModelConfig) -> None:
    """Raise CheckpointError unless a folder has exactly a decoder's tensors.

    Draft heads and two kinds of tensors that old exporters leave in the file are allowed.
    """

    def is_left_over(name: str) -> bool:
        prefix = _DRAFT_PREFIXES.get(config.model_type)
        return (
            name.endswith(".rotary_emb.inv_freq")
            or (config.tie_word_embeddings and name == "lm_head.weight")
            or (prefix is not None and name.startswith(prefix))
        )

    check_tensors(path, headers, tensor_shapes(config), is_left_over, "model")


def check_tensors(
    path: Path,
    headers: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, ...]],
    is_ignored: Callable[[str], bool],
    whole: str,
    advice: str = "",
) -> None:
    """Raise CheckpointError that names missing, misshapen, mistyped and unknown tensors.

    Args:
        headers: of all tensors in the folder.
        shapes: of the tensors that must be there.
        whole: what the tensors make.
        advice: what to do about misshapen tensors.
    """
    faults = []
    missing = [name for name in shapes if name not in headers]
    if missing:
        where = path / SINGLE if (path / SINGLE).is_file() else path / INDEX
        faults.append(f"{where}: tensor {_first(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    found = {name: header for name, header in headers.items() if name in shapes}
    if wrong := [name for name, header in found.items() if header.shape != shapes[name]]:
        header = headers[wrong[0]]
        faults.append(
            f"{header.file}: tensor {wrong[0]} has shape {list(header.shape)}; the config needs "
            f"{list(shapes[wrong[0]])}{_others(wrong)}"
        )
    if mistyped := [name for name, header in found.items() if header.dtype not in FLOAT_TYPES]:
        header = headers[mistyped[0]]
        faults.append(
            f"{header.file}: tensor {mistyped[0]} has type {header.dtype}; supported are {', '.join(FLOAT_TYPES)}"
            f"{_others(mistyped)}"
        )
    # The model would ignore a part of its training.
    if unknown := sorted(name for name in headers if name not in shapes and not is_ignored(name)):
        verb = "is" if len(unknown) == 1 else "are"
        faults.append(f"{headers[unknown[0]].file}: tensor {_first(unknown)} {verb} not part of this {whole}")
    if faults:
        raise CheckpointError("; ".join(faults), advice=advice if wrong else "")


def _first(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _others(names: list[str]) -> str:
    return f" ({len(names) - 1} more differ)" if len(names) > 1 else ""
