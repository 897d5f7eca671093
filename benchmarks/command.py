"""What the benchmarks' commands have in common: their cores, progress lines and exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def take_cores(count: int) -> str:
    """Keep this process and its children on ``count`` cores, or on all if there are fewer.

    Returns:
        How many they are and the machine's load, as text.
    """
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    load = os.getloadavg()[0]
    if load > 0.5:
        progress(f"this machine is busy (load {load:.1f}); figures will be off")
    return f"{len(cores)}, load {load:.1f} before"


def numbers(text: str) -> list[int]:
    """Parse numbers that are separated by commas."""
    return [int(word) for word in text.split(",")]


def progress(line: str) -> None:
    """Print a progress line to stderr."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def finish(failures: Sequence[str], *, judged: bool = True) -> NoReturn:
    """Print the failures, and end this process: with status 1 if there are any."""
    for line in failures:
        print(f"FAIL: {line}")
    if not judged:
        print("A quick run: no bar was judged.")
    sys.exit(1 if failures else 0)
