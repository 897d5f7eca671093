"""``foretoken doctor`` on a command line: lines or JSON, and an exit
status that says whether there is a fault.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from foretoken.cli import app
from foretoken.models.draft_config import OTHER_TARGET
from tests.support.command_line import DEMO, ENVIRONMENT, free_port
from tests.support.fake_hub import running_hub


def doctor(*words: object) -> Result:
    ports = ("--port", free_port(), "--grpc-port", free_port())
    return CliRunner().invoke(app, ["doctor", *map(str, words), *ports])


def findings(*words: object) -> dict[str, dict[str, Any]]:
    """Return the findings by check."""
    found = json.loads(doctor(*words, "--json").stdout)["findings"]
    return {finding["check"]: finding for finding in found}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a copy of the demo's target, to be spoilt."""
    shutil.copytree(DEMO / "target", tmp_path / "target")
    return tmp_path / "target"


def test_the_demo_is_well() -> None:
    result = doctor("demo")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("no fault found\n")
    assert "drafter eagle3" in result.stdout and "EAGLE3 fits the target" in result.stdout


def test_without_a_model_only_the_machine_is_checked() -> None:
    found = findings()
    assert {"Python", "packages", "PyTorch", "sockets", "hub cache"} <= found.keys()
    assert not {"model", "target", "command line"} & found.keys()


def test_flags_that_this_machine_cannot_take() -> None:
    found = findings("--mps", "on", "--device", "cpu")["device flags"]
    assert (found["level"], found["found"]) == ("fault", "--mps on: models do not run on an NVIDIA GPU here")


def test_a_fault_of_the_target(target: Path) -> None:
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"logits_scaling": 8.0}))
    result = doctor(target)
    assert result.exit_code == 1
    assert "fault    target" in result.stdout and "logits_scaling 8.0 is not supported" in result.stdout
    assert result.stdout.endswith("1 fault\n")


def test_unknown_keys_are_a_warning(target: Path) -> None:
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"made_by": "us"}))
    found = findings(target)["target"]
    assert (found["level"], "made_by" in found["found"]) == ("warning", True)
    assert doctor(target).exit_code == 0


def test_unknown_keys_of_a_head_are_a_warning(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "eagle3", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"made_by": "us"}))
    found = findings(DEMO / "target", "--drafter", f"name=head,algorithm=EAGLE3,model={config.parent}")["drafter head"]
    assert (found["level"], "made_by" in found["found"]) == ("warning", True)


def test_files_that_are_missing_end_the_checks_of_the_model(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    found = findings(target)
    assert found["model"]["found"] == f"{target} has no tokenizer.json"
    assert not {"target", "drafter ngram"} & found.keys()


def test_a_drafter_of_another_algorithm() -> None:
    spec = f"name=head,algorithm=EAGLE,model={DEMO / 'eagle3'}"
    found = findings(DEMO / "target", "--drafter", spec, "--drafter", "name=grams,algorithm=NGRAM")
    assert (found["drafter head files"]["level"], found["drafter head"]["level"]) == ("ok", "fault")
    assert "holds a head of algorithm EAGLE3, not of EAGLE" in found["drafter head"]["found"]
    assert found["drafter head"]["advice"] == "use algorithm EAGLE3"
    assert found["drafter grams"]["level"] == "ok"


@pytest.mark.parametrize(
    ("spec", "check", "message"),
    [
        ("name=head,algorithm=EAGLE3,model=/nonexistent", "drafter head", "no such folder: /nonexistent"),
        ("name=head,algorithm=OTHER", "drafter head", "--drafter algorithm: expected"),
        ("name=head,algorithm=EAGLE3", "drafter head", "--drafter model: must be given"),
        ("name=a b,algorithm=NGRAM", "command line", "--drafter name: expected"),
        ("algorithm=NGRAM", "command line", "--drafter name: must be given"),
        ("name", "command line", "--drafter: expected key=value"),
        ("name=grams,algorithm=NGRAM", "command line", "--drafter name: grams is given twice"),
    ],
)
def test_a_mistake_in_a_drafter_is_not_the_models(spec: str, check: str, message: str) -> None:
    found = findings(DEMO / "target", "--drafter", spec, "--drafter", "name=grams,algorithm=NGRAM")
    assert found[check]["level"] == "fault" and message in found[check]["found"]
    assert found[check]["advice"] == ""
    assert {found[other]["level"] for other in ("model", "target", "drafter grams")} == {"ok"}


def test_mistakes_in_drafters_are_told_without_the_model(tmp_path: Path) -> None:
    spec = f"name=two,algorithm=EAGLE3,modle={DEMO / 'eagle3'}"
    found = findings(tmp_path / "missing", "--drafter", spec)
    assert {check for check, one in found.items() if one["level"] == "fault"} == {"drafter two", "model"}
    assert "there is no such key" in found["drafter two"]["found"]
    # Its flags are not sound together.
    assert "command line" not in found


def test_a_head_for_another_target(target: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(DEMO / "eagle3", head)
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 40, 60]
    (head / "config.json").write_text(json.dumps(config))
    found = findings(target, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", head)
    assert found["drafter eagle3"]["level"] == "fault"
    assert found["drafter eagle3"]["advice"] == OTHER_TARGET
    assert "the target has 8 layers" in found["drafter eagle3"]["found"]


@pytest.mark.parametrize(
    ("changes", "problem", "advice"),
    [
        ({"hidden_size": 512}, "fc.weight has shape [384, 1152]; the config needs [512, 1152]", "or its config.json"),
        ({"target_hidden_size": 512}, "does not match a target of 384", OTHER_TARGET),
    ],
)
def test_a_head_of_another_size(tmp_path: Path, changes: dict[str, int], problem: str, advice: str) -> None:
    head = tmp_path / "head"
    shutil.copytree(DEMO / "eagle3", head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    found = findings(DEMO / "target", "--drafter", f"name=head,algorithm=EAGLE3,model={head}")["drafter head"]
    assert problem in found["found"]
    assert advice in found["advice"] and found["advice"].endswith("use one that was trained for this model")


def test_advice_about_heads_is_given_for_heads_only(tmp_path: Path) -> None:
    spec = f"name=head,algorithm=EAGLE3,model={DEMO / 'eagle3'},token_map={tmp_path / 'none'}"
    found = findings(DEMO / "target", "--drafter", spec)["drafter head"]
    assert (found["level"], found["advice"]) == ("fault", "")


def test_a_draft_model_with_another_vocabulary(target: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DEMO / "target", draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = findings(target, "--drafter", f"name=small,algorithm=STANDALONE,model={draft}")["drafter small"]
    assert (found["level"], "is not the target's" in found["found"]) == ("fault", True)


def test_a_speculators_head_is_named_with_its_target(target: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(DEMO / "eagle3", head)
    config = json.loads((head / "config.json").read_text())
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    config["speculators_config"] = {"algorithm": "eagle3", "verifier": verifier}
    (head / "config.json").write_text(json.dumps(config))
    found = findings(head)
    assert f"the target is {target}" in found["command line"]["found"]
    assert (found["model"]["level"], found["drafter eagle3"]["level"]) == ("ok", "ok")
    config["speculators_config"]["verifier"] = {"name_or_path": "/nowhere"}
    (head / "config.json").write_text(json.dumps(config))
    assert "names the target /nowhere, where no config.json is found" in findings(head)["model"]["found"]


def test_a_key_file_that_is_missing(tmp_path: Path) -> None:
    result = doctor(DEMO / "target", "--api-key-file", tmp_path / "none")
    assert result.exit_code == 1
    assert "fault    command line" in result.stdout and "--api-key-file" in result.stdout


def test_a_flag_without_a_meaning_is_refused_as_by_serve() -> None:
    result = CliRunner().invoke(app, ["doctor", "--port", "99999999"])
    assert "--port" in str(result.exception)


def test_a_model_of_the_hub_is_not_downloaded(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (DEMO / "target").iterdir() if path.is_file()}
    words = ("doctor", "org/tiny", "--port", free_port(), "--grpc-port", free_port())
    with running_hub({"org/tiny": files}) as hub:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "foretoken", *words],
            env=ENVIRONMENT | hub.environment(tmp_path / "cache"),
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, result.stderr
    assert "org/tiny has not been downloaded; foretoken serve downloads it" in result.stdout
    assert {path for path in hub.paths if "/resolve/" in path} == {"/org/tiny/resolve/main/config.json"}
