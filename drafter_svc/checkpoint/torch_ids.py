"""Read whole numbers from a file of ``torch.save`` without running anything in it.

Such a file is a zip with a pickle, which is a program. Here it is only parsed: it must have
the opcodes of a list of whole numbers, or of one flat tensor of them, in the order in which torch
writes them. Nothing is looked up or called by a name in the file.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError

# Bytes of the pickle: a list of a million ids takes five.
MAX_PICKLE_BYTES = 64 << 20
# By the name of a tensor's storage class.
_STORAGES = {"torch ShortStorage": "<i2", "torch IntStorage": "<i4", "torch LongStorage": "<i8"}
# Opcodes that say how the pickle is written, not what it holds.
_SILENT = {"PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
# A flat tensor. None: any argument.
_TENSOR: tuple[tuple[str, Any], ...] = (
    ("GLOBAL", "torch._utils _rebuild_tensor_v2"),
    ("MARK", None),
    ("MARK", None),
    ("BINUNICODE", "storage"),
    ("GLOBAL", None),
    ("BINUNICODE", None),
    ("BINUNICODE", None),
    ("INTEGER", None),
    ("TUPLE", None),
    ("BINPERSID", None),
    ("INTEGER", None),
    ("INTEGER", None),
    ("TUPLE1", None),
    ("INTEGER", 1),
    ("TUPLE1", None),
    ("NEWFALSE", None),
    ("GLOBAL", "collections OrderedDict"),
    ("EMPTY_TUPLE", None),
    ("REDUCE", None),
    ("TUPLE", None),
    ("REDUCE", None),
    ("STOP", None),
)
# Where its storage's class, record and size are in _TENSOR, and the tensor's offset and size.
_KIND, _RECORD, _STORED, _OFFSET, _SIZE = 4, 5, 7, 10, 11

Opcode = tuple[str, Any]


def read_ids(path: Path) -> NDArray[np.int64]:
    """Return the numbers of a saved list or flat tensor, int64 [numbers].

    Raises:
        ConfigError: the file is no such list or tensor.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            folder = _folder(archive)
            found = _opcodes(_record(archive, f"{folder}data.pkl", MAX_PICKLE_BYTES))
            if found[:1] == [("EMPTY_LIST", None)]:
                return _list(found)
            return _tensor(found, archive, folder)
    except (OSError, zipfile.BadZipFile, NotImplementedError, _UnreadableError) as error:
        raise ConfigError(f"{path} is no list or flat tensor of whole numbers from torch.save: {error}") from None


class _UnreadableError(Exception):
    """The file holds something else; the message says what."""


def _folder(archive: zipfile.ZipFile) -> str:
    """Return the folder of the records in the archive, with a slash."""
    found = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise _UnreadableError("it has no record data.pkl")
    return found[0]


def _record(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """Return a record's bytes. Compressed ones, which torch never writes, may be bombs."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise _UnreadableError(f"it has no record {name}") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
        raise _UnreadableError(f"record {name} is compressed or has more than {most} bytes")
    return archive.read(info)


def _opcodes(program: bytes) -> list[Opcode]:
    """Return the opcodes that matter, and their arguments."""
    try:
        return [
            ("INTEGER" if code.name in _INTEGERS else code.name, argument)
            for code, argument, _ in pickletools.genops(program)
            if code.name not in _SILENT
        ]
    except (ValueError, IndexError, OverflowError) as error:
        raise _UnreadableError(f"its pickle is broken ({error})") from None


def _list(found: list[Opcode]) -> NDArray[np.int64]:
    """Return the numbers of an empty list that gets them one by one, or in batches after a mark."""
    ids: list[int] = []
    batch: list[int] = []
    is_marked = False
    for name, argument in found[1:-1]:
        if name == "INTEGER" and (is_marked or not batch) and abs(argument) < 2**62:
            batch.append(argument)
        elif name == "MARK" and not batch and not is_marked:
            is_marked = True
        elif (name == "APPENDS" and is_marked) or (name == "APPEND" and len(batch) == 1 and not is_marked):
            ids += batch
            batch, is_marked = [], False
        else:
            raise _UnreadableError(f"it holds more than whole numbers ({name})")
    if batch or is_marked or found[-1] != ("STOP", None):
        raise _UnreadableError("its list does not end")
    return np.array(ids, np.int64)


def _tensor(found: list[Opcode], archive: zipfile.ZipFile, folder: str) -> NDArray[np.int64]:
    for have, (name, argument) in zip(found, _TENSOR, strict=False):
        if have[0] != name or (argument is not None and have[1] != argument):
            what = f"{have[0]} {have[1]}" if have[1] is not None else have[0]
            raise _UnreadableError(f"it holds something else ({what})")
    if len(found) != len(_TENSOR):
        raise _UnreadableError("it holds something else")
    kind, record, stored, offset, size = (found[i][1] for i in (_KIND, _RECORD, _STORED, _OFFSET, _SIZE))
    if kind not in _STORAGES:
        raise _UnreadableError(f"its tensor has the type {kind}")
    if f"{folder}byteorder" in archive.namelist() and _record(archive, f"{folder}byteorder", 16) != b"little":
        raise _UnreadableError("its numbers are not little-endian")
    content = _record(archive, f"{folder}data/{record}", MAX_PICKLE_BYTES)
    numbers = np.frombuffer(content, _STORAGES[kind]) if len(content) == stored * int(_STORAGES[kind][2]) else None
    if numbers is None or not 0 <= offset <= offset + size <= stored:
        raise _UnreadableError("its tensor is larger than its record")
    return numbers[offset : offset + size].astype(np.int64)
