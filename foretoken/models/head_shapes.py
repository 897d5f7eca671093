"""The tensors of a draft head: their names and shapes, and what differs from them in a file.

This module does not import torch, because the process that starts the services checks files, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.checkpoint_files import TensorHeader
from foretoken.models.config import ModelConfig
from foretoken.models.draft_config import OTHER_TARGET, USE_ANOTHER, HeadConfig, head_captured_layers
from foretoken.models.tensor_shapes import Shapes, check_tensors, layer_shapes

INTEGER_TYPES = ("I64", "I32")
# The config is the head's own, and may be another head's.
_MISSHAPEN = f"this head was made for another target, or its config.json for another head; {USE_ANOTHER}"
# All exporters leave these in the file of a head that does not read them.
_LEFT_OVER = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")


def reads_embedding(head: HeadConfig, target: ModelConfig) -> bool:
    """Return whether an EAGLE-3 head has its own embedding.

    It has if its width differs from the target's, or its config names the target's.
    """
    needed = head.body.hidden_size != target.hidden_size
    named = head.target_hidden_size is not None and "embed_tokens.weight" in head.stored_names
    return head.family == "eagle3" and (needed or named)


def head_shapes(path: Path, head: HeadConfig, target: ModelConfig) -> Shapes:
    """Return the shapes of the tensors that a head reads, by canonical name, except ``d2t``.

    Raises:
        ConfigError: head and target do not fit.
    """
    if head.layout == "eagle":
        return _eagle(path, head, target)
    if head.layout == "eagle3":
        return _eagle3(path, head, target)
    shapes: Shapes = {}
    for depth in range(head.num_depths):
        shapes |= (_mimo if head.layout == "mimo" else _qwen3_next)(head, depth)
    return shapes


def check_head_tensors(path: Path, headers: Mapping[str, TensorHeader], head: HeadConfig, target: ModelConfig) -> None:
    """Raise CheckpointError unless a folder has exactly a head's tensors.

    Raises:
        ConfigError: head and target do not fit.
    """
    stored = head.stored_names
    shapes = {stored.get(name, name): shape for name, shape in head_shapes(path, head, target).items()}
    left_over = {stored[name] for name in _LEFT_OVER if name in stored and head.family != "mtp"}
    mine = {name: headers[name] for name in stored.values()}

    def is_left_over(name: str) -> bool:
        return name in left_over or name.endswith("rotary_emb.inv_freq")

    check_tensors(path, mine, shapes, is_left_over, "draft head", _MISSHAPEN if head.family != "mtp" else "")
    size = head.draft_vocab_size
    if head.family != "eagle3" or size is None:
        return
    if "d2t" not in stored:
        if size != target.vocab_size:
            raise CheckpointError(f"{path}: tensor d2t is missing: {size} draft tokens of {target.vocab_size}")
        return
    header = headers[stored["d2t"]]
    if header.dtype not in INTEGER_TYPES or header.shape != (size,):
        raise CheckpointError(
            f"{header.file}: tensor d2t is {header.dtype} {list(header.shape)}; expected {size} integers"
        )


def _eagle(path: Path, head: HeadConfig, target: ModelConfig) -> Shapes:
    body, size = head.body, head.body.hidden_size
    if size != target.hidden_size:
        raise ConfigError(
            f"{path}: an EAGLE head of hidden size {size} does not match a target of {target.hidden_size}",
            advice=OTHER_TARGET,
        )
    shapes: Shapes = {"fc.weight": (size, 2 * size)} | _if_stored(head, "fc.bias", size)
    for index in range(body.num_layers):
        has_norm = f"layers.{index}.input_layernorm.weight" in head.stored_names
        shapes |= layer_shapes(body, f"layers.{index}", input_norm="input_layernorm" if has_norm else "")
    return shapes


def _eagle3(path: Path, head: HeadConfig, target: ModelConfig) -> Shapes:
    body, size, stored = head.body, head.body.hidden_size, head.stored_names
    width = head.target_hidden_size or target.hidden_size
    if width != target.hidden_size:
        raise ConfigError(
            f"{path}: target_hidden_size {width} does not match a target of {target.hidden_size}", advice=OTHER_TARGET
        )
    num_states = len(head_captured_layers(head, target.num_layers))
    shapes: Shapes = {"fc.weight": (size, width * num_states)} | _if_stored(head, "fc.bias", size)
    shapes |= {f"layers.0.{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= layer_shapes(body, "layers.0", qkv_features=2 * size, input_norm="")
    for index in range(1, body.num_layers):
        norm = "hidden_norm" if f"layers.{index}.hidden_norm.weight" in stored else "input_layernorm"
        shapes |= layer_shapes(body, f"layers.{index}", input_norm=norm)
    if "input_norm.weight" in stored:
        shapes["input_norm.weight"] = (width * num_states,)
    elif "fc_norm.0.weight" in stored:
        shapes |= {f"fc_norm.{index}.weight": (width,) for index in range(num_states)}
    shapes["norm.weight"] = (size,)
    if reads_embedding(head, target):
        shapes["embed_tokens.weight"] = (target.vocab_size, size)
    if head.draft_vocab_size is not None and not (body.tie_word_embeddings and "lm_head.weight" not in stored):
        shapes["lm_head.weight"] = (head.draft_vocab_size, size)
    return shapes


def _mimo(head: HeadConfig, depth: int) -> Shapes:
    size, prefix = head.body.hidden_size, f"model.mtp_layers.{depth}"
    shapes: Shapes = {f"{prefix}.input_proj.weight": (size, 2 * size)}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"{prefix}.{name}.weight"] = (size,)
    return shapes | layer_shapes(head.body, prefix)


def _qwen3_next(head: HeadConfig, depth: int) -> Shapes:
    size = head.body.hidden_size
    shapes: Shapes = {"mtp.fc.weight": (size, 2 * size)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = (size,)
    return shapes | layer_shapes(head.body, f"mtp.layers.{depth}")


def _if_stored(head: HeadConfig, name: str, size: int) -> Shapes:
    return {name: (size,)} if name in head.stored_names else {}
