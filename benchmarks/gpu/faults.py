"""Faults of a drafter or a verifier on a GPU, as signals that cause them.

Kernel faults need a drafter that was started with HOOKS on its PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.lost_context import ASSERTION_STATUS, CONTEXT_LOST_STATUS

# Holds the sitecustomize that makes a drafter's kernels fail at these two signals.
HOOKS = Path(__file__).parent / "fault_hooks"
FAIL_ASSERTION = signal.SIGUSR1
WRITE_ASTRAY = signal.SIGUSR2

# Longer than many steps, and shorter than a step waits for a draft.
AWAITED_S = 0.05
MOMENT_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a process.

    Attributes:
        service: the process that receives the signals, as in ``foretoken SERVICE``.
        signals: the signals, each with its time in seconds after the first.
        said: part of the supervisor's log line about it; empty if the process survives and the
            supervisor logs nothing.
        needs_gpu: the fault exists only on a GPU.
    """

    name: str
    service: str
    signals: tuple[tuple[float, signal.Signals], ...]
    said: str
    needs_gpu: bool = False

    @property
    def ends_at_once(self) -> bool:
        """Whether the fault ends the process at once, not later by the supervisor or never."""
        return self.signals[-1][1] not in (signal.SIGSTOP, signal.SIGCONT)


# Faults that restart the verifier come last: if it does not come back, fewer measurements are lost.
FAULTS = (
    Fault("stopped for a moment", "drafter", ((0.0, signal.SIGSTOP), (MOMENT_S, signal.SIGCONT)), ""),
    Fault("killed", "drafter", ((0.0, signal.SIGKILL),), "(SIGKILL)"),
    Fault("stopped", "drafter", ((0.0, signal.SIGSTOP),), "did not answer for"),
    # By the time of the kill, the verifier's stream waits for the drafter.
    Fault("killed while awaited", "drafter", ((0.0, signal.SIGSTOP), (AWAITED_S, signal.SIGKILL)), "(SIGKILL)"),
    Fault("assertion", "drafter", ((0.0, FAIL_ASSERTION),), f"(status {ASSERTION_STATUS}", needs_gpu=True),
    Fault("illegal address", "drafter", ((0.0, WRITE_ASTRAY),), f"(status {CONTEXT_LOST_STATUS}", needs_gpu=True),
    Fault("verifier killed", "verifier", ((0.0, signal.SIGKILL),), "(SIGKILL)"),
)


def with_hooks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with HOOKS in front of its PYTHONPATH."""
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{HOOKS}{os.pathsep}{path}" if path else str(HOOKS)}
