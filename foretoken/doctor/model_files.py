"""The files of a checkpoint: present, readable, and all that the index lists."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from foretoken.doctor.finding import Finding, fault, ok
from foretoken.errors import ForetokenError
from foretoken.models.checkpoint_files import find_files, tensor_headers

_GIB = 2**30
_MIB = 2**20
# What a target's folder must have besides weights.
OF_TARGET = ("config.json", "tokenizer.json")
OF_HEAD = ("config.json",)


def check_model_files(
    check: str,
    folder: Path,
    wanted: tuple[str, ...],
    is_readable: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK),
) -> Finding:
    """Look at a folder's files without reading a weight. ``wanted``: those besides weights."""
    for name in wanted:
        if not (folder / name).is_file():
            return fault(check, f"{folder} has no {name}", "name the checkpoint's folder, or download it again")
    try:
        weights = find_files(folder)
        closed = [path for path in (*(folder / name for name in wanted), *weights) if not is_readable(path)]
        if closed:
            return fault(check, f"{closed[0]} is not readable for this user", "give this user the right to read it")
        tensors = tensor_headers(folder)
    except ForetokenError as error:
        return fault(check, " ".join(error.message.split()), "download or copy the checkpoint again")
    size = sum(path.stat().st_size for path in weights)
    shown = f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"
    files = "1 file" if len(weights) == 1 else f"{len(weights)} files"
    return ok(check, f"{folder}: {len(tensors)} tensors in {files}, {shown}")
