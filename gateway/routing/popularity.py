"""Estimate which share of recent requests begins with a prefix."""

from __future__ import annotations

import math

# Requests of one period. Shares are of the present period and the one before it.
LEAST_PERIOD = 1024
# Standard deviations below what was counted.
CAUTION = 3


class Popularity:
    """Counts prefixes of the last one to two periods of requests."""

    def __init__(self, period: int = LEAST_PERIOD) -> None:
        self.period = period
        self._counts: dict[int, int] = {}
        self._last_counts: dict[int, int] = {}
        self._num_requests = 0
        self._last_num_requests = 0

    def begin(self) -> None:
        """Count one more request; ``seen`` follows for its prefixes."""
        if self._num_requests >= self.period:
            self._last_counts, self._counts = self._counts, {}
            self._last_num_requests, self._num_requests = self._num_requests, 0
        self._num_requests += 1

    def seen(self, key: int) -> float:
        """Count a prefix; return the share of requests that have it, at most 1.

        It is three standard deviations below the observed share: fewer than ten requests prove
        nothing.
        """
        count = self._counts[key] = self._counts.get(key, 0) + 1
        count += self._last_counts.get(key, 0)
        return (count - CAUTION * math.sqrt(count)) / (self._num_requests + self._last_num_requests)
