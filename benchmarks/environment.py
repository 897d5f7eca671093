"""Describe the environment of a run: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("torch", "transformers", "numpy", "numba", "grpcio", "fastapi", "uvicorn")
ROOT = Path(__file__).parents[1]


def machine() -> str:
    """Return the processor's name and its number of cores."""
    return f"{processor_name(Path('/proc/cpuinfo').read_text())}, {os.cpu_count()} cores, {platform.system()}"


def processor_name(cpuinfo: str) -> str:
    """Return the first ``model name`` in /proc/cpuinfo, or the architecture if there is none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def versions() -> str:
    """Return the versions of Python and of the packages that matter to speed."""
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)]
    )


def optional_versions(packages: Sequence[str]) -> str:
    """Return the versions of optional packages, or that there are none."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def commit() -> str:
    """Return the commit and whether tracked files differ from it; empty outside a clone."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head} with changes" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def facts(module: str, used: str, began: float) -> dict[str, str]:
    """Return what a report says of its run.

    Args:
        module: that was run with this process's arguments.
        used: of the machine, and its load.
        began: as of time.monotonic().
    """
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": f"{machine()}; used: {used}",
        "versions": versions(),
        "commit": commit() or "unknown",
        "time": f"{time.monotonic() - began:.0f} s",
    }


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        # There is no commit in an archive without history, or without git.
        return ""
    return done.stdout.strip()
