"""FR-Spec token maps: the target ids that a head may draft (Zhao et al., arXiv 2502.14856)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from drafter_svc.checkpoint.torch_ids import read_ids
from foretoken.errors import ConfigError, PreconditionError

_INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32")
_SAVED_BY_TORCH = (".pt", ".pth", ".bin")


def load_token_map(path: Path) -> NDArray[np.int32]:
    """Return int32 [draft vocabulary]: the target id of each draft id, in the file's order.

    ``path``: a safetensors file with one flat tensor of integers, a JSON list of ids, or either of
    the two from ``torch.save``. Code in the file is never run.

    Raises:
        ConfigError: the file is neither, or its map is empty, repeats an id or holds an invalid
            one.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        ids = _read_safetensors(path)
    else:
        ids = read_ids(path) if path.suffix in _SAVED_BY_TORCH else _read_json(path)
    if ids.size == 0:
        raise ConfigError(f"{path} is empty")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        wrong = ids[(ids < 0) | (ids > np.iinfo(np.int32).max)][0]
        raise ConfigError(f"{path}: {wrong} is no token id")
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ConfigError(f"{path}: token {values[counts > 1][0]} appears more than once")
    return ids.astype(np.int32)


def check_token_map(token_map: NDArray[np.int32], vocab_size: int) -> None:
    """Check the ids of a map. Raises PreconditionError for an id beyond the target's vocabulary."""
    if token_map.max() >= vocab_size:
        raise PreconditionError(f"token map: token {token_map.max()} is not in the target's vocabulary of {vocab_size}")


def _read_safetensors(path: Path) -> NDArray[np.int64]:
    try:
        with safe_open(path, "numpy") as file:
            names = list(file.keys())
            if len(names) != 1:
                raise ConfigError(f"{path}: expected one tensor, there are {len(names)}")
            # numpy lacks some types of the format.
            shown = file.get_slice(names[0])
            if len(shown.get_shape()) != 1 or shown.get_dtype() not in _INTEGERS:
                raise ConfigError(f"{path}: tensor {names[0]} is not a flat list of integers")
            ids: NDArray[np.int64] = file.get_tensor(names[0]).astype(np.int64)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return ids


def _read_json(path: Path) -> NDArray[np.int64]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: neither safetensors nor JSON: {error}") from error
    # In Python a bool is an int, and numbers in JSON have no bounds.
    if not isinstance(content, list) or not all(type(item) is int and abs(item) < 2**62 for item in content):
        raise ConfigError(f"{path}: expected a JSON list of token ids")
    return np.array(content, np.int64)
