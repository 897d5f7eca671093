"""The weights of a target that draft models share.

They are embedding and output head, as the kernels read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.models.backend import CPU, Backend
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import DecoderWeights, TensorReader, load_embedding_and_head
from foretoken.models.weight_layout import WeightLayout, weight_layout
from foretoken.models.weights import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class TargetWeights:
    """Embedding (a table) and output head (a matrix) in ``layout``.

    If they are tied, ``embedding is head``.
    """

    vocab_size: int
    hidden_size: int
    tied: bool
    layout: WeightLayout
    embedding: torch.Tensor
    head: torch.Tensor

    @staticmethod
    def of(config: ModelConfig, weights: DecoderWeights) -> TargetWeights:
        """Return the weights of a loaded target, without a copy."""
        return TargetWeights(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
            layout=weights.layout,
            embedding=weights.embedding,
            head=weights.head,
        )


def load_target_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32, backend: Backend = CPU
) -> TargetWeights:
    """Read only embedding and head of the target in a folder.

    They are for a draft model that is served as ``dtype``.

    Raises:
        CheckpointError: as foretoken.models.weights.Checkpoint, or a tensor holds NaN, infinity or
            a number too large for the served type.
    """
    names = ["model.embed_tokens.weight"] + ([] if config.tie_word_embeddings else ["lm_head.weight"])
    with Checkpoint(path) as checkpoint:
        layout = weight_layout(backend, dtype, [checkpoint.dtype(name) for name in names])
        reader = TensorReader(checkpoint, layout)
        embedding, head = load_embedding_and_head(config, reader)
        reader.check_finite([head] if embedding is head else [embedding, head])
    return TargetWeights(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        tied=config.tie_word_embeddings,
        layout=layout,
        embedding=embedding,
        head=head,
    )
