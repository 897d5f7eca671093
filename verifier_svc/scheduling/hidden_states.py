"""The target's hidden states of one sequence that its drafters have not been sent yet.

They stay where the target computed them until somebody wants them on the host. A drafter on the same GPU never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.drafting import Float32

# Positions kept at most: a drafter that is sent more tokens at once gets hidden states of the last ones only.
MAX_ROWS = 2048


class PassHiddenStates:
    """The hidden states kept of one pass. The next pass overwrites its buffer, so fetch them before that.

    Attributes:
        places: for each kept row its row in the buffer.
        on_device: the buffer, [rows of the pass, width]. None as soon as another pass may write to it.
    """

    def __init__(self, places: list[int], on_device: torch.Tensor, fetch: Callable[[list[int]], Float32]) -> None:
        """``fetch`` copies rows of the buffer to the host."""
        self.places = places
        self.on_device: torch.Tensor | None = on_device
        self.width = on_device.shape[1]
        self._fetch = fetch
        self._fetched: Float32 | None = None

    def fetched(self) -> Float32:
        """Return all kept rows on the host, [len(places), width]. Whoever wants some rows is seldom alone."""
        if self._fetched is None:
            assert self.on_device is not None, "hidden states that nobody fetched in time"
            self._fetched = self._fetch(self.places)
        return self._fetched

    def retire(self) -> None:
        """Let go of the buffer, which the next pass overwrites."""
        self.on_device = None


@dataclass(frozen=True, slots=True)
class HiddenSlice:
    """Rows [start, stop) of the kept ones of a pass, with all their columns or only some."""

    source: PassHiddenStates
    start: int
    stop: int
    columns: slice | NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, low: int, high: int) -> HiddenSlice:
        return HiddenSlice(self.source, self.start + low, self.start + high, self.columns)

    def values(self) -> Float32:
        """Return the rows on the host: a view of what was fetched."""
        rows: Float32 = self.source.fetched()[self.start : self.stop]
        return rows if self.columns is None else rows[:, self.columns]

    @property
    def places(self) -> list[int]:
        """Their rows in the pass's buffer."""
        return self.source.places[self.start : self.stop]


class HiddenStates:
    """Hidden states of the positions [``start``, ``end``), all of one width. Another width starts anew."""

    def __init__(self) -> None:
        self._parts: list[HiddenSlice] = []
        self.start = 0
        self.end = 0

    def append(self, position: int, rows: HiddenSlice) -> None:
        """Append the rows of the positions from ``position`` on. A gap drops everything before it."""
        if not self._parts or position > self.end or self._parts[-1].source.width != rows.source.width:
            self._parts, self.start, self.end = [], position, position
        # Positions that ran again are here already.
        rows = rows.part(min(self.end - position, len(rows)), len(rows))
        if len(rows):
            self._parts.append(rows)
            self.end += len(rows)
            self.forget_before(self.end - MAX_ROWS)

    def rows(self, start: int, end: int) -> list[HiddenSlice]:
        """Return what is here of the positions [start, end) without a gap before ``end``, in parts."""
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
        """Drop what nobody will ask for."""
        while self._parts and self.start < position:
            count = min(len(self._parts[0]), position - self.start)
            self.start += count
            if count == len(self._parts[0]):
                self._parts.pop(0)
            else:
                self._parts[0] = self._parts[0].part(count, len(self._parts[0]))

    def fetch(self) -> None:
        """Copy to the host what is left: the next pass is about to begin."""
        for part in self._parts:
            part.source.fetched()

    def clear(self) -> None:
        """Drop everything. The next rows may be of any position."""
        self._parts, self.start, self.end = [], 0, 0


def joined(parts: Sequence[Float32]) -> Float32:
    """Concatenate parts. The result is a view if they follow each other in one array, as the rows of one step do."""
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
    """Return the columns of the layers ``wanted`` in rows that have the layers ``captured``.

    A slice if the layers lie side by side, None if both are the same.
    """
    if wanted == captured:
        return None
    places = [captured.index(layer) for layer in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0] * hidden_size, (places[0] + len(places)) * hidden_size)
    return np.concatenate([np.arange(place * hidden_size, (place + 1) * hidden_size) for place in places])
