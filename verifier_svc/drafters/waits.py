"""Decide how long to wait for one drafter.

Learn what its waits cost, and how much of that is still affordable.
"""

from __future__ import annotations

from collections.abc import Hashable

# Weight of a new wait in the estimate of what collecting a draft costs.
WAIT_SMOOTHING = 0.05
# Share of the time that may go into waits which no draft could have paid back: plain
# decode keeps 98% of its speed.
AFFORDABLE_SHARE = 0.02
# Draft timeouts that are affordable at once: as many as open the circuit
# of a drafter that has stopped.
AFFORDABLE_TIMEOUTS = 3
# Weight of a new wait in the estimate by depth and rows.
SMOOTHING = 0.05
# What a step without a wait takes off the belief in the last wait: after 1,400 steps half is left.
FADING = 0.0005


class WaitBudget:
    """What waiting for one drafter may cost.

    A wait that took longer than all of its tokens were worth has lost the difference, whatever was
    accepted. A budget that fills with time pays for such losses. While it is empty nobody waits:
    the drafter is only scouted.
    """

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: the longest wait."""
        self._most_s = AFFORDABLE_TIMEOUTS * timeout_s
        self._left_s = self._most_s
        self._filled_at: float | None = None
        self._timeout_s = timeout_s
        # When the drafter was last reported late, if nothing has come since.
        self._late_at: float | None = None
        # Smoothed seconds of a wait.
        self.wait_s = 0.0

    def has_some(self, now: float) -> bool:
        """Return whether a wait is affordable at ``now``, in seconds of any steady clock."""
        if self._filled_at is not None:
            self._left_s = min(self._left_s + AFFORDABLE_SHARE * (now - self._filled_at), self._most_s)
        self._filled_at = now
        return self._left_s > 0.0

    def spend(self, waited_s: float, lost_s: float) -> None:
        """Record a wait of ``waited_s`` seconds; ``lost_s`` of them exceeded its worth."""
        self.wait_s += WAIT_SMOOTHING * (waited_s - self.wait_s)
        self._left_s -= lost_s

    def give_back(self, seconds: float) -> None:
        """Take back a loss that was none after all."""
        self._left_s = min(self._left_s + seconds, self._most_s)

    def time_out(self, now: float) -> None:
        """Record that an awaited draft did not come."""
        self._late_at = now

    def answer(self) -> None:
        """Record that something came."""
        self._late_at = None

    def times_out_again(self, now: float) -> bool:
        """Return whether a scouted draft that has not come is one more timeout in a row.

        The budget may be used up before a drafter that has stopped is found out.
        """
        if self._late_at is None or now - self._late_at < self._timeout_s:
            return False
        self._late_at = now
        return True


class FirstWaits:
    """The waits of one attachment, and which kinds of requests it has answered.

    A drafter on a GPU captures graphs and compiles kernels when it meets a kind of request for
    the first time. That wait says nothing of the next ones. It costs nothing if the drafter
    answers, or if it was late and has answered something else in time since: a drafter that never
    does is late for another reason.
    """

    def __init__(self, budget: WaitBudget) -> None:
        self._budget = budget
        self._kinds: set[Hashable] = set()
        # What late first requests have cost since the last answer.
        self._lent_s = 0.0

    def is_new(self, kind: Hashable) -> bool:
        """Return whether a request of this kind is the first one; the next one is not."""
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new

    def observe(self, waited_s: float, worth_s: float, *, is_first: bool = False, is_answered: bool = True) -> None:
        """Learn from a wait.

        Args:
            worth_s: the seconds that its drafts would have saved if all had been accepted.
            is_first: whether the request was the first of its kind.
        """
        lost_s = max(waited_s - worth_s, 0.0)
        if is_answered:
            self._budget.give_back(self._lent_s)
            self._lent_s = 0.0
            if is_first:
                lost_s = 0.0
        self._budget.spend(waited_s, lost_s)
        if is_first:
            self._lent_s += lost_s


class DraftTimes:
    """Estimates the seconds of a wait: for each power of two of rows, as a line over the depth.

    A draft head takes one pass for each level, an n-gram trie takes none.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def observe(self, depth: int, num_rows: int, seconds: float) -> None:
        """Learn from a wait for drafts of at most ``depth`` edges.

        A wait of three times the estimate was disturbed.
        """
        self._lines.setdefault(_exponent(num_rows), _Line()).observe(depth, seconds)

    def fade(self, num_rows: int, num_steps: int) -> None:
        """Believe a wait less after steps of so many rows.

        One disturbed wait must not end all others for good.
        """
        line = self._lines.get(_exponent(num_rows))
        if line is not None:
            line.belief *= (1 - FADING) ** num_steps

    def estimate(self, depth: int, num_rows: int) -> float:
        """Return the seconds for drafts of ``depth`` edges; 0 before the first wait.

        A number of rows that was never waited for counts as fast as it can be, but not faster than
        fewer rows. So it is tried, and then known.
        """
        exponent = _exponent(num_rows)
        fewer = [line.estimate(depth) for known, line in self._lines.items() if known <= exponent]
        if fewer:
            return max(fewer)
        more = min(self._lines, default=None)
        return 0.0 if more is None else self._lines[more].estimate(depth) / 2 ** (more - exponent)

    def most(self, depth: int, num_rows: int) -> float | None:
        """Return the most seconds that measured waits allow for such drafts.

        They are None before the first wait.

        Unlike the estimate it does not fade. Numbers of rows and depths that were never waited for
        count as slow as they can be: in proportion to fewer rows, and to a shallower tree.
        """
        exponent = _exponent(num_rows)
        bounds = (line.most(depth) * 2 ** max(exponent - known, 0) for known, line in self._lines.items())
        return min(bounds, default=None)


class _Line:
    """A line over the depth, in which older waits fade."""

    def __init__(self) -> None:
        self.belief = 1.0
        self._weight = 0.0
        self._mean_depth = 0.0
        self._mean_s = 0.0
        self._depth_variance = 0.0
        self._covariance = 0.0
        self._deepest = 1

    def observe(self, depth: int, seconds: float) -> None:
        self.belief = 1.0
        self._deepest = max(self._deepest, depth)
        if self._weight:
            seconds = min(seconds, 3 * max(self.estimate(depth), 1e-5))
        share = max(SMOOTHING, 1 / (self._weight + 1))
        self._weight = min(self._weight + 1, 1 / SMOOTHING)
        depth_off, seconds_off = depth - self._mean_depth, seconds - self._mean_s
        self._mean_depth += share * depth_off
        self._mean_s += share * seconds_off
        self._depth_variance = (1 - share) * (self._depth_variance + share * depth_off**2)
        self._covariance = (1 - share) * (self._covariance + share * depth_off * seconds_off)

    def estimate(self, depth: int) -> float:
        return self.belief * self._seconds(depth)

    def most(self, depth: int) -> float:
        measured = min(depth, self._deepest)
        return self._seconds(measured) * depth / measured

    def _seconds(self, depth: int) -> float:
        slope = max(self._covariance / self._depth_variance, 0.0) if self._depth_variance > 1e-3 else 0.0
        return max(self._mean_s + slope * (depth - self._mean_depth), 0.0)


def _exponent(num_rows: int) -> int:
    """Return the exponent of the smallest power of two that is at least ``num_rows``."""
    return max(num_rows - 1, 0).bit_length()
