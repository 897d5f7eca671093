"""What a step costs by its number of rows: measured at start, kept true by the steps that run."""

from __future__ import annotations

import bisect

# Weight of a new observation. Machines are shared and contexts grow: follow, but not every jump.
SMOOTHING = 0.05


class StepCosts:
    """Seconds of a step without prefill, by total rows; between measured counts, and past them, by straight lines."""

    def __init__(self, measured: dict[int, float]) -> None:
        """``measured``: rows -> seconds, at least one entry."""
        if not measured:
            raise ValueError("step costs need at least one measured row count")
        self._rows = sorted(measured)
        self._seconds = [measured[rows] for rows in self._rows]

    def estimate(self, num_rows: int) -> float:
        """Seconds of a step of ``num_rows`` rows."""
        rows, seconds = self._rows, self._seconds
        if len(rows) == 1:
            return seconds[0]
        right = min(max(bisect.bisect_left(rows, num_rows), 1), len(rows) - 1)
        left = right - 1
        share = (num_rows - rows[left]) / (rows[right] - rows[left])
        return max(seconds[left] + share * (seconds[right] - seconds[left]), seconds[0] * 0.5)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Move the curve towards a step that ran: the nearest measured counts take most of the correction."""
        ratio = seconds / self.estimate(num_rows)
        # A step that took thrice as long was disturbed from outside; it says little of the next one.
        ratio = min(max(ratio, 1 / 3), 3.0)
        index = bisect.bisect_left(self._rows, num_rows)
        for i in range(len(self._rows)):
            weight = SMOOTHING / (1 + 2 * abs(i - index))
            self._seconds[i] *= 1 + weight * (ratio - 1)
