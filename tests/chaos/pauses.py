"""How long clients waited for tokens: between two of a stream, and after a death."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.killer import Blow
from tests.chaos.load import Timeline
from tests.chaos.schedule import Action, Process

# Without these no token arrives, whatever else lives.
_IN_THE_WAY: dict[Process, tuple[Process, ...]] = {"drafter": ("verifier", "gateway"), "verifier": ("gateway",)}


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds. ``count`` is of streams in flight, each counted at each death; 0: nothing to say."""

    count: int
    median: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Waits:
        found = list(seconds)
        return cls(len(found), statistics.median(found), max(found)) if found else cls(0, 0.0, 0.0)

    def __str__(self) -> str:
        return f"median {self.median:.3f} s, longest {self.longest:.3f} s ({self.count})" if self.count else "none seen"


def between_tokens(timelines: Sequence[Timeline]) -> Waits:
    """Between two arrivals of one output."""
    rows = [ticks for timeline in timelines for ticks in timeline.ticks.values()]
    return Waits.of(later - sooner for ticks in rows for sooner, later in itertools.pairwise(ticks))


def after_deaths(
    timelines: Sequence[Timeline],
    blows: Sequence[Blow],
    process: Process,
    actions: Sequence[Action] = ("kill", "stop"),
    *,
    since_signal: bool = False,
) -> Waits:
    """From deaths of ``process`` to the next tokens of the outputs that were being streamed then.

    Waits during which a process that this one's work passes through was away too say nothing of this one and are left
    out.

    Args:
        since_signal: count from the signal, also where a stopped process was found out later.
    """
    away = [(blow.at, blow.over_at or blow.at) for blow in blows if blow.strike.process in _IN_THE_WAY[process]]
    waits = []
    for blow in blows:
        if blow.strike.process != process or blow.strike.action not in actions:
            continue
        at = blow.at if since_signal else blow.died_at
        arrivals = [_next_tick(ticks, blow.at, at) for line in timelines for ticks in line.ticks.values()]
        for arrival in arrivals:
            if arrival is not None and not _overlaps(at, arrival, away):
                waits.append(arrival - at)
    return Waits.of(waits)


def _next_tick(ticks: Sequence[float], signal_at: float, at: float) -> float | None:
    """The first arrival after ``at`` of an output that had begun before the signal and not ended."""
    if not ticks or ticks[0] > signal_at:
        return None
    place = bisect.bisect_right(ticks, at)
    return ticks[place] if place < len(ticks) else None


def _overlaps(start: float, end: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(first <= end and last >= start for first, last in spans)
