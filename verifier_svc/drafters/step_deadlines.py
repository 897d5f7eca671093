"""Decide how long an overlapped step may take until its draft counts as missed.

Past steps are the measure.
"""

from __future__ import annotations

from collections.abc import Hashable

from verifier_svc.drafters.deadline import CEILING_S, MOST_TIMES_COST

# The first draft of a kind may take this many shortest deadlines: the drafter captures its graph.
FIRST_DEADLINES = 10
# Weight of a new step. One that took three times as long as expected was disturbed.
SMOOTHING, MOST_DISTURBED = 0.1, 3.0


class StepDeadlines:
    """The deadlines of one drafter's overlapped steps. Only the engine thread uses it.

    A kind of draft is whatever makes its time: the trees' shape, the batch,
    whether prompts are learned before.
    """

    def __init__(self, floor_s: float) -> None:
        """``floor_s``: the shortest deadline, as set."""
        self._floor_s = floor_s
        # Smoothed seconds by kind; 0 for a kind with only its first step seen.
        self._costs: dict[Hashable, float] = {}

    def seconds(self, kind: Hashable) -> float:
        """Return how long a step with a draft of this kind may take."""
        cost_s = self._costs.get(kind)
        if cost_s is None:
            return FIRST_DEADLINES * self._floor_s
        return max(self._floor_s, min(MOST_TIMES_COST * cost_s, CEILING_S))

    def is_excused(self, kind: Hashable) -> bool:
        """Return whether load alone may explain a miss: the ceiling cut the deadline short."""
        return self.seconds(kind) < MOST_TIMES_COST * self._costs.get(kind, 0.0)

    def observe(self, kind: Hashable, seconds: float) -> None:
        """Learn what a step took. The first one of a kind says nothing of the next ones."""
        cost_s = self._costs.get(kind)
        if cost_s:
            cost_s += SMOOTHING * (min(seconds, MOST_DISTURBED * cost_s) - cost_s)
        self._costs[kind] = 0.0 if cost_s is None else cost_s or seconds
