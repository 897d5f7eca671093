"""How long a step waits for a draft, by what such drafts have cost."""

from __future__ import annotations

from verifier_svc.drafters.waits import DraftTimes

# A drafter may take so many times what it took for as many rows and levels. Load explains no more.
MOST_TIMES_COST = 4.0
# A step waits no longer than this, whatever drafts cost, unless the setting says more.
CEILING_S = 2.0


class Deadline:
    """The deadlines of one drafter's drafts."""

    def __init__(self, floor_s: float, times: DraftTimes) -> None:
        """``floor_s``: the shortest deadline, as set.

        ``times``: what drafts cost; it keeps learning.
        """
        self._floor_s, self._times = floor_s, times

    def seconds(self, depth: int, num_rows: int) -> float:
        """Return how long to wait for drafts of ``num_rows`` rows with at most ``depth`` edges."""
        cost_s = self._times.most(depth, num_rows) or 0.0
        return max(self._floor_s, min(MOST_TIMES_COST * cost_s, CEILING_S))

    def is_excused(self, depth: int, num_rows: int) -> bool:
        """Return whether load alone may explain that such drafts missed their deadline.

        It may as long as nothing is known of their cost, or if the ceiling cut the deadline short.
        """
        cost_s = self._times.most(depth, num_rows)
        return cost_s is None or self.seconds(depth, num_rows) < MOST_TIMES_COST * cost_s
