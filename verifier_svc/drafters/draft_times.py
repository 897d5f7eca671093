"""How long one drafter is waited for, by depth and rows: a head takes one pass a level, an n-gram trie none."""

from __future__ import annotations

# Weight of a new wait.
SMOOTHING = 0.05
# Share that a step of so many rows takes off what is believed of a wait for them: after 1,400 without one it is half.
FADING = 0.0005


class DraftTimes:
    """Seconds of a wait, for each power of two of rows as a line over the depth."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def observe(self, depth: int, num_rows: int, seconds: float) -> None:
        """Learn from a wait for drafts of at most ``depth`` edges. One that took thrice as long was disturbed."""
        self._lines.setdefault(_exponent(num_rows), _Line()).observe(depth, seconds)

    def fade(self, num_rows: int, num_steps: int) -> None:
        """Steps of so many rows went by: a wait that was disturbed must not end all others for good."""
        line = self._lines.get(_exponent(num_rows))
        if line is not None:
            line.belief *= (1 - FADING) ** num_steps

    def estimate(self, depth: int, num_rows: int) -> float:
        """Seconds for drafts of ``depth`` edges; 0 before the first wait.

        A number of rows that was never waited for is believed to be as fast as it may be, no faster than fewer rows:
        then it is tried, and known.
        """
        exponent = _exponent(num_rows)
        fewer = [line.estimate(depth) for known, line in self._lines.items() if known <= exponent]
        if fewer:
            return max(fewer)
        more = min(self._lines, default=None)
        return 0.0 if more is None else self._lines[more].estimate(depth) / 2 ** (more - exponent)


class _Line:
    """Fitted with older waits fading."""

    def __init__(self) -> None:
        self.belief = 1.0
        self._weight = 0.0
        self._mean_depth = 0.0
        self._mean_s = 0.0
        self._depth_variance = 0.0
        self._covariance = 0.0

    def observe(self, depth: int, seconds: float) -> None:
        self.belief = 1.0
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
        slope = max(self._covariance / self._depth_variance, 0.0) if self._depth_variance > 1e-3 else 0.0
        return self.belief * max(self._mean_s + slope * (depth - self._mean_depth), 0.0)


def _exponent(num_rows: int) -> int:
    """Of the least power of two that is not below so many rows."""
    return max(num_rows - 1, 0).bit_length()
