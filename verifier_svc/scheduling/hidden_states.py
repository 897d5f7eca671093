"""The target's hidden rows of one sequence that drafters have not been told yet.

They stay where the target computed them until somebody wants them on the host: a drafter on the same GPU never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.drafting import Float32

# Rows kept at most: a drafter that is told of more tokens at once gets features of the last ones only.
MAX_ROWS = 2048


class PassRows:
    """The hidden rows that are kept of one pass. The pass's buffer has them until the next one: whoever wants them
    later fetches them before.

    Attributes:
        places: of each its row in the buffer.
        on_device: [rows of the pass, width]; the buffer. None once it may hold another pass's.
    """

    def __init__(self, places: list[int], on_device: torch.Tensor, fetch: Callable[[list[int]], Float32]) -> None:
        """``fetch``: rows of the buffer, on the host."""
        self.places = places
        self.on_device: torch.Tensor | None = on_device
        self.width = on_device.shape[1]
        self._fetch = fetch
        self._fetched: Float32 | None = None

    def fetched(self) -> Float32:
        """All of them, [len(places), width]: whoever wants some is seldom alone."""
        if self._fetched is None:
            assert self.on_device is not None, "hidden rows that nobody fetched in time"
            self._fetched = self._fetch(self.places)
        return self._fetched

    def retire(self) -> None:
        """The buffer is about to be written to."""
        self.on_device = None


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows [start, stop) of those of a pass; of each the ``columns``, or all."""

    source: PassRows
    start: int
    stop: int
    columns: slice | NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, low: int, high: int) -> FeatureRows:
        return FeatureRows(self.source, self.start + low, self.start + high, self.columns)

    def values(self) -> Float32:
        """On the host: a view of what was fetched."""
        rows: Float32 = self.source.fetched()[self.start : self.stop]
        return rows if self.columns is None else rows[:, self.columns]

    @property
    def places(self) -> list[int]:
        """In the pass's buffer."""
        return self.source.places[self.start : self.stop]


class FeatureWindow:
    """Rows of consecutive positions, [``start``, ``end``). All of one width; another one starts it anew."""

    def __init__(self) -> None:
        self._parts: list[FeatureRows] = []
        self.start = 0
        self.end = 0

    def append(self, position: int, rows: FeatureRows) -> None:
        """Take over ``rows`` of the positions from ``position`` on. A gap forgets what is before it."""
        if not self._parts or position > self.end or self._parts[-1].source.width != rows.source.width:
            self._parts, self.start, self.end = [], position, position
        # Positions that were run again are known already.
        rows = rows.part(min(self.end - position, len(rows)), len(rows))
        if len(rows):
            self._parts.append(rows)
            self.end += len(rows)
            self.forget_before(self.end - MAX_ROWS)

    def rows(self, start: int, end: int) -> list[FeatureRows]:
        """What is there of the positions [start, end) without a gap before ``end``, in parts."""
        if end > self.end:
            return []
        start = min(max(start, self.start), end)
        parts = []
        at = self.start
        for part in self._parts:
            low, high = max(start - at, 0), min(end - at, len(part))
            if low < high:
                parts.append(part.part(low, high))
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
                self._parts[0] = self._parts[0].part(count, len(self._parts[0]))

    def fetch(self) -> None:
        """Have on the host what is left: the next pass is about to begin."""
        for part in self._parts:
            part.source.fetched()

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
def columns_of(wanted: tuple[int, ...], captured: tuple[int, ...], hidden_size: int) -> slice | NDArray[np.intp] | None:
    """Where the features ``wanted`` stand in rows of the features ``captured``: a slice where they lie side by side;
    None: they are these rows."""
    if wanted == captured:
        return None
    places = [captured.index(feature) for feature in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0] * hidden_size, (places[0] + len(places)) * hidden_size)
    return np.concatenate([np.arange(place * hidden_size, (place + 1) * hidden_size) for place in places])
