"""Keep the target's hidden states until a sequence's drafters have been sent them.

Hidden states stay on the target's device until somebody wants them on the host. A drafter on the
same GPU never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.drafting import Float32

# Most positions to keep. A drafter that is sent more tokens at once gets only the last hidden
# states.
MAX_ROWS = 2048


class PassHiddenStates:
    """The kept hidden states of one pass. Fetch them before the next pass overwrites the buffer.

    Attributes:
        places: the buffer row of each kept row.
        on_device: the buffer, [rows of the pass, width]. None once another pass may write to it.
    """

    def __init__(self, places: list[int], on_device: torch.Tensor, fetch: Callable[[list[int]], Float32]) -> None:
        """``fetch`` copies rows of the buffer to the host."""
        self.places = places
        self.on_device: torch.Tensor | None = on_device
        self.width = on_device.shape[1]
        self._fetch = fetch
        self._fetched: Float32 | None = None

    def fetched(self) -> Float32:
        """Return the kept rows on the host, [len(places), width]; copy them on the first call."""
        if self._fetched is None:
            assert self.on_device is not None, "hidden states that nobody fetched in time"
            self._fetched = self._fetch(self.places)
        return self._fetched

    def retire(self) -> None:
        """Drop the buffer, because the next pass overwrites it."""
        self.on_device = None


@dataclass(frozen=True, slots=True)
class HiddenSlice:
    """Rows [start, stop) of a pass's kept rows, with all columns or the chosen ones."""

    source: PassHiddenStates
    start: int
    stop: int
    columns: slice | NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, low: int, high: int) -> HiddenSlice:
        return HiddenSlice(self.source, self.start + low, self.start + high, self.columns)

    def values(self) -> Float32:
        """Return the rows on the host, [len(self), width]: a view unless columns are indexed."""
        rows: Float32 = self.source.fetched()[self.start : self.stop]
        return rows if self.columns is None else rows[:, self.columns]

    @property
    def places(self) -> list[int]:
        """Return the rows of the pass's buffer that this slice covers."""
        return self.source.places[self.start : self.stop]


class HiddenStates:
    """Hidden states of positions [``start``, ``end``), of one width. A new width drops the old."""

    def __init__(self) -> None:
        self._parts: list[HiddenSlice] = []
        self.start = 0
        self.end = 0

    def append(self, position: int, rows: HiddenSlice) -> None:
        """Append rows, the first of position ``position``. A gap drops everything before it."""
        if not self._parts or position > self.end or self._parts[-1].source.width != rows.source.width:
            self._parts, self.start, self.end = [], position, position
        # Skip positions that ran again: their rows are here already.
        rows = rows.part(min(self.end - position, len(rows)), len(rows))
        if len(rows):
            self._parts.append(rows)
            self.end += len(rows)
            self.forget_before(self.end - MAX_ROWS)

    def rows(self, start: int, end: int) -> list[HiddenSlice]:
        """Return the kept rows of positions [start, end), in parts.

        The result is empty if ``end`` is not reached yet; it has no gap before ``end``.
        """
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
        """Drop the rows of positions before ``position``."""
        while self._parts and self.start < position:
            count = min(len(self._parts[0]), position - self.start)
            self.start += count
            if count == len(self._parts[0]):
                self._parts.pop(0)
            else:
                self._parts[0] = self._parts[0].part(count, len(self._parts[0]))

    def fetch(self) -> None:
        """Copy the remaining rows to the host, before the next pass begins."""
        for part in self._parts:
            part.source.fetched()

    def clear(self) -> None:
        """Drop everything. The next rows may have any position."""
        self._parts, self.start, self.end = [], 0, 0


def joined(parts: Sequence[Float32]) -> Float32:
    """Concatenate parts: a view if they lie in sequence in one array, as one step's rows do."""
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
    """Return the columns of layers ``wanted`` in rows that hold the layers ``captured``.

    Returns a slice if the layers are adjacent, and None if ``wanted`` equals ``captured``.
    """
    if wanted == captured:
        return None
    places = [captured.index(layer) for layer in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0] * hidden_size, (places[0] + len(places)) * hidden_size)
    return np.concatenate([np.arange(place * hidden_size, (place + 1) * hidden_size) for place in places])
