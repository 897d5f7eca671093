"""How long one drafter's drafts are waited for, by their depth: a head takes one pass a level, an n-gram trie none."""

from __future__ import annotations

# Weight of a new wait.
SMOOTHING = 0.05


class DraftTimes:
    """Seconds of a wait as a line over the depth, fitted with older waits fading."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_depth = 0.0
        self._mean_s = 0.0
        self._depth_variance = 0.0
        self._covariance = 0.0

    def observe(self, depth: int, seconds: float) -> None:
        """Learn from a wait for drafts of at most ``depth`` edges. One that took thrice as long was disturbed."""
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
        """Seconds for drafts of ``depth`` edges; 0 before the first wait."""
        slope = max(self._covariance / self._depth_variance, 0.0) if self._depth_variance > 1e-3 else 0.0
        return max(self._mean_s + slope * (depth - self._mean_depth), 0.0)
