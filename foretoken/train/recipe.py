"""The interface of a training algorithm, and helpers for the files that all algorithms write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.train.options import TrainOptions
from foretoken.train.target import FrozenTarget


class Recipe(Protocol):
    """One algorithm's module, loss and files.

    Attributes:
        window: tokens of one row of a training batch.
    """

    window: int

    @property
    def module(self) -> nn.Module:
        """The module to train, in float32."""

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        """Return the scalar loss of ``tokens`` int64 [batch, window].

        ``step`` seeds its randomness.
        """

    def matches(self, tokens: Tensor) -> Tensor:
        """Return which draft steps predict the text's next token.

        The result is bool [batch, num_draft_steps, rows].

        Each step assumes that the steps before did. ``tokens`` is int64 [batch, rows +
        num_draft_steps + 1]; row r drafts from the root at token r + 1, so its step d is compared
        with token r + 2 + d.
        """

    def save(self, folder: Path) -> None:
        """Write the checkpoint in its public format, bfloat16."""


def compiled(function: Callable[..., Any], is_compiled: bool) -> Callable[..., Any]:
    """Return ``function``, compiled by torch.compile if ``is_compiled``."""
    return torch.compile(function, dynamic=False) if is_compiled else function


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``; floating-point tensors become bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def llama_fields(target: FrozenTarget, options: TrainOptions, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Return the config.json fields of a draft model or head.

    They follow the flags, or the target in proportion.

    Raises ConfigError for head counts that do not divide.
    """
    config = target.config
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    num_heads = options.num_heads or max(1, hidden_size // head_dim)
    ratio = config.num_attention_heads // config.num_key_value_heads
    num_kv_heads = options.num_kv_heads or (num_heads // ratio if num_heads % ratio == 0 else 1)
    if num_heads % num_kv_heads:
        raise ConfigError(f"--num-heads {num_heads} must be a multiple of --num-kv-heads {num_kv_heads}")
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": options.intermediate_size or 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **target.rope_fields(),
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": "bfloat16",
    }
