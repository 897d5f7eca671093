"""A dry run names what a start would refuse in checkpoints, before any process is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from foretoken.cli import app
from tests.support.command_line import foretoken, free_port
from tests.support.deployments import Targets

Tensors = dict[str, torch.Tensor]
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"), steps=0)


@pytest.fixture
def stack(targets: Targets, tmp_path: Path) -> Path:
    """Return a folder with a target, its heads and a draft model, to be changed."""
    shutil.copytree(targets["llama"].folder.parent, tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def mimo(targets: Targets, tmp_path: Path) -> Path:
    shutil.copytree(targets["mimo"].folder, tmp_path / "mimo")
    return tmp_path / "mimo"


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def dry(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words), "--dry-run"])


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(KEY), f"tensor {KEY} is missing"),
    "several missing": (lambda t: [t.pop(KEY), t.pop("model.norm.weight")], f"tensor {KEY} and 1 more are missing"),
    "misshapen": (lambda t: t.update({KEY: torch.zeros(32, 63)}), f"tensor {KEY} has shape [32, 63]; the config needs"),
    "of a wrong type": (lambda t: t.update({KEY: t[KEY].to(torch.int8)}), f"tensor {KEY} has type I8"),
    "unknown": (lambda t: t.update({"model.extra": torch.zeros(2)}), "tensor model.extra is not part of this model"),
}


@pytest.mark.parametrize("command", [("serve",), ("verifier", "--address", "unix:/v")])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_targets_tensors(stack: Path, fault: str, command: tuple[str, ...]) -> None:
    edit, message = FAULTS[fault]
    change(stack / "target", edit)
    result = dry(*command, stack / "target")
    assert f"{stack / 'target' / 'model.safetensors'}: {message}" in str(result.exception)


def test_all_kinds_of_faults_are_named_at_once(stack: Path) -> None:
    for name in ("missing", "unknown"):
        change(stack / "target", FAULTS[name][0])
    change(stack / "target", lambda t: t.update({"model.norm.weight": torch.zeros(3)}))
    found = str(dry("serve", stack / "target").exception)
    assert [part.partition(": ")[2][:28] for part in found.split("; ") if ".safetensors" in part] == [
        f"tensor {KEY}"[:28],
        "tensor model.norm.weight has",
        "tensor model.extra is not pa",
    ]


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        ("EAGLE", "layers.0.mlp.up_proj.weight"),
        ("EAGLE3", "norm.weight"),
        ("STANDALONE", "model.norm.weight"),
    ],
)
def test_faults_of_a_drafters_tensors(stack: Path, drafter: str, name: str) -> None:
    words = (stack / "target", "--speculative-algorithm", drafter, "--speculative-draft-model-path", stack / drafter)
    result = dry("serve", *words)
    assert result.exit_code == 0, result.exception
    change(stack / drafter, lambda tensors: tensors.pop(name))
    found = str(dry("serve", *words).exception)
    assert found.startswith("--speculative-draft-model-path: ") and f"tensor {name} is missing" in found
    change(stack / drafter, lambda tensors: tensors.update({name: torch.zeros(3), "a.b": torch.zeros(3)}))
    found = str(dry("serve", *words).exception)
    assert f"{name} has shape [3]" in found and "tensor a.b is not part of this" in found


def test_faults_of_mtp_layers(mimo: Path) -> None:
    name = "model.mtp_layers.0.input_proj.weight"
    words = (mimo, "--speculative-algorithm", "MTP")
    change(mimo, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing" in str(dry("serve", *words).exception)
    # Without the drafter they are of no use, and no fault.
    assert dry("serve", mimo, "--speculative-algorithm", "NONE").exit_code == 0


def test_config_keys(stack: Path) -> None:
    target = stack / "target"
    configure(target, made_by="us")
    result = dry("serve", target)
    assert result.exit_code == 0
    assert result.stderr == f"foretoken: {target / 'config.json'}: not known and ignored: made_by\n"
    configure(target, logits_scaling=8.0)
    assert "logits_scaling 8.0 is not supported; it changes the model's numbers" in str(dry("serve", target).exception)


def test_serve_refuses_the_same_before_it_starts_anything(stack: Path) -> None:
    change(stack / "target", FAULTS["missing"][0])
    result = foretoken("serve", str(stack / "target"), "--port", free_port(), "--grpc-port", free_port())
    assert result.returncode == 2
    expected = f"foretoken: {stack / 'target' / 'model.safetensors'}: tensor {KEY} is missing\n"
    assert (result.stdout, result.stderr) == ("", expected)
