"""A virtual environment of its own for one client, kept between runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".client-environments"
# Clients are installed at the versions that pip chooses, which is what users get.
INSTALL_TIMEOUT_S = 1800


def environment(name: str, requirements: Sequence[str], bare: Sequence[str] = ()) -> Path:
    """Return the folder of an environment that has these requirements.

    ``bare``: packages that are installed without what they require, such as libraries for a GPU.
    ``torch`` among them is installed as in the project's own environment: its CPU build where there
    is no GPU. Raises RuntimeError with pip's words if something cannot be installed.
    """
    folder, wanted = FOLDER / name, "\n".join([*requirements, *bare])
    stamp = folder / "requirements.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if "torch" in requirements:
        _run(["sh", str(ROOT / "docker/install_torch.sh"), *pip], VIRTUAL_ENV=str(folder), cwd=ROOT)
    _run([*pip, *requirements])
    if bare:
        _run([*pip, "--no-deps", *bare])
    stamp.write_text(wanted)
    return folder


def node_modules(packages: Sequence[str]) -> Path:
    """Return a folder whose node_modules has these packages.

    Raises RuntimeError as ``environment`` does.
    """
    folder, wanted = FOLDER / "javascript", "\n".join(packages)
    stamp = folder / "packages.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _run(["npm", "install", "--silent", "--no-save", "--prefix", str(folder), *packages])
    stamp.write_text(wanted)
    return folder


def _run(command: Sequence[str], *, cwd: Path | None = None, **variables: str) -> None:
    environment = os.environ | {"TORCH_INDEX": os.environ.get("TORCH_INDEX", "")} | variables
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
