"""Runs pytest on tests that a test writes, with this suite's conftest and settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Far above what planted tests take, and below this suite's own.
PATIENCE_S = 120.0


def run_pytest(folder: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "test_planted.py"
    path.write_text(tests, encoding="utf-8")
    (folder / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), str(path), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
