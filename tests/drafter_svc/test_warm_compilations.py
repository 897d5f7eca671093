"""A warm-up compiles all kernels that drafts need: on a GPU each missing one costs a second."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.environment import child_environment


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "branches"), [(4, 2), (5, 1), (5, 8)])
def test_no_draft_waits_for_a_compiler(depth: int, branches: int, tmp_path: Path) -> None:
    """Ordinary and overlapped drafts, for any number of sequences, at this depth or less."""
    environment = child_environment()
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.compilations", str(tmp_path), str(depth), str(branches)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    phases = Counter(line.split(":")[0] for line in result.stdout.splitlines())
    assert phases["attach"] > 20 and not phases["drafts"], result.stdout
