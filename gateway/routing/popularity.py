"""Estimate which share of recent requests begins with a prefix."""

from __future__ import annotations

import math

# Standard deviations below what was counted.
CAUTION = 2


class Popularity:
    """Counts prefixes of the last one to two periods of requests."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last_counts: dict[int, int] = {}
        self._num_requests = 0
        self._last_num_requests = 0

    def begin(self, period: int) -> bool:
        """Count one more request; ``seen`` follows for its prefixes.

        Returns whether a new period of ``period`` requests began.
        """
        is_over = self._num_requests >= period
        if is_over:
            self._last_counts, self._counts = self._counts, {}
            self._last_num_requests, self._num_requests = self._num_requests, 0
        self._num_requests += 1
        return is_over

    def knows(self, key: int) -> bool:
        """Return whether a prefix was seen in this period or the one before it."""
        return key in self._counts or key in self._last_counts

    def seen(self, key: int) -> float:
        """Count a prefix; return the share of requests that have it, at most 1.

        It is two standard deviations below the observed share: fewer than five requests prove
        nothing.
        """
        count = self._counts[key] = self._counts.get(key, 0) + 1
        count += self._last_counts.get(key, 0)
        return (count - CAUTION * math.sqrt(count)) / (self._num_requests + self._last_num_requests)
