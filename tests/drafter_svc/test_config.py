"""Which settings a drafter of each algorithm takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from drafter_svc.config import DrafterSettings
from foretoken.cli import app
from foretoken.config import build, to_flags
from foretoken.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "EAGLE3"}, "--speculative-draft-model-path: must be given for a drafter of algorithm EAGLE3"),
        ({"algorithm": "EAGLE"}, "--speculative-draft-model-path: must be given for a drafter of algorithm EAGLE"),
        (
            {"algorithm": "STANDALONE"},
            "--speculative-draft-model-path: must be given for a drafter of algo",
        ),
        (
            {"algorithm": "MTP", "speculative_draft_model_path": "/h"},
            "--speculative-draft-model-path: is for drafters of algorithm EAGLE, EAGLE3, STANDALONE, not for MTP",
        ),
        (
            {"algorithm": "STANDALONE", "speculative_draft_model_path": "/d", "speculative_token_map": "/m"},
            "--speculative-token-map: is for drafters of algorithm EAGLE, EAGLE3, MTP, not for STANDALONE",
        ),
        ({"speculative_token_map": "/m"}, "--speculative-token-map: is for .* not for NGRAM"),
        ({"threads": 2}, "--threads: is for drafters of algorithm EAGLE, EAGLE3, MTP, STANDALONE, not for NGRAM"),
        ({"target": "/t"}, "--target: is for drafters of .* not for NGRAM"),
        ({"disable_coupled_noise": True}, "--disable-coupled-noise: is for drafters of .* not for NGRAM"),
        (
            {"algorithm": "MTP", "ngram": {"capacity": 5000}},
            r"--speculative-ngram-\.\.\.: is for drafters of algorithm NGRAM, not for MTP",
        ),
        ({"algorithm": "MEDUSA"}, "--algorithm: expected NGRAM, EAGLE, EAGLE3, MTP or STANDALONE"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_their_flags(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(DrafterSettings, {"name": "d", "address": "unix:/d"} | values)


def test_settings_go_to_flags() -> None:
    settings = DrafterSettings(
        name="e",
        address="unix:/d",
        algorithm="EAGLE",
        speculative_draft_model_path=Path("/head"),
        target=Path("/target"),
        speculative_token_map=Path("/map.json"),
        threads=2,
        dtype="bfloat16",
        disable_coupled_noise=True,
    )
    assert to_flags(settings) == [
        *("--name", "e", "--address", "unix:/d", "--dtype", "bfloat16", "--algorithm", "EAGLE"),
        *("--speculative-draft-model-path", "/head", "--target", "/target"),
        *("--speculative-token-map", "/map.json", "--threads", "2", "--disable-coupled-noise"),
    ]


def test_the_command_builds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[DrafterSettings] = []
    monkeypatch.setattr("drafter_svc.server.run", seen.append)
    (tmp_path / "head").mkdir()
    words = ["--name", "eagle3", "--address", "unix:/d", "--algorithm", "EAGLE3", "--threads", "2"]
    words += ["--speculative-draft-model-path", str(tmp_path / "head"), "--target", str(tmp_path)]
    result = CliRunner().invoke(app, ["drafter", *words, "--disable-coupled-noise"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    expected = DrafterSettings(
        name="eagle3",
        address="unix:/d",
        algorithm="EAGLE3",
        speculative_draft_model_path=tmp_path / "head",
        target=tmp_path,
        threads=2,
        disable_coupled_noise=True,
    )
    assert seen == [expected]
    CliRunner().invoke(app, ["drafter", *to_flags(expected)], catch_exceptions=False)
    assert seen[1] == expected


def test_a_head_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--address", "unix:/d", "--algorithm", "EAGLE3", "--speculative-draft-model-path", "./no/such/head"]
    with pytest.raises(ConfigError, match=r"no such folder: \./no/such/head"):
        CliRunner().invoke(app, ["drafter", *words], catch_exceptions=False)
