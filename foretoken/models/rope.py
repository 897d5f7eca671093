"""The angles of the rotary embedding."""

from __future__ import annotations

import math

import torch

from foretoken.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the radians by which one position rotates each pair, float32 [head_dim / 2].

    ``linear`` divides all frequencies by the factor. ``llama3`` (Llama 3.1) divides a frequency
    whose wavelength is longer than the original context over ``low_freq_factor``, keeps one whose
    wavelength is shorter than the context over ``high_freq_factor``, and blends in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _blend(frequencies, rope)
    return frequencies


def _blend(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return cosines, then sines, float32 [num_positions, 2, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return torch.stack([angles.cos(), angles.sin()], dim=1)
