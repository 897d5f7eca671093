"""What may happen to a drafter or a verifier on a GPU, as signals that bring it about.

Faults of a kernel need a drafter that was started with HOOKS on its PYTHONPATH.
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

# Many steps, and less than a step waits for a draft.
AWAITED_S = 0.05
MOMENT_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to go.

    Attributes:
        service: whom it befalls, as in ``foretoken SERVICE``.
        signals: what it is sent, each with its time in seconds after the first.
        said: part of the supervisor's line about it; empty: the process lives, and nothing is said.
        needs_gpu: a CPU has no such fault.
    """

    name: str
    service: str
    signals: tuple[tuple[float, signal.Signals], ...]
    said: str
    needs_gpu: bool = False

    @property
    def ends_at_once(self) -> bool:
        """Whether the process ends now, rather than when its silence is noticed, or not at all."""
        return self.signals[-1][1] not in (signal.SIGSTOP, signal.SIGCONT)


# Those behind which a verifier must start come last, so that less is lost where none does.
FAULTS = (
    Fault("stopped for a moment", "drafter", ((0.0, signal.SIGSTOP), (MOMENT_S, signal.SIGCONT)), ""),
    Fault("killed", "drafter", ((0.0, signal.SIGKILL),), "(SIGKILL)"),
    Fault("stopped", "drafter", ((0.0, signal.SIGSTOP),), "did not answer for"),
    # The verifier's stream surely waits for it by then.
    Fault("killed while awaited", "drafter", ((0.0, signal.SIGSTOP), (AWAITED_S, signal.SIGKILL)), "(SIGKILL)"),
    Fault("assertion", "drafter", ((0.0, FAIL_ASSERTION),), f"(status {ASSERTION_STATUS}", needs_gpu=True),
    Fault("illegal address", "drafter", ((0.0, WRITE_ASTRAY),), f"(status {CONTEXT_LOST_STATUS}", needs_gpu=True),
    Fault("verifier killed", "verifier", ((0.0, signal.SIGKILL),), "(SIGKILL)"),
)


def with_hooks(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with HOOKS in front of its PYTHONPATH."""
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{HOOKS}{os.pathsep}{path}" if path else str(HOOKS)}
