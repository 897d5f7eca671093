"""A random target of a few thousand weights, with a tokenizer, that trains drafters in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 320


def write_tiny_target(folder: Path, num_layers: int = 4) -> None:
    """Write a Llama of hidden size 32 and a byte-level tokenizer of the same vocabulary."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["def one(): return one\n" * 9, "for each in every: print(each)\n" * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def repeating_tokens(count: int = 4000) -> NDArray[np.uint16]:
    """Return ids of a text that repeats: three cycles of different length, by turns."""
    cycles = [np.arange(5, 5 + length) for length in (7, 11, 13)]
    return np.concatenate([np.tile(cycle, 10) for cycle in cycles] * (count // 310 + 1))[:count].astype(np.uint16)
