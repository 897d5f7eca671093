"""From when tokens came to how long streams paused behind a fault. No clock and no server here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds.

    Attributes:
        next_token: from the fault until every stream that ran had another token. Tokens that were on their way count.
        longest: the longest time that any stream was without a token, as far as it lies behind the fault.
        longest_began: from the fault to the beginning of that time.
    """

    next_token: float
    longest: float
    longest_began: float


def pauses_after(streams: Sequence[Sequence[float]], fault_at: float) -> Pauses:
    """Of streams that met the fault and of those that came later.

    Args:
        streams: when the tokens of each came; ascending, seconds.

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
    return Pauses(next_token, longest, began)


def longest_pause(streams: Sequence[Sequence[float]]) -> float:
    """The longest time between two tokens of one stream; 0 where none has two."""
    return max((after - before for times in streams for before, after in itertools.pairwise(times)), default=0.0)
