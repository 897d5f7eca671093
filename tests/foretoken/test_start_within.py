"""The option of the test run that skips what it has no time for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seconds", "outcome"), [("0", "1 skipped"), ("600", "1 passed")])
def test_tests_whose_turn_comes_later_are_skipped_and_named(seconds: str, outcome: str) -> None:
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/foretoken/test_limits.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    test = collected.stdout.splitlines()[0]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "--start-within", seconds, test],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and outcome in run.stdout, run.stdout
    assert ("--start-within" in run.stdout) == (seconds == "0")
