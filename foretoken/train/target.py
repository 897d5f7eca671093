"""The frozen target that drafters learn from, run by transformers.

It gives hidden states, soft labels and greedy text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from foretoken.errors import CheckpointError, ConfigError
from foretoken.json_file import read_object

# The same as foretoken.models.config.MODEL_TYPES, which needs pydantic; a test compares them.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mimo")


class TargetOutput(NamedTuple):
    """The target's hidden states for tokens [batch, length].

    Attributes:
        hidden_states: [batch, length, num_layers_asked * hidden_size]; inputs of the requested
            layers, side by side.
        final: [batch, length, hidden_size]; output of the last norm, which the output head reads.
    """

    hidden_states: Tensor
    final: Tensor


class FrozenTarget:
    """A target in evaluation mode on ``device``: float32 on a CPU, bfloat16 on a GPU."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Load the target.

        Raises CheckpointError or ConfigError if ``path`` holds no supported checkpoint.
        """
        raw = read_object(path / "config.json")
        if raw is None:
            raise CheckpointError(f"{path / 'config.json'} does not exist")
        if raw.get("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"model_type {raw.get('model_type')!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
            )
        if raw.get("auto_map") and raw["model_type"] != "mimo":
            raise ConfigError(f"{path / 'config.json'}: auto_map needs code from the checkpoint, which is never run")
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model_class: Any = AutoModelForCausalLM
        config: dict[str, Any] = {}
        if raw["model_type"] == "mimo":
            # MiMo is a Qwen2 body with its own draft heads, for which transformers has no class.
            model_class = Qwen2ForCausalLM
            fields = {name: value for name, value in raw.items() if name not in ("auto_map", "model_type")}
            config = {"config": Qwen2Config(**fields)}
        model: Any = model_class.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False, **config
        )
        self.path = path
        self.model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        self.head_weight: Tensor = model.get_output_embeddings().weight
        self.embedding_weight: Tensor = model.get_input_embeddings().weight
        self.separator = _first_id(raw.get("bos_token_id"), raw.get("eos_token_id"))

    @torch.no_grad()
    def run(self, tokens: Tensor, layers: tuple[int, ...] = ()) -> TargetOutput:
        """Run one pass over ``tokens`` int64 [batch, length]; return the inputs of ``layers``."""
        output = self.model.model(tokens, output_hidden_states=bool(layers), use_cache=False)
        final: Tensor = output.last_hidden_state
        if not layers:
            return TargetOutput(final[..., :0], final)
        return TargetOutput(torch.cat([output.hidden_states[layer] for layer in layers], dim=-1), final)

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """Map [..., hidden_size] to [..., vocab_size]."""
        return nn.functional.linear(final, self.head_weight)

    @torch.no_grad()
    def written_text(self, prompts: Tensor, num_tokens: int, *, is_sampled: bool = False) -> Tensor:
        """Return ``prompts`` int64 [batch, length] with ``num_tokens`` more tokens each.

        End tokens do not stop it.

        The text is greedy, or sampled at temperature 1 by PyTorch's global generator.

        Raises CheckpointError if the target's generation config ends texts early.
        """
        generated: Tensor = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=is_sampled,
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if is_sampled else {}),
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=self.separator,
        )
        if generated.shape[1] != prompts.shape[1] + num_tokens:
            raise CheckpointError(
                f"{self.path}: its generation config ends texts early, at {generated.shape[1]} tokens"
            )
        return generated

    def rope_fields(self) -> dict[str, Any]:
        """Return the rotary settings for the config.json of a head that uses the same positions."""
        parameters = dict(self.config.rope_parameters)
        theta = parameters.pop("rope_theta")
        scaled = parameters.get("rope_type", "default") != "default"
        return {"rope_theta": theta, "rope_scaling": parameters if scaled else None}


def _first_id(*candidates: int | list[int] | None) -> int:
    for candidate in candidates:
        if isinstance(candidate, int):
            return candidate
        if candidate:
            return candidate[0]
    return 0
