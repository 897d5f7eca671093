"""Count what the engine has done. The engine thread writes; any thread may read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from foretoken.results import FallbackReason


class _Phase:
    """Add the time of a ``with`` statement's body to the seconds of a phase.

    A step has seven of them, and a generator would take more than twice as long.
    """

    __slots__ = ("_began", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds, name = self._seconds, self._name
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - self._began


class StepTimes:
    """Measure the phases of one step, in seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.phase_seconds: dict[str, float] = {}

    def phase(self, name: str) -> _Phase:
        """Time the body of a ``with`` statement."""
        return _Phase(self.phase_seconds, name)

    def elapsed_s(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began


@dataclass(slots=True)
class EngineCounters:
    """Counts since the engine started. Times are in seconds."""

    num_steps: int = 0
    # How many of them were overlapped steps.
    num_overlapped_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    # Rows that had no draft although their requests wanted one.
    fallback_steps: dict[FallbackReason, int] = field(default_factory=dict)
    # Ordinary steps on a GPU, by what kept them from overlapping.
    overlap_blocked_steps: dict[str, int] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def add_time(self, phase: str, seconds: float) -> None:
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds

    def phase(self, name: str) -> _Phase:
        """Time the body of a ``with`` statement."""
        return _Phase(self.phase_seconds, name)

    @property
    def num_fallback_steps(self) -> int:
        return sum(dict(self.fallback_steps).values())

    def count_fallback(self, reason: FallbackReason) -> None:
        """Count a row without a draft whose request wanted one."""
        self.fallback_steps[reason] = self.fallback_steps.get(reason, 0) + 1

    def count_blocked_overlap(self, reason: str) -> None:
        """Count an ordinary step in place of an overlapped one."""
        self.overlap_blocked_steps[reason] = self.overlap_blocked_steps.get(reason, 0) + 1

    def add_step(self, times: StepTimes) -> None:
        """Add a finished step's phases, and its whole duration as phase ``step``."""
        for phase, seconds in times.phase_seconds.items():
            self.add_time(phase, seconds)
        self.add_time("step", times.elapsed_s())
