"""The target's hidden rows of one sequence that drafters have not been told yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from foretoken.drafting import Float32

# Rows kept at most: a drafter that is told of more tokens at once gets features of the last ones only.
MAX_ROWS = 2048


class FeatureWindow:
    """Rows of consecutive positions, [``start``, ``end``). All of one width; another one starts it anew."""

    def __init__(self) -> None:
        self._parts: list[Float32] = []
        self.start = 0
        self.end = 0

    def append(self, position: int, rows: Float32) -> None:
        """Take over ``rows`` [n, width] of the positions from ``position`` on. A gap forgets what is before it."""
        if not self._parts or position > self.end or self._parts[-1].shape[1] != rows.shape[1]:
            self._parts, self.start, self.end = [], position, position
        # Positions that were run again are known already.
        rows = rows[self.end - position :]
        if len(rows):
            self._parts.append(rows)
            self.end += len(rows)
            self.forget_before(self.end - MAX_ROWS)

    def rows(self, start: int, end: int) -> list[Float32]:
        """What is there of the positions [start, end) without a gap before ``end``, in parts."""
        if end > self.end:
            return []
        start = min(max(start, self.start), end)
        parts = []
        at = self.start
        for part in self._parts:
            low, high = max(start - at, 0), min(end - at, len(part))
            if low < high:
                parts.append(part[low:high])
            at += len(part)
        return parts

    def forget_before(self, position: int) -> None:
        """Drop rows that nobody will ask for."""
        while self._parts and self.start < position:
            count = min(len(self._parts[0]), position - self.start)
            self.start += count
            if count == len(self._parts[0]):
                self._parts.pop(0)
            else:
                self._parts[0] = self._parts[0][count:]

    def clear(self) -> None:
        """Forget all: the next rows may be of any position."""
        self._parts, self.start, self.end = [], 0, 0


def joined(parts: Sequence[Float32]) -> Float32:
    """The rows of all parts; a view where they lie one behind the other in one array, as those of one step do."""
    whole = parts[0].base
    if not isinstance(whole, np.ndarray) or whole.dtype != np.float32 or not whole.flags.c_contiguous:
        return np.concatenate(parts)
    begin = whole.__array_interface__["data"][0]
    size = whole.strides[0]
    first = at = (parts[0].__array_interface__["data"][0] - begin) // max(size, 1)
    for part in parts:
        is_next = part.base is whole and part.__array_interface__["data"][0] == begin + at * size
        if not is_next or part.shape[1:] != whole.shape[1:]:
            return np.concatenate(parts)
        at += len(part)
    rows: Float32 = whole[first:at]
    return rows


@lru_cache(maxsize=64)
def columns_of(wanted: tuple[int, ...], captured: tuple[int, ...], hidden_size: int) -> slice | np.ndarray:
    """Where the features ``wanted`` stand in rows of the features ``captured``: a slice where they lie side by side."""
    places = [captured.index(feature) for feature in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0] * hidden_size, (places[0] + len(places)) * hidden_size)
    return np.concatenate([np.arange(place * hidden_size, (place + 1) * hidden_size) for place in places])
