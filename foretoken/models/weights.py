"""Tensors of a safetensors checkpoint, one file or sharded; every error names the file and the tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from foretoken.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Checkpoints up to this size are hashed whole, larger ones by sampled blocks.
_WHOLE_HASH_BYTES = 256 * 1024 * 1024
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1024 * 1024


class Checkpoint:
    """The tensors of the checkpoint folder ``path``, read one at a time.

    Raises:
        CheckpointError: from the constructor for files that are missing, cut short or not safetensors;
            from ``read`` and ``dtype`` for a tensor that is missing or of the wrong shape or type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _find_files(path)
        self._handles: list[Any] = []
        self._places: dict[str, tuple[Path, Any]] = {}
        for file in self.files:
            handle = _open(file)
            self._handles.append(handle)
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._places[name] = (file, handle)
        self._check_index()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.__exit__(kind, error, trace)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor ``name``."""
        return self._place(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """The element type in which the tensor ``name`` is stored."""
        file, handle = self._place(name)
        stored = handle.get_slice(name).get_dtype()
        if stored not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise CheckpointError(f"{file}: tensor {name} has type {stored}; supported are {supported}")
        return _DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``name`` in the type in which it is stored; its shape must be ``shape``."""
        self.dtype(name)
        file, handle = self._place(name)
        stored = tuple(handle.get_slice(name).get_shape())
        if stored != shape:
            raise CheckpointError(f"{file}: tensor {name} has shape {list(stored)}; the config asks for {list(shape)}")
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def read_integers(self, name: str, size: int) -> NDArray[np.int64]:
        """int64 [size]: the tensor ``name``, which must be stored as integers."""
        file, handle = self._place(name)
        part = handle.get_slice(name)
        if part.get_dtype() not in ("I64", "I32") or tuple(part.get_shape()) != (size,):
            found = f"{part.get_dtype()} {list(part.get_shape())}"
            raise CheckpointError(f"{file}: tensor {name} is {found}; {size} integers are asked for")
        return handle.get_tensor(name).to(torch.int64).numpy()  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in which the tensor ``name`` is stored."""
        return tuple(self._place(name)[1].get_slice(name).get_shape())

    def check_all_known(self, known: Iterable[str]) -> None:
        """Raise CheckpointError if a tensor is not in ``known``: the model would ignore what it was trained with."""
        unknown = sorted(self.names - set(known))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise CheckpointError(f"{self.file_of(unknown[0])}: tensor {unknown[0]}{more} is not part of this model")

    def _place(self, name: str) -> tuple[Path, Any]:
        if name not in self._places:
            where = self.files[0] if len(self.files) == 1 else self.path / _INDEX
            raise CheckpointError(f"{where}: tensor {name} is missing")
        return self._places[name]

    def _check_index(self) -> None:
        """A shard that lacks what the index says it holds is named here, before anything is read."""
        if len(self.files) == 1 and self.files[0].name == _SINGLE:
            return
        for name, file in _read_index(self.path / _INDEX).items():
            if name not in self._places:
                raise CheckpointError(f"{self.path / file}: tensor {name} is missing, though {_INDEX} lists it")


def _find_files(path: Path) -> list[Path]:
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        files = [path / name for name in sorted(set(_read_index(path / _INDEX).values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} does not exist, though {_INDEX} lists it")
        return files
    other = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(kind))
    if other:
        way = "" if other[0].endswith(".gguf") else "; `foretoken convert` makes one of it"
        raise CheckpointError(f"{path / other[0]}: only safetensors checkpoints are loaded, not {other[0]}{way}")
    raise CheckpointError(f"{path} holds neither {_SINGLE} nor {_INDEX}")


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


def _open(file: Path) -> Any:
    try:
        opened: Any = safe_open(file, framework="pt")
        return opened.__enter__()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def hash_files(files: Iterable[Path]) -> str:
    """sha256 over the files' names, sizes and contents.

    Of a checkpoint above 256 MB the first MiB of each file (its header) and 64 MiB spread evenly over it are
    hashed: two fine-tunes differ nearly everywhere, and reading 100 GB at each start would take minutes.
    """
    paths = list(files)
    whole = sum(file.stat().st_size for file in paths) <= _WHOLE_HASH_BYTES
    digest = hashlib.sha256()
    for file in paths:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if whole:
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
            else:
                for i in range(_SAMPLED_BLOCKS + 1):
                    stream.seek(max(0, size - _BLOCK_BYTES) * i // _SAMPLED_BLOCKS)
                    digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()
