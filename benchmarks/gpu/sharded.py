"""Write a checkpoint of any size, with at most one tensor in the host's memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHARD_BYTES = 2 * 1024**3
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and type of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    make: Callable[[str], torch.Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, and the tensors as safetensors.

    Tensors that exceed ``shard_bytes`` go into several files with an index.

    Args:
        folder: is created; files of the same names are replaced.
        make: returns the tensor of a name, on any device. It is called once for each, in the order
            of ``specs``.

    Raises:
        ValueError: a tensor from ``make`` does not have the shape or type in ``specs``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards = _shards(specs, shard_bytes)
    if len(shards) == 1:
        _write(folder / "model.safetensors", shards[0], specs, make)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, names, specs, make)
        places |= dict.fromkeys(names, file)
    total = sum(spec.num_bytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """Split the names, in order, into files of at most ``shard_bytes``.

    A larger tensor gets a file of its own.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.num_bytes
    return shards


def _write(file: Path, names: list[str], specs: Mapping[str, TensorSpec], make: Callable[[str], torch.Tensor]) -> None:
    """Write one safetensors file: the header's length, the header as JSON, then the tensors' bytes.

    The length has 8 bytes, little-endian (https://huggingface.co/docs/safetensors). The library's
    own writer needs all tensors of a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + specs[name].num_bytes
        header[name] = {
            "dtype": _NAMES[specs[name].dtype],
            "shape": list(specs[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors' bytes start at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = make(name)
            if tuple(tensor.shape) != specs[name].shape or tensor.dtype != specs[name].dtype:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {specs[name]}")
            stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
