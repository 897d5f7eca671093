"""Write a trained model in the Hugging Face layout: bfloat16 safetensors, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.demo.llama import Llama

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def save_checkpoint(model: Llama, tokenizer_folder: Path, output: Path) -> None:
    """Write ``model`` and a copy of the tokenizer to ``output``, with the tied head only once."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    _write_json(output / "config.json", model.shape.config())
    end_of_turn = 3
    generation = {"bos_token_id": 0, "eos_token_id": [0, end_of_turn], "pad_token_id": 0}
    _write_json(output / "generation_config.json", generation)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).exists():
            shutil.copyfile(tokenizer_folder / name, output / name)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
