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
_IN_THE_WAY: dict[Process, tuple[Process, ...]] = {
    "drafter": ("verifier", "gateway"),
    "head": ("verifier", "gateway"),
    "verifier": ("gateway",),
}
# Tokens of a process that has died arrive no later than this.
ON_THE_WAY_S = 0.5


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
    """How long deaths of ``process`` silenced the outputs that were being streamed then.

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
        rows = [ticks for line in timelines for ticks in line.ticks.values() if ticks and ticks[0] <= blow.at]
        silences = [_silence(ticks, at) for ticks in rows]
        waits += [end - start for start, end in silences if end > start and not _overlaps(at, end, away)]
    return Waits.of(waits)


def _silence(ticks: Sequence[float], at: float) -> tuple[float, float]:
    """The longest time without arrivals that the death at ``at`` can have caused: its beginning and its end.

    It begins at the death, or a little later: what was sent before it may still arrive. Empty if nothing came after it.
    """
    first = bisect.bisect_right(ticks, at)
    pairs = zip((at, *ticks[first:]), ticks[first:], strict=False)
    silences = [(start, end) for start, end in pairs if start <= at + ON_THE_WAY_S]
    return max(silences, key=lambda pair: pair[1] - pair[0], default=(at, at))


def _overlaps(start: float, end: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(first <= end and last >= start for first, last in spans)
