"""Check the class that a config.json names against the model type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

# transformers' causal language models, and other names of the same models in published checkpoints.
_CLASSES = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "mimo": ("MiMoForCausalLM", "MiMoMTP", "MiMoMTPModel"),
}
# Classifiers, reward and embedding models, models with vision: they compute something else.
_OTHER = re.compile(r"For(?!CausalLM)[A-Z]|Bidirectional")


def unknown_architectures(raw: dict[str, Any], file: Path) -> list[str]:
    """Return the classes that are not a causal language model of the model type.

    ``file`` is named in errors.

    Raises:
        ConfigError: a class computes something other than the next token; names it.
    """
    given = raw.get("architectures") or []
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    if any(_OTHER.search(name) for name in names):
        raise ConfigError(f"{file}: architectures {json.dumps(given)} is not supported: not a causal language model")
    return [name for name in names if name not in _CLASSES.get(str(raw.get("model_type")), ())]


def architecture_note(raw: dict[str, Any], file: Path) -> tuple[str, ...]:
    """Return a warning about classes that are not known; nothing if there are none.

    Raises as ``unknown_architectures``.
    """
    if not (unknown := unknown_architectures(raw, file)):
        return ()
    model_type = str(raw.get("model_type"))
    known = _CLASSES.get(model_type, (model_type,))[0]
    return (f"{file}: architectures {', '.join(unknown)} not known for model_type {model_type}: run as {known}",)
