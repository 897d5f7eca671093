"""The rules and the configuration of the profile
`observability`, checked by Prometheus' own tool.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "docker" / "observability"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
TESTS = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text())["tests"]
DOCS = Path(__file__).parents[2] / "docs" / "watching.md"


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool (on Debian: apt-get install prometheus)")
    return found


@pytest.mark.parametrize(
    "words",
    [("check", "config", "prometheus.yaml"), ("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")],
    ids=" ".join,
)
def test_promtool(promtool: str, words: tuple[str, ...]) -> None:
    done = subprocess.run([promtool, *words], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_rule_would_be_found(promtool: str, tmp_path: Path) -> None:
    """The rules' tests test something: with another threshold they fail."""
    for name in ("alerts.yaml", "alerts.test.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    file = tmp_path / "alerts.yaml"
    file.write_text(file.read_text().replace("> 0.05 *", "> 0.5 *"))
    done = subprocess.run([promtool, "test", "rules", "alerts.test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ForetokenRequestsFail" in done.stdout + done.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_fires_in_one_test_and_stays_quiet_in_another(rule: dict[str, Any]) -> None:
    expected = [
        bool(check["exp_alerts"])
        for test in TESTS
        for check in test["alert_rule_test"]
        if check["alertname"] == rule["alert"]
    ]
    assert set(expected) == {True, False}


def test_each_alert_is_in_the_runbook() -> None:
    named = set(re.findall(r"^\| `(Foretoken\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert named == {rule["alert"] for rule in RULES}
