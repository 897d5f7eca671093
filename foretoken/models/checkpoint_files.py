"""The files of a safetensors checkpoint, single or sharded, and the names of their tensors.

This module does not import torch, because the process that starts the services reads folders, too.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from foretoken.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TensorHeader(NamedTuple):
    """Where a tensor is stored, and how."""

    file: Path
    shape: tuple[int, ...]
    # As safetensors names it: F32.
    dtype: str


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the header of each tensor in a checkpoint folder, by name.

    No tensor is read.

    Raises:
        CheckpointError: a file is missing, truncated or not safetensors.
    """
    found: dict[str, TensorHeader] = {}
    for file in find_files(path):
        handle = open_file(file, "numpy")
        for name in handle.keys():  # noqa: SIM118 - not a dict
            found[name] = tensor_header(file, handle, name)
        handle.__exit__(None, None, None)
    check_index(path, found)
    return found


def tensor_header(file: Path, handle: Any, name: str) -> TensorHeader:
    """Return the header of a tensor in an open file."""
    part = handle.get_slice(name)
    return TensorHeader(file, tuple(part.get_shape()), part.get_dtype())


def tensor_files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor in a checkpoint folder, by name.

    Raises as ``tensor_headers``.
    """
    return {name: header.file for name, header in tensor_headers(path).items()}


def check_index(path: Path, found: Container[str]) -> None:
    """Raise CheckpointError if a shard lacks a tensor that the index lists."""
    if (path / SINGLE).is_file():
        return
    for name, file in _read_index(path / INDEX).items():
        if name not in found:
            raise CheckpointError(f"{path / file}: tensor {name} is missing, though {INDEX} lists it")


def find_files(path: Path) -> list[Path]:
    """Return the files with the tensors of a checkpoint folder. Raises CheckpointError."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        files = [path / name for name in sorted(set(_read_index(path / INDEX).values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} does not exist, though {INDEX} lists it")
        return files
    other = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(kind))
    if other:
        way = "" if other[0].endswith(".gguf") else "; run `foretoken convert`"
        raise CheckpointError(f"{path / other[0]}: only safetensors checkpoints are loaded, not {other[0]}{way}")
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not an index of safetensors files: {error!r}") from error
    names_are_plain = isinstance(weight_map, dict) and all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    )
    if not names_are_plain or not weight_map:
        raise CheckpointError(f"{file}: weight_map must map tensors to files of the same folder")
    return dict(weight_map)


def open_file(file: Path, framework: Literal["numpy", "pt"]) -> Any:
    """Open a safetensors file whose tensors are read as ``framework``'s. Raises CheckpointError."""
    try:
        opened: Any = safe_open(file, framework=framework)
        return opened.__enter__()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
