"""``docker/install_torch.sh`` takes PyTorch from where there is a CPU build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/install_torch.sh"
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("index", "wheels", "options"),
    [
        (NOBODY, ["torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"], "--no-index --find-links docker/wheels "),
        (NOBODY, [], ""),
        ("", ["torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"], ""),
    ],
    ids=["a wheel", "no wheel", "no index asked for"],
)
def test_a_wheel_is_taken_where_the_index_does_not_answer(
    index: str, wheels: list[str], options: str, tmp_path: Path
) -> None:
    """pip's own index may have a later version, which is the CUDA build."""
    (tmp_path / "docker/wheels").mkdir(parents=True)
    for wheel in wheels:
        (tmp_path / "docker/wheels" / wheel).touch()
    done = subprocess.run(
        ["sh", str(SCRIPT), "echo", "pip", "install"],
        env={"TORCH_INDEX": index, "VIRTUAL_ENV": sys.prefix, "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == f"pip install --no-deps {options}torch"
