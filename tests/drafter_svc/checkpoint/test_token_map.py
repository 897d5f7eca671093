"""FR-Spec token maps: which files are read, and which are refused by name."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("name", ["freq_32768.pt", "map.bin", "map.pth", "map.pkl"])
def test_pickles_are_for_the_converter(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="foretoken convert"):
        load_token_map(tmp_path / name)


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
