"""The part of a target's weights that draft models share: embedding and output head, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import TensorReader, load_embedding_and_head
from foretoken.models.weights import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class TargetWeights:
    """Both in the packed form of DecoderWeights; where the two are tied, ``embedding is head``.

    Attributes:
        bfloat16: whether elements are the bits of bfloat16 (uint16); otherwise float32.
        embedding: flat, [vocab_size, hidden_size], or the head's panels where tied.
        head: flat panels of [vocab_size, hidden_size].
    """

    vocab_size: int
    hidden_size: int
    tied: bool
    bfloat16: bool
    embedding: torch.Tensor
    head: torch.Tensor


def load_target_weights(path: Path, config: ModelConfig) -> TargetWeights:
    """Embedding and head alone of the target in the folder ``path``; as bfloat16 where both are stored so.

    Raises:
        CheckpointError: as foretoken.models.weights.Checkpoint.
    """
    names = ["model.embed_tokens.weight"] + ([] if config.tie_word_embeddings else ["lm_head.weight"])
    with Checkpoint(path) as checkpoint:
        bfloat16 = all(checkpoint.dtype(name) == torch.bfloat16 for name in names)
        embedding, head = load_embedding_and_head(config, TensorReader(checkpoint, bfloat16))
    return TargetWeights(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        tied=config.tie_word_embeddings,
        bfloat16=bfloat16,
        embedding=embedding,
        head=head,
    )
