"""How long clients waited for tokens: between two arrivals of a stream, and after a death."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.killer import Blow
from tests.chaos.load import Timeline
from tests.chaos.schedule import Action, Process

# Without these processes no token arrives.
_IN_THE_WAY: dict[Process, tuple[Process, ...]] = {
    "drafter": ("verifier", "gateway"),
    "head": ("verifier", "gateway"),
    "verifier": ("gateway",),
}
# Tokens of a process that has died arrive no later than this.
ON_THE_WAY_S = 0.5


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits in seconds. ``count``: streams in flight, counted at each death; 0: no data."""

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
    """Return the waits between two arrivals of one output."""
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
    """Return how long deaths of ``process`` silenced the outputs that were streaming then.

    Waits during which another process on the tokens' way was away too are left out: they say
    nothing about this one.

    Args:
        since_signal: count from the signal, even if a stopped process was found later.
    """
    away = [(blow.at, blow.over_at or blow.at) for blow in blows if blow.strike.process in _IN_THE_WAY[process]]
    waits = []
    for blow in blows:
        if blow.strike.process != process or blow.strike.action not in actions:
            continue
        at = blow.at if since_signal else blow.died_at
        rows = [ticks for line in timelines for ticks in line.ticks.values() if ticks and ticks[0] <= blow.at]
        silences = [_silence(ticks, at) for ticks in rows]
        waits += [end - start for start, end in silences if end > start and not _overlaps(at, end, away)]
    return Waits.of(waits)


def _silence(ticks: Sequence[float], at: float) -> tuple[float, float]:
    """Return the start and end of the longest silence that the death at ``at`` can have caused.

    It begins at the death or a little later: tokens sent before may still arrive. It is empty if
    nothing came after the death.
    """
    first = bisect.bisect_right(ticks, at)
    pairs = zip((at, *ticks[first:]), ticks[first:], strict=False)
    silences = [(start, end) for start, end in pairs if start <= at + ON_THE_WAY_S]
    return max(silences, key=lambda pair: pair[1] - pair[0], default=(at, at))


def _overlaps(start: float, end: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(first <= end and last >= start for first, last in spans)
