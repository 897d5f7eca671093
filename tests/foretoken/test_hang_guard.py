"""A test that hangs where Python cannot interrupt it ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted_tests import run_pytest

TESTS = """
import collections
import itertools

import pytest


def hang():
    \"\"\"An endless loop in C, which holds the interpreter's lock and looks at no signal.\"\"\"
    collections.deque(itertools.repeat(None), maxlen=0)


@pytest.fixture
def hanging_fixture():
    yield
    hang()


def test_passes():
    pass


def test_hangs():
    hang()


def test_fails_and_hangs_afterwards(hanging_fixture):
    raise AssertionError
"""


@pytest.mark.parametrize(("name", "frame"), [("test_hangs", "test_hangs"), ("afterwards", "hanging_fixture")])
def test_a_hang_in_compiled_code_ends_the_run(tmp_path: Path, name: str, frame: str) -> None:
    done = run_pytest(tmp_path, TESTS, "--timeout", "1", "-k", name)
    assert done.returncode == 1
    assert "Timeout (0:00:0" in done.stderr and f"in {frame}" in done.stderr
    # No summary: pytest did not get that far.
    assert "failed" not in done.stdout


def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS, "--timeout", "1", "-k", "test_passes or test_hangs", "--numprocesses", "1")
    assert done.returncode == 1
    assert "in test_hangs" in done.stderr
    assert "crashed while running" in done.stdout and "1 failed, 1 passed" in done.stdout


def test_a_test_that_ends_in_time_ends_nothing(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS, "--timeout", "1", "-k", "test_passes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
