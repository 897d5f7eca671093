"""The element type of a model's matrices and KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from foretoken_kernels.cpu.simd import HAS_FLOAT16

from foretoken.errors import ConfigError
from foretoken.models.backend import Backend
from foretoken.models.weights import Checkpoint

DType = Literal["auto", "float32", "bfloat16", "float16"]
# Every target has this tensor.
_EMBEDDING = "model.embed_tokens.weight"


def element_type(dtype: DType, backend: Backend, folder: Path) -> torch.dtype:
    """Return the element type that ``--dtype`` means for the model in a folder.

    Raises:
        ConfigError: this machine lacks the type.
        CheckpointError: the checkpoint cannot be read.
    """
    if dtype != "auto":
        return checked_type(dtype, backend)
    return torch.float32 if backend.kernels == "cpu" else default_type(backend, stored_type(folder))


def default_type(backend: Backend, stored: torch.dtype) -> torch.dtype:
    """Return what ``--dtype auto`` means for a checkpoint that is stored as ``stored``.

    On a GPU, bfloat16 would drop three bits of each weight that is stored in float16.
    """
    if backend.kernels == "cpu":
        return torch.float32
    return torch.float16 if stored == torch.float16 else torch.bfloat16


def checked_type(dtype: Literal["float32", "bfloat16", "float16"], backend: Backend) -> torch.dtype:
    """Return the element type of this name. Raises ConfigError if this machine lacks it."""
    if dtype == "float16" and backend.kernels == "cpu" and not HAS_FLOAT16:
        raise ConfigError("--dtype float16: this CPU has no instructions for float16 (F16C)")
    found: torch.dtype = getattr(torch, dtype)
    return found


def stored_type(folder: Path) -> torch.dtype:
    """Return the type in which a checkpoint holds its embedding."""
    with Checkpoint(folder) as checkpoint:
        return checkpoint.dtype(_EMBEDDING)
