"""A drafter's folder is checked before a weight is read: the demo's, and changed copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.algorithms import ALGORITHMS
from drafter_svc.checkpoint.model_folder import check_draft_model, check_head_folder, check_map
from drafter_svc.config import DrafterSettings
from drafter_svc.server import make_drafter
from foretoken.errors import CheckpointError, ConfigError

DEMO = Path(__file__).parents[3] / "models" / "demo"
TARGET = DEMO / "target"
TOKEN_MAP = DEMO / "token_map.safetensors"


def changed(source: Path, folder: Path, **fields: Any) -> Path:
    """Return a copy of a checkpoint with changed fields in its config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("algorithm", "name"), [("EAGLE", "eagle2"), ("EAGLE3", "eagle3"), ("STANDALONE", "standalone")]
)
def test_the_demos_own_drafters_fit(algorithm: str, name: str) -> None:
    assert ALGORITHMS[algorithm].check_files(DEMO / name, TARGET) == ()


@pytest.mark.parametrize(
    ("algorithm", "name"), [("EAGLE", "eagle2"), ("EAGLE3", "eagle3"), ("STANDALONE", "standalone")]
)
def test_unknown_keys_of_a_drafter_are_named(
    algorithm: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drafter names them too when it starts."""
    folder = changed(DEMO / name, tmp_path / "drafter", my_key=3)
    note = f"{folder}/config.json: not known and ignored: my_key"
    assert ALGORITHMS[algorithm].check_files(folder, TARGET) == (note,)
    with caplog.at_level("INFO"):
        make_drafter(DrafterSettings(address="unix:/d", algorithm=algorithm, speculative_draft_model_path=folder))
    assert note in caplog.messages


@pytest.mark.parametrize(
    ("algorithm", "name"), [("EAGLE", "eagle2"), ("EAGLE3", "eagle3"), ("STANDALONE", "standalone")]
)
def test_a_key_of_a_drafter_that_changes_the_numbers_is_refused(algorithm: str, name: str, tmp_path: Path) -> None:
    folder = changed(DEMO / name, tmp_path / "drafter", attn_scale_foo=0.5)
    with pytest.raises(ConfigError, match=r"attn_scale_foo 0\.5 is not supported"):
        ALGORITHMS[algorithm].check_files(folder, TARGET)


@pytest.mark.parametrize(("algorithm", "name"), [("EAGLE", "eagle2"), ("EAGLE3", "eagle3")])
def test_a_head_for_a_target_of_another_width(algorithm: str, name: str, tmp_path: Path) -> None:
    target = changed(TARGET, tmp_path / "target", hidden_size=256)
    with pytest.raises(ConfigError, match=r"is a head for another target: .*fc\.weight takes \d+ values, not \d"):
        check_head_folder(algorithm, DEMO / name, target)


def test_a_head_whose_layers_the_target_has_not(tmp_path: Path) -> None:
    target = changed(TARGET, tmp_path / "target", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="the target has 3 layers"):
        check_head_folder("EAGLE3", DEMO / "eagle3", target)


def test_files_that_are_cut_short_or_not_there(tmp_path: Path) -> None:
    head = changed(DEMO / "eagle3", tmp_path / "head")
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        check_head_folder("EAGLE3", head, TARGET)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        check_head_folder("EAGLE3", head, TARGET)


def test_a_draft_model_of_another_vocabulary(tmp_path: Path) -> None:
    target = changed(TARGET, tmp_path / "target", vocab_size=9000)
    with pytest.raises(ConfigError, match="has a vocabulary of 8192 tokens, the target one of 9000"):
        check_draft_model("STANDALONE", DEMO / "standalone", target)


def test_token_maps(tmp_path: Path) -> None:
    check_map(TOKEN_MAP, TARGET, DEMO / "eagle3")
    small = changed(TARGET, tmp_path / "target", vocab_size=100)
    with pytest.raises(ConfigError, match="is not in the target's vocabulary of 100"):
        check_map(TOKEN_MAP, small, DEMO / "eagle3")
    own = changed(DEMO / "eagle3", tmp_path / "head", draft_vocab_size=64)
    with pytest.raises(ConfigError, match="has an output head of its own"):
        check_map(TOKEN_MAP, TARGET, own)
