"""Every command of the README has help, also without the packages that it needs on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# All in one process, which loads PyTorch once.
PROGRAM = """
import runpy, sys
sys.modules.update(triton=None, matplotlib=None)
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, (name, ended.code)
"""


@pytest.mark.slow
def test_help_needs_no_gpu() -> None:
    readme = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    names = list(dict.fromkeys(re.findall(r"python -m (benchmarks\.gpu\.\w+)", readme)))
    assert {"benchmarks.gpu.passes", "benchmarks.gpu.attention"} < set(names)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(names)
