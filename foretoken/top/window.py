"""The readings of the last seconds."""

from __future__ import annotations

import itertools
from collections import deque

from foretoken.top.reading import Reading, Series, increases


class Window:
    """Keeps the readings of one gateway that are at most ``seconds`` older than the last."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        self._readings.append(reading)
        while self._readings[0].at < reading.at - self._seconds:
            self._readings.popleft()

    @property
    def last(self) -> Reading:
        """The latest reading. Raises IndexError before the first."""
        return self._readings[-1]

    @property
    def seconds(self) -> float:
        """Seconds from the first reading to the last; 0 for one reading."""
        return self.last.at - self._readings[0].at

    def increases(self) -> dict[Series, float]:
        """Return by how much each sample rose in these seconds, restarts included."""
        sums: dict[Series, float] = {}
        for before, after in itertools.pairwise(self._readings):
            for series, rise in increases(before, after).items():
                sums[series] = sums.get(series, 0.0) + rise
        return sums
