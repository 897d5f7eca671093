"""The option of the test run that skips what it has no time for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seconds", "outcome", "other"), [("0", "skipped", "passed"), ("600", "passed", "skipped")])
def test_tests_whose_turn_comes_later_are_skipped_and_named(seconds: str, outcome: str, other: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "--start-within", seconds, "tests/foretoken/test_limits.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and re.search(rf"\d {outcome}", run.stdout), run.stdout
    assert not re.search(rf"\d {other}", run.stdout), run.stdout
    assert ("--start-within" in run.stdout) == (seconds == "0")
