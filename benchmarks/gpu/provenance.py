"""Record how a result was measured (command, commit, time, machine), and keep it in a file."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.gpu.floor import describe_device

GPU_PACKAGES = ("triton", "cuda-bindings")


def run_facts(module: str, commit: str) -> dict[str, Any]:
    """Return the facts of this run of ``python -m benchmarks.gpu.<module>``.

    A non-empty ``commit`` replaces the folder's own.
    """
    return {
        "began_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.gpu.{module}", *sys.argv[1:]]),
        "commit": commit or environment.commit(),
        "machine": environment.machine(),
        "versions": f"{environment.versions()}, {environment.optional_versions(GPU_PACKAGES)}",
        "device": describe_device(),
    }


def keep(rows: Iterable[dict[str, Any]], result: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return all rows, and write the result to the file again after each row."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept: list[dict[str, Any]] = []
    for row in rows:
        kept.append(row)
        file.write_text(json.dumps(result | {"rows": kept}, indent=1) + "\n")
    return kept
