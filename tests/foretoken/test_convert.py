"""`foretoken convert` converts pickles, and refuses others without running code from them."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from foretoken.cli import app
from foretoken.commands.convert import ConvertLimits, convert
from foretoken.commands.convert_worker import Refused, tensors_of
from foretoken.errors import CheckpointError, ConfigError


def test_a_checkpoint_folder_becomes_safetensors_with_its_config(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weight = torch.arange(6.0).view(2, 3)
    tensors = {"fc.weight": weight, "fc.bias": torch.ones(2, dtype=torch.bfloat16), "tied": weight, "turned": weight.T}
    torch.save(tensors, source / "pytorch_model.bin")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "modeling.py").write_text("raise SystemExit")
    files = convert(source, tmp_path / "out")
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert result.keys() == tensors.keys()
    assert all(torch.equal(result[name], each) and result[name].dtype == each.dtype for name, each in tensors.items())
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "llama"}'


@pytest.mark.slow
def test_the_old_format_without_an_archive_is_read_too(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.eye(3)}, tmp_path / "head.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "head.pt", tmp_path / "head.safetensors")
    assert torch.equal(load_file(tmp_path / "head.safetensors")["fc.weight"], torch.eye(3))


@pytest.mark.parametrize("wrapper", ["state_dict", pytest.param("module", marks=pytest.mark.slow)])
def test_a_wrapped_state_dict_is_unwrapped(tmp_path: Path, wrapper: str) -> None:
    torch.save({wrapper: {"fc.weight": torch.eye(3)}}, tmp_path / "head.pt")
    convert(tmp_path / "head.pt", tmp_path / "head.safetensors")
    assert list(load_file(tmp_path / "head.safetensors")) == ["fc.weight"]


def shards(folder: Path, weight_map: dict[str, str]) -> None:
    folder.mkdir()
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(2)}, folder / "pytorch_model-00002-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


BOTH = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}


def test_shards_are_followed_by_their_index(tmp_path: Path) -> None:
    shards(tmp_path / "source", BOTH)
    convert(tmp_path / "source", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert torch.equal(load_file(tmp_path / "out" / index["weight_map"]["b"])["b"], torch.ones(2))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (BOTH | {"b": "../pytorch_model-00002-of-00002.bin"}, "not a pickle in its folder"),
        (BOTH | {"b": "/etc/passwd"}, "not a pickle in its folder"),
        pytest.param(BOTH | {"c": BOTH["a"]}, "tensor 'c' is in no file", marks=pytest.mark.slow),
        (BOTH | {"b": "pytorch_model-00003-of-00002.bin"}, "No such file"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    shards(tmp_path / "source", weight_map)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "source", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "ids",
    [
        [5, 3, 900],
        pytest.param((5, 3, 900), marks=pytest.mark.slow),
        pytest.param(torch.tensor([5, 3, 900]), marks=pytest.mark.slow),
        torch.tensor([5, 3, 900], dtype=torch.int32),
    ],
)
def test_a_token_map_becomes_one_tensor_of_ids(tmp_path: Path, ids: Any) -> None:
    torch.save(ids, tmp_path / "freq.pt")
    assert convert(tmp_path / "freq.pt", tmp_path / "freq.safetensors") == [tmp_path / "freq.safetensors"]
    result = load_file(tmp_path / "freq.safetensors")
    assert list(result) == ["token_map"]
    assert torch.equal(result["token_map"], torch.tensor([5, 3, 900]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, "two"], "must hold token ids"),
        ([1, -2], "token ids must be from 0"),
        ([1, 2**40], "token ids must be from 0"),
        ([4, 4], "occurs twice"),
        (torch.tensor([0.5]), "token ids must be integers"),
        (torch.tensor([[1]]), "token ids must be integers"),
        ({"a": torch.ones(1), "step": 3}, "entry 'step' is a int, expected a tensor"),
        ({1: torch.ones(1)}, "entry 1 is named by a int, expected a string"),
        ({}, "holds no tensors"),
        ({"state_dict": {}}, "holds no tensors"),
        ([], "holds no token ids"),
        ({"a": torch.ones(2).to_sparse()}, "not a plain dense one"),
        ("text", "found str"),
    ],
)
def test_content_that_is_neither_tensors_nor_ids_is_refused(content: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        tensors_of(content, max_tensors=10, max_bytes=1000)


def test_a_refusal_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    torch.save([4, 4], tmp_path / "freq.pt")
    with pytest.raises(CheckpointError, match=r"freq\.pt: a token id occurs twice"):
        convert(tmp_path / "freq.pt", tmp_path / "freq.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["freq.pt"]


class Malicious:
    """An object that makes a file when it is unpickled naively."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.trace}",))


@pytest.mark.parametrize(
    "form", ["archive", *(pytest.param(form, marks=pytest.mark.slow) for form in ("legacy", "pickle 2", "pickle 5"))]
)
def test_a_pickle_with_code_is_refused_and_never_run(tmp_path: Path, form: str) -> None:
    trace, file = tmp_path / "trace", tmp_path / "pytorch_model.bin"
    content = {"a": torch.ones(1), "evil": Malicious(trace)}
    if form.startswith("pickle"):
        file.write_bytes(pickle.dumps(content["evil"], protocol=int(form[-1])))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "archive")
    # Torch's reader knows no pickle newer than protocol 2 and stops before it finds the name.
    found = "Unsupported operand" if form == "pickle 5" else r"it refers to posix\.system"
    with pytest.raises(CheckpointError, match=rf"more than tensors \({found}.*\); code in a checkpoint is never run"):
        convert(file, tmp_path / "out.safetensors")
    assert not trace.exists()
    if form.startswith("pickle"):
        pickle.loads(file.read_bytes())
    else:
        torch.load(file, weights_only=False)
    assert trace.exists()  # The pickle was a real one.


@pytest.mark.slow
def test_more_than_the_limits_allow_is_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "head.pt", tmp_path / "head.safetensors"
    torch.save({"a": torch.zeros(1000), "b": torch.zeros(1000)}, file)
    with pytest.raises(CheckpointError, match="bytes are more than the limit of 100"):
        convert(file, out, ConvertLimits(max_bytes=100))
    with pytest.raises(CheckpointError, match="2 tensors are more than 1"):
        convert(file, out, ConvertLimits(max_tensors=1))
    # A few bytes that claim to be many: one stored number, seen as 8 GB.
    torch.save({"a": torch.zeros(1).expand(2_000_000_000)}, file)
    with pytest.raises(CheckpointError, match="take more than 1000000 bytes"):
        convert(file, out, ConvertLimits(max_bytes=1_000_000))
    with pytest.raises(CheckpointError, match=r"memory|allocate"):
        convert(file, out)
    assert not out.exists()


@pytest.mark.slow
def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(100_000)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for record in plain.infolist():
            bomb.writestr(record.filename, plain.read(record), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed"):
        convert(tmp_path / "bomb.pt", tmp_path / "out.safetensors")


def test_reading_ends_with_its_time(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "slow.pt")
    with pytest.raises(CheckpointError, match="not read within 0 s"):
        convert(tmp_path / "slow.pt", tmp_path / "out.safetensors", ConvertLimits(timeout_s=0))


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 cut short",
        *(pytest.param(content, marks=pytest.mark.slow) for content in (b"", b"not a pickle at all")),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "head.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"head\.pt: "):
        convert(tmp_path / "head.pt", tmp_path / "out.safetensors")


def test_paths_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "model.safetensors").write_bytes(b"")
    torch.save([1], tmp_path / "ids.pt")
    with pytest.raises(ConfigError, match="safetensors already"):
        convert(full, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        convert(full, full)
    with pytest.raises(ConfigError, match="does not exist"):
        convert(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        convert(tmp_path / "ids.pt", tmp_path / "out.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="found none"):
        convert(tmp_path / "empty", tmp_path / "out")


def test_the_command_line_converts_and_names_what_it_wrote(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "ids.pt")
    out = tmp_path / "ids.safetensors"
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "ids.pt"), str(out)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(out))
