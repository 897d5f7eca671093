"""With this folder on PYTHONPATH a drafter's process faults on its GPU when it is told to; everything else is as ever.

Python imports a module of this name at each start. SIGUSR1: a kernel's assertion fails. SIGUSR2: a kernel writes to an
address that is nobody's. benchmarks/gpu/faults.py sends them.
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


# There is no sys.argv yet.
if "drafter" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, fail_assertion)
    signal.signal(signal.SIGUSR2, write_astray)
