"""What the engine did so far. Its thread writes, any thread may read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class StepTimes:
    """The phases of one step, in seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.phase_seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement."""
        began = time.perf_counter()
        yield
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + time.perf_counter() - began

    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began


@dataclass(slots=True)
class EngineCounters:
    """What the engine did since it started. Times are seconds."""

    num_steps: int = 0
    # The steps among them that ran ahead of the engine's thread.
    num_resident_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_fallback_steps: int = 0
    # Steps that the next one could not overlap, by reason.
    overlap_blocked_steps: dict[str, int] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def add_time(self, phase: str, seconds: float) -> None:
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds

    def count_blocked_overlap(self, reason: str) -> None:
        """Count a step after which the next one could not overlap with the host's work."""
        self.overlap_blocked_steps[reason] = self.overlap_blocked_steps.get(reason, 0) + 1

    def add_step(self, times: StepTimes) -> None:
        """Add the phases of a step that is over; ``step`` is all of it."""
        for phase, seconds in times.phase_seconds.items():
            self.add_time(phase, seconds)
        self.add_time("step", times.elapsed_s())
