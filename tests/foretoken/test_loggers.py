"""Threads make loggers at any time, also between two phases of a test."""

from __future__ import annotations

from pathlib import Path

from tests.support.planted_tests import run_pytest

TESTS = """
import itertools
import logging

NUMBERS = itertools.count()


class Watched(logging.Logger):
    \"\"\"Another logger is made whenever pytest looks at this one.\"\"\"

    @property
    def propagate(self):
        logging.getLogger(f"made.{next(NUMBERS)}")
        return True

    @propagate.setter
    def propagate(self, value):
        pass


logging.setLoggerClass(Watched)
logging.getLogger("watched")
logging.setLoggerClass(logging.Logger)


def test_is_looked_at():
    assert next(NUMBERS) > 0
"""


def test_a_logger_that_is_made_while_pytest_looks_at_all_fails_no_test(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
