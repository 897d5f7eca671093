"""How far logits are from others."""

from __future__ import annotations

import torch

# For logits of two programs that both compute in float16: each of them rounds hidden states by up
# to 5e-4, once or more a layer.
FLOAT16_BAR = 2e-3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the length of the difference over the length of ``expected``, over all rows."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def printed_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return and print the relative error, so that a run with ``-s`` leaves the number."""
    error = relative_error(found, expected)
    print(f"relative error {error:.3g}")
    return error
