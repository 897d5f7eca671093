"""Let signals cause GPU faults in a drafter's process that has this folder on its PYTHONPATH.

Python imports a module of this name at each start. At SIGUSR1 a kernel's assertion fails. At
SIGUSR2 a kernel writes to an unmapped address. benchmarks/gpu/faults.py sends the signals.
"""

from __future__ import annotations

import signal
import sys


def fail_assertion(number: int, frame: object) -> None:
    import torch

    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]


def write_astray(number: int, frame: object) -> None:
    import torch
    import wild_store  # type: ignore[import-not-found]  # Beside this file, on PYTHONPATH.

    wild_store.wild_store[(1,)](torch.zeros(1, device="cuda"))


# sys.argv does not exist yet.
if "drafter" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, fail_assertion)
    signal.signal(signal.SIGUSR2, write_astray)
