"""Tiny random checkpoints with tokenizers, for tests of drafters that read files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM


def save_llama(folder: Path, *, seed: int = 0, vocab_size: int = 64, std: float = 0.2, **changes: Any) -> Path:
    """Write a Llama of two layers with a tokenizer of ``vocab_size`` words."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    save_tokenizer(folder, [f"w{i}" for i in range(vocab_size)])
    return folder


def save_tokenizer(folder: Path, words: list[str]) -> None:
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "tokenizer.json")
    )
