"""What a result says of itself: by which command, of which commit, when and on what it was measured."""

from __future__ import annotations

import datetime
import shlex
import sys
from typing import Any

from benchmarks import environment
from benchmarks.gpu.floor import describe_device

GPU_PACKAGES = ("triton", "cuda-bindings")


def run_facts(module: str, commit: str) -> dict[str, Any]:
    """Of this program, ``python -m benchmarks.gpu.<module>``. ``commit``: if not empty, instead of the folder's own."""
    return {
        "began_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.gpu.{module}", *sys.argv[1:]]),
        "commit": commit or environment.commit(),
        "machine": environment.machine(),
        "versions": f"{environment.versions()}, {environment.optional_versions(GPU_PACKAGES)}",
        "device": describe_device(),
    }
