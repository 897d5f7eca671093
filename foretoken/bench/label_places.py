"""Find places for the labels of a picture's points where they cover nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Average width of a character as a part of the font size; wide enough for digits and small letters.
CHARACTER = 0.6
# Distances of a label from its point; the first free place wins.
GAPS = (7.0, 16.0, 28.0, 42.0, 58.0)
# Distance between two points of a line that labels avoid.
LINE_STEP = 6.0


class Box(NamedTuple):
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Return whether the two share more than an edge."""
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.bottom <= other.top or other.bottom <= self.top)

    def holds(self, other: Box) -> bool:
        """Return whether the other one lies within this one."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is."""
    return CHARACTER * size * len(text)


def around(x: float, y: float, radius: float) -> Box:
    """Return the box of a dot."""
    return Box(x - radius, y - radius, x + radius, y + radius)


def along(points: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """Yield small boxes that cover the line through the points."""
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        count = max(1, int(max(abs(next_x - x), abs(next_y - y)) / LINE_STEP))
        for number in range(count):
            part = number / count
            yield around(x + (next_x - x) * part, y + (next_y - y) * part, 1.5)


def place(
    text: str,
    point: tuple[float, float],
    size: float,
    room: Box,
    taken: Sequence[Box],
    avoided: Sequence[Box],
    others: Sequence[tuple[float, float]] = (),
) -> Box | None:
    """Return where a label of a point goes; None if it would cover what is taken.

    It stays within ``room``. If it can, it is off lines, which are ``avoided``, and nearer to its
    own point than to ``others``.
    """

    def faults(box: Box) -> int:
        middle = ((box.left + box.right) / 2, (box.top + box.bottom) / 2)
        own = math.dist(middle, point)
        return any(map(box.overlaps, avoided)) + 2 * any(math.dist(middle, other) < own for other in others)

    free = [
        box
        for box in _places(point, text_width(text, size), size)
        if room.holds(box) and not any(map(box.overlaps, taken))
    ]
    return min(free, key=faults, default=None)


def _places(point: tuple[float, float], width: float, height: float) -> Iterator[Box]:
    x, y = point
    for gap in GAPS:
        for top in (y - gap - height, y + gap, y - height / 2):
            for left in (x - width / 2, x + gap, x - gap - width):
                # The middle of both is the point itself.
                if top != y - height / 2 or left != x - width / 2:
                    yield Box(left, top, left + width, top + height)
