"""Read tensors of a safetensors checkpoint, single or sharded.

Every error names the file and the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from foretoken.errors import CheckpointError
from foretoken.models.checkpoint_files import INDEX, TensorHeader, check_index, find_files, open_file, tensor_header

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Checkpoints up to this size are hashed whole, larger ones by sampled blocks.
_WHOLE_HASH_BYTES = 256 * 1024 * 1024
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1024 * 1024


class Checkpoint:
    """The tensors of a checkpoint folder, read one at a time.

    Raises:
        CheckpointError: from the constructor if a file is missing, truncated or not safetensors;
            from ``read`` and ``dtype`` if a tensor is missing or has the wrong shape or type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = find_files(path)
        self._handles: list[Any] = []
        self._places: dict[str, tuple[Path, Any]] = {}
        for file in self.files:
            handle = open_file(file, "pt")
            self._handles.append(handle)
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._places[name] = (file, handle)
        check_index(path, self._places)

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
    def headers(self) -> dict[str, TensorHeader]:
        """The headers of all tensors, by name."""
        return {name: tensor_header(file, handle, name) for name, (file, handle) in self._places.items()}

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._place(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the element type in which a tensor is stored.

        Raises CheckpointError for a type that is not supported, or no such tensor.
        """
        file, handle = self._place(name)
        stored = handle.get_slice(name).get_dtype()
        if stored not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise CheckpointError(f"{file}: tensor {name} has type {stored}; supported are {supported}")
        return _DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in its stored type. Its shape must be ``shape``.

        Raises CheckpointError if not, or if it cannot be read.
        """
        self.dtype(name)
        file, handle = self._place(name)
        stored = tuple(handle.get_slice(name).get_shape())
        if stored != shape:
            raise CheckpointError(f"{file}: tensor {name} has shape {list(stored)}; the config needs {list(shape)}")
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def read_integers(self, name: str, size: int) -> NDArray[np.int64]:
        """Return a tensor that is stored as integers, int64 [size].

        Raises CheckpointError for another type or shape, or no such tensor.
        """
        file, handle = self._place(name)
        part = handle.get_slice(name)
        if part.get_dtype() not in ("I64", "I32") or tuple(part.get_shape()) != (size,):
            found = f"{part.get_dtype()} {list(part.get_shape())}"
            raise CheckpointError(f"{file}: tensor {name} is {found}; expected {size} integers")
        return handle.get_tensor(name).to(torch.int64).numpy()  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in which a tensor is stored."""
        return tuple(self._place(name)[1].get_slice(name).get_shape())

    def _place(self, name: str) -> tuple[Path, Any]:
        if name not in self._places:
            where = self.files[0] if len(self.files) == 1 else self.path / INDEX
            raise CheckpointError(f"{where}: tensor {name} is missing")
        return self._places[name]


def hash_files(files: Iterable[Path]) -> str:
    """Return the sha256 of the files' names, sizes and contents.

    Above 256 MB in all, only the first MiB of each file (its header) and 64 MiB spread evenly over
    it are hashed: two fine-tunes differ nearly everywhere, and reading 100 GB at each start would
    take minutes.
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
