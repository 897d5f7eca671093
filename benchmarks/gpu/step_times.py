"""Compute step times from the arrival times of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Arrival times, ascending, each with the sequence's tokens by then.
Arrivals = Sequence[tuple[float, int]]


@dataclass(slots=True)
class MeasuredSteps:
    """Steps of a full batch.

    Attributes:
        seconds: the time of each step, in order.
        num_dropped: intervals that were not one ordinary step: several steps arrived at once, or
            the step had no draft.
        num_tokens, num_intervals: totals over all sequences, dropped intervals included.
    """

    seconds: list[float] = field(default_factory=list)
    num_dropped: int = 0
    num_tokens: int = 0
    num_intervals: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """The mean over all sequences; 0 without steps."""
        return self.num_tokens / self.num_intervals if self.num_intervals else 0.0

    def extend(self, other: MeasuredSteps) -> None:
        self.seconds += other.seconds
        self.num_dropped += other.num_dropped
        self.num_tokens += other.num_tokens
        self.num_intervals += other.num_intervals


def step_times(sequences: Sequence[Arrivals], accept_length: float) -> MeasuredSteps:
    """Return the steps of one batch, from the arrivals of its first sequence.

    The sequences advance together. Only intervals after the last sequence's first token and before
    the first sequence's end count: they contain no prefill, and the batch is full. The first steps
    may have no draft, because drafting starts during prefill. So counting starts at the first step
    of full length.

    Args:
        accept_length: average tokens of a step. An ordinary step has this number, rounded down or
            up.
    """
    least, most = math.floor(accept_length), math.ceil(accept_length)
    sequences = [_distinct(arrivals) for arrivals in sequences]
    start = max(arrivals[0][0] for arrivals in sequences)
    end = min(arrivals[-1][0] for arrivals in sequences)
    found = MeasuredSteps()
    first_at = last_at = None
    for (before, had), (at, has) in zip(sequences[0], sequences[0][1:], strict=False):
        if before < start or at >= end:
            continue
        is_ordinary = least <= has - had <= most
        if first_at is None and not is_ordinary:
            continue
        first_at, last_at = before if first_at is None else first_at, at
        if is_ordinary:
            found.seconds.append(at - before)
        else:
            found.num_dropped += 1
    if first_at is not None and last_at is not None:
        # Several steps in one message count as several steps.
        steps = sum(
            max(1, round((has - had) / accept_length))
            for (before, had), (at, has) in zip(sequences[0], sequences[0][1:], strict=False)
            if before >= first_at and at <= last_at
        )
        found.num_intervals = float(steps * len(sequences))
        found.num_tokens = sum(_by(arrivals, last_at) - _by(arrivals, first_at) for arrivals in sequences)
    return found


def _distinct(arrivals: Arrivals) -> list[tuple[float, int]]:
    """Merge arrivals that have the same time."""
    return sorted(dict(arrivals).items())


def _by(arrivals: Arrivals, at: float) -> int:
    """Return the tokens that a sequence had by a time."""
    return max((count for when, count in arrivals if when <= at), default=0)
