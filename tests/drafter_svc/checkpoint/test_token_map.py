"""FR-Spec token maps: which files are read, and which are refused by name."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from drafter_svc.checkpoint.token_map import check_token_map, load_token_map
from foretoken.errors import ConfigError, PreconditionError


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_safetensors(tmp_path: Path, kind: type) -> None:
    save_file({"hot": np.array([7, 3, 900], kind)}, tmp_path / "map.safetensors")
    ids = load_token_map(tmp_path / "map.safetensors")
    assert (ids.tolist(), ids.dtype) == ([7, 3, 900], np.int32)


def test_json(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[7, 3, 900]")
    assert load_token_map(tmp_path / "map.json").tolist() == [7, 3, 900]


SAVED = {
    "list": list(range(7, 3007)),
    "list of one": [7],
    "int64": torch.arange(7, 3007),
    "int32": torch.arange(7, 3007, dtype=torch.int32),
    "int16": torch.arange(7, 3007, dtype=torch.int16),
    "part of a tensor": torch.arange(5000)[7:3007],
}


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("name", ["freq_32768.pt", "map.bin", "map.pth"])
def test_lists_and_tensors_that_torch_saved(tmp_path: Path, kind: str, name: str) -> None:
    torch.save(SAVED[kind], tmp_path / name)
    assert load_token_map(tmp_path / name).tolist() == list(SAVED[kind])


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._path), "w")


def test_code_in_a_saved_map_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    for content in (_Touch(mark), [1, _Touch(mark)], {"ids": _Touch(mark)}):
        torch.save(content, tmp_path / "map.pt")
        with pytest.raises(ConfigError, match=r"map\.pt is no list or flat tensor of whole numbers from torch\.save"):
            load_token_map(tmp_path / "map.pt")
        assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2.5], "more than whole numbers (BINFLOAT)"),
        ([1, True], "more than whole numbers (NEWTRUE)"),
        ([[1], [2]], "more than whole numbers (EMPTY_LIST)"),
        ({"a": torch.arange(3)}, "something else (EMPTY_DICT)"),
        (torch.zeros(3), "its tensor has the type torch FloatStorage"),
        (torch.arange(6).view(2, 3), "something else"),
        (torch.arange(6)[::2], "something else (INTEGER 2)"),
        ([np.int64(3)], "more than whole numbers (GLOBAL)"),
    ],
)
def test_saved_files_that_are_no_map(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "map.pt")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_token_map(tmp_path / "map.pt")


def _rezip(source: Path, destination: Path, change: Callable[[str, bytes], bytes], compression: int = 0) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(destination, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_saved_files_that_are_broken(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    torch.save(torch.arange(9), good)
    changes: dict[str, Callable[[str, bytes], bytes]] = {
        "larger than its record": lambda name, data: data[:-1] if "/data/" in name else data,
        "its pickle is broken": lambda name, data: data[:-9] if name.endswith(".pkl") else data,
        "not little-endian": lambda name, data: b"big" if name.endswith("byteorder") else data,
    }
    for message, change in changes.items():
        _rezip(good, bad, change)
        with pytest.raises(ConfigError, match=message):
            load_token_map(bad)
    _rezip(good, bad, lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match="is compressed"):
        load_token_map(bad)
    bad.write_bytes(b"\x80\x02]q\x00.")
    with pytest.raises(ConfigError, match="not a zip file"):
        load_token_map(bad)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is empty"),
        ([1, 2, 1], "token 1 appears more than once"),
        ([1, -2], "-2 is no token id"),
        ([1, 2**31], "2147483648 is no token id"),
        ([1, 2**70], "expected a JSON list of token ids"),
        ([1, 2.5], "expected a JSON list of token ids"),
        ([1, True], "expected a JSON list of token ids"),
        ({"ids": [1]}, "expected a JSON list of token ids"),
    ],
)
def test_maps_that_are_none(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "map.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_token_map(tmp_path / "map.json")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": np.array([1]), "b": np.array([2])}, "expected one tensor, there are 2"),
        ({"a": np.array([[1]])}, "tensor a is not a flat list of integers"),
        ({"a": np.array([1.0])}, "tensor a is not a flat list of integers"),
        ({"a": np.empty(0, np.int64)}, "is empty"),
    ],
)
def test_tensors_that_are_no_map(tmp_path: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    save_file(tensors, tmp_path / "map.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_token_map(tmp_path / "map.safetensors")


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_token_map(tmp_path / "map.json")
    for name in ("map.json", "map.safetensors"):
        (tmp_path / name).write_bytes(b"{")
        with pytest.raises(ConfigError, match=name):
            load_token_map(tmp_path / name)


def test_an_id_beyond_the_vocabulary() -> None:
    check_token_map(np.array([3, 99], np.int32), 100)
    with pytest.raises(PreconditionError, match="token 99 is not in the target's vocabulary of 99"):
        check_token_map(np.array([3, 99], np.int32), 99)


def test_a_file_of_another_kind_of_tensors_is_refused_by_name(tmp_path: Path) -> None:
    """A head given in place of its map has element types that numpy does not know."""
    path = tmp_path / "model.safetensors"
    save_torch_file({"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match="expected one tensor, there are 2"):
        load_token_map(path)
    save_torch_file({"a": torch.zeros(4, dtype=torch.bfloat16)}, path)
    with pytest.raises(ConfigError, match="tensor a is not a flat list of integers"):
        load_token_map(path)
