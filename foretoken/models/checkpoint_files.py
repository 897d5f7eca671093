"""The files of a safetensors checkpoint, one or shards with an index, and the names of the tensors in them.

Loads no torch: what a folder holds is known by the process that starts the services, too.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from foretoken.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensor_files(path: Path) -> dict[str, Path]:
    """The file of each tensor in the checkpoint folder ``path``, by the tensor's name; no tensor is read.

    Raises:
        CheckpointError: files that are missing, cut short or not safetensors.
    """
    found: dict[str, Path] = {}
    for file in find_files(path):
        handle = open_file(file, "numpy")
        found |= dict.fromkeys(handle.keys(), file)
        handle.__exit__(None, None, None)
    check_index(path, found)
    return found


def tensor_shape(file: Path, name: str) -> tuple[int, ...]:
    """The shape of the tensor ``name``, which is in ``file``; it is not read. Raises as ``tensor_files``."""
    handle = open_file(file, "numpy")
    shape = tuple(handle.get_slice(name).get_shape())
    handle.__exit__(None, None, None)
    return shape


def check_index(path: Path, found: Container[str]) -> None:
    """Raises CheckpointError for a shard that lacks what the index says it holds, before anything is read."""
    if (path / SINGLE).is_file():
        return
    for name, file in _read_index(path / INDEX).items():
        if name not in found:
            raise CheckpointError(f"{path / file}: tensor {name} is missing, though {INDEX} lists it")


def find_files(path: Path) -> list[Path]:
    """The files that hold the tensors of the checkpoint folder ``path``. Raises CheckpointError."""
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
        way = "" if other[0].endswith(".gguf") else "; `foretoken convert` makes one of it"
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
    """An open safetensors file, whose tensors are those of ``framework``. Raises CheckpointError."""
    try:
        opened: Any = safe_open(file, framework=framework)
        return opened.__enter__()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
