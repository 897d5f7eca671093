"""Compute how long streams paused after a fault, from the arrival times of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultPauses:
    """Seconds.

    Attributes:
        next_token: from the fault until every running stream had another token. Tokens that were
            under way at the fault count.
        longest: the longest pause of any stream; only the part after the fault counts.
        longest_began: from the fault to the beginning of that pause.
    """

    next_token: float
    longest: float
    longest_began: float


def pauses_after(streams: Sequence[Sequence[float]], fault_at: float) -> FaultPauses:
    """Return the pauses of the streams that met the fault and of all later ones.

    Args:
        streams: the arrival times of each stream's tokens, ascending, in seconds.

    Raises:
        ValueError: no stream ran at the time of the fault.
    """
    struck = [times for times in streams if times[0] <= fault_at < times[-1]]
    if not struck:
        raise ValueError("no stream ran at the time of the fault")
    gaps = [
        (after - max(before, fault_at), max(before, fault_at) - fault_at)
        for times in streams
        for before, after in itertools.pairwise(times)
        if after > fault_at
    ]
    longest, began = max(gaps)
    next_token = max(min(at for at in times if at > fault_at) - fault_at for times in struck)
    return FaultPauses(next_token, longest, began)


def longest_pause(streams: Sequence[Sequence[float]]) -> float:
    """Return the longest time between two tokens of one stream; 0 if no stream has two tokens."""
    return max((after - before for times in streams for before, after in itertools.pairwise(times)), default=0.0)
