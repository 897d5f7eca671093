"""Sample how busy the GPU is, by nvidia-smi."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

PERIOD_MS = 100
QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}")


class Samples:
    """The shares of time in which a kernel ran, one a sample; empty without nvidia-smi."""

    def __init__(self) -> None:
        self.busy: list[float] = []

    @property
    def idle(self) -> float | None:
        """The mean share of time without a kernel, or None if it is unknown."""
        return 1 - sum(self.busy) / len(self.busy) if self.busy else None


@contextlib.contextmanager
def sampled() -> Iterator[Samples]:
    """Sample the first visible GPU during the block; the samples are there at its end.

    The block begins after nvidia-smi's first sample: requests sent while it
    started waited up to 80 ms longer.
    """
    samples = Samples()
    program = shutil.which("nvidia-smi")
    if program is None:
        yield samples
        return
    command = [program, *QUERY, f"--id={first_visible()}"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        # Its value is of the time before.
        child.stdout.readline()
        yield samples
    finally:
        child.terminate()
        output, _ = child.communicate()
        samples.busy = parse(output)


def first_visible() -> str:
    """Return the first GPU that CUDA shows to this process, as nvidia-smi's ``--id``.

    nvidia-smi does not read CUDA_VISIBLE_DEVICES.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def parse(output: str) -> list[float]:
    """Return the samples of nvidia-smi's output."""
    numbers = [line.strip() for line in output.splitlines()]
    return [float(number) / 100 for number in numbers if number.isdecimal()]
