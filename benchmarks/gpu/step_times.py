"""From when tokens came to how long steps took. No clock and no server here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# When tokens came, and how many the sequence had by then; ascending.
Arrivals = Sequence[tuple[float, int]]


@dataclass(slots=True)
class StepTimes:
    """Steps of which each sequence of a batch took part.

    Attributes:
        seconds: of each step, in order.
        num_dropped: intervals that were not one ordinary step: several steps that came at once, or one without a draft.
        num_tokens, num_intervals: of all sequences together, dropped intervals included.
    """

    seconds: list[float] = field(default_factory=list)
    num_dropped: int = 0
    num_tokens: int = 0
    num_intervals: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean over all sequences; 0 where there was no step."""
        return self.num_tokens / self.num_intervals if self.num_intervals else 0.0

    def extend(self, other: StepTimes) -> None:
        self.seconds += other.seconds
        self.num_dropped += other.num_dropped
        self.num_tokens += other.num_tokens
        self.num_intervals += other.num_intervals


def step_times(sequences: Sequence[Arrivals], accept_length: float) -> StepTimes:
    """The steps of one batch, whose sequences advance together, so that the first one's arrivals tell.

    Counted are intervals from the last sequence's first token to before the first sequence's end, so there is no
    prefill and no half-empty batch in them. The first ones may lack a draft, which is made while a prompt is computed:
    counting starts at the first step of full length.

    Args:
        accept_length: tokens that a step gives on average. An interval with fewer than the next lower whole number or
            more than the next higher one was not one ordinary step.
    """
    least, most = math.floor(accept_length), math.ceil(accept_length)
    sequences = [_distinct(arrivals) for arrivals in sequences]
    start = max(arrivals[0][0] for arrivals in sequences)
    end = min(arrivals[-1][0] for arrivals in sequences)
    found = StepTimes()
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
        # Steps that came in one message count as the several that they were.
        steps = sum(
            max(1, round((has - had) / accept_length))
            for (before, had), (at, has) in zip(sequences[0], sequences[0][1:], strict=False)
            if before >= first_at and at <= last_at
        )
        found.num_intervals = float(steps * len(sequences))
        found.num_tokens = sum(_by(arrivals, last_at) - _by(arrivals, first_at) for arrivals in sequences)
    return found


def _distinct(arrivals: Arrivals) -> list[tuple[float, int]]:
    """What was read at the same time came at once."""
    return sorted(dict(arrivals).items())


def _by(arrivals: Arrivals, at: float) -> int:
    """Tokens that a sequence had at a time."""
    return max((count for when, count in arrivals if when <= at), default=0)
