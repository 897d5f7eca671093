"""The part of a target's weights that draft models share: embedding and output head, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
