"""A script with resource limits that reads one pickle for ``foretoken.commands.convert``.

It imports nothing of foretoken. It reads a JSON request on standard input and writes a JSON answer
on standard output: ``{"names": [...]}`` or ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import zipfile
from pathlib import Path
from typing import Any

_GIB = 1024**3
# Memory for importing torch and parsing a file's records.
_BASE_BYTES = 2 * _GIB
_WRAPPERS = ("state_dict", "model_state_dict", "module")
_MAX_ID = 2**31


class Refused(Exception):
    """The file is not converted; the message says why."""


def limit_process(cpu_s: int, output_bytes: int) -> None:
    """Limit CPU time and file sizes and forbid core dumps, before importing torch."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(file_bytes: int) -> None:
    """Limit memory after importing torch.

    The limit is the mapped file, its tensors, one copy of them and a fixed allowance.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + 3 * file_bytes + _BASE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def check_archive(file: Path) -> bool:
    """Return whether ``file`` is a zip, whose records torch can map.

    Raises Refused for compressed records, which may be bombs.
    """
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise Refused(f"record {record.filename!r} is compressed, which torch.save never does")
    return True


def load(file: Path) -> Any:
    """Read the pickle by torch's unpickler, which only allows tensors and plain containers.

    Raises Refused if it holds anything else.
    """
    import pickle

    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=check_archive(file))
    except pickle.UnpicklingError as error:
        # Torch's own message advises to read the file without weights_only, which is unsafe.
        found = re.search(r"GLOBAL (\S+)", str(error))
        cause = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
        what = f"it refers to {found[1]}" if found else cause[1] if cause else "which ones, torch does not say"
        raise Refused(f"the pickle holds more than tensors ({what}); code in a checkpoint is never run") from error


def tensors_of(content: Any, max_tensors: int, max_bytes: int) -> dict[str, Any]:
    """Return the tensors of a state dict by name.

    A list of ids is returned as ``token_map``, int64 [num_ids].

    Raises Refused for anything else.
    """
    import torch

    if isinstance(content, list | tuple):
        content = _ids_tensor(content)
    if isinstance(content, torch.Tensor):
        return {"token_map": _token_map(content)}
    if not isinstance(content, dict):
        raise Refused(f"expected a dict of tensors or a list of token ids, found {type(content).__name__}")
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not content:
        raise Refused("it holds no tensors")
    if len(content) > max_tensors:
        raise Refused(f"{len(content)} tensors are more than {max_tensors}")
    total = 0
    for name, value in content.items():
        _check_tensor(name, value)
        total += value.numel() * value.element_size()
        if total > max_bytes:
            raise Refused(f"its tensors take more than {max_bytes} bytes")
    return _unshared(content)


def _ids_tensor(ids: list[Any] | tuple[Any, ...]) -> Any:
    import torch

    if not all(type(each) is int for each in ids):
        raise Refused("a list must hold token ids, whole numbers")
    if not all(0 <= each < _MAX_ID for each in ids):
        raise Refused(f"token ids must be from 0 to {_MAX_ID - 1}")
    return torch.tensor(ids, dtype=torch.int64)


def _check_tensor(name: Any, value: Any) -> None:
    """Raise Refused unless this is a plain dense tensor under a name."""
    import torch

    if not isinstance(name, str):
        raise Refused(f"entry {name!r} is named by a {type(name).__name__}, expected a string")
    if not isinstance(value, torch.Tensor):
        raise Refused(f"entry {name!r} is a {type(value).__name__}, expected a tensor")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise Refused(f"tensor {name!r} is not a plain dense one")


def _token_map(ids: Any) -> Any:
    import torch

    if ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32, torch.int16):
        raise Refused(f"token ids must be integers [num_ids], found {ids.dtype} {list(ids.shape)}")
    if not len(ids):
        raise Refused("it holds no token ids")
    ids = ids.to(torch.int64).contiguous()
    if not 0 <= int(ids.min()) <= int(ids.max()) < _MAX_ID:
        raise Refused(f"token ids must be from 0 to {_MAX_ID - 1}")
    if len(ids.unique()) != len(ids):
        raise Refused("a token id occurs twice")
    return ids


def _unshared(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return contiguous tensors with separate storages, as safetensors needs them."""
    seen: set[int] = set()
    result: dict[str, Any] = {}
    for name, value in tensors.items():
        storage = value.untyped_storage()
        is_own = storage.data_ptr() not in seen and value.is_contiguous() and storage.nbytes() == value.nbytes
        result[name] = value.detach() if is_own else value.detach().clone(memory_format=_contiguous())
        seen.add(storage.data_ptr())
    return result


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


def convert(request: dict[str, Any]) -> dict[str, Any]:
    """Do what ``request`` says; see ``foretoken.commands.convert``."""
    source = Path(request["source"])
    size = source.stat().st_size
    limit_process(request["cpu_s"], request["max_bytes"] + _GIB)
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    limit_memory(size)
    tensors = tensors_of(load(source), request["max_tensors"], request["max_bytes"])
    save_file(tensors, request["output"], metadata={"format": "pt"})
    return {"names": list(tensors)}


def main() -> None:
    try:
        answer = convert(json.load(sys.stdin))
    except Refused as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": "it needs more memory than its size allows"}
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        answer = {"error": f"it is no file of torch.save ({' '.join(str(error).split())[:200]})"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
