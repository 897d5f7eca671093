"""Draw throughput against the speed of one user as SVG, a line for each server or arm."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 820, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 44, 60
# Of lines that have no colour of their own.
COLOURS = ("#2563eb", "#dd6b20", "#553c9a", "#2f855a")
TEXT, GRID = "#1f2933", "#e4e7eb"
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of a line, with what is written beside it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A title, the name of the x axis, and lines by name. ``colours`` may lack names."""

    title: str
    x_title: str
    lines: Mapping[str, Sequence[Mark]]
    colours: Mapping[str, str]

    def svg(self) -> str:
        """Return the picture as SVG text."""
        marks = [mark for line in self.lines.values() for mark in line]
        xs, ys = nice_ticks(max(mark.x for mark in marks)), nice_ticks(max(mark.y for mark in marks))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            ' font-family="system-ui, sans-serif" role="img">',
            f"<title>{html.escape(self.title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
            _text(LEFT, 26, self.title, weight="600"),
        ]
        for tick in xs:
            x = _x(tick, xs[-1])
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>')
            parts.append(_text(x, HEIGHT - BOTTOM + 20, f"{tick:g}", anchor="middle"))
        for tick in ys:
            y = _y(tick, ys[-1])
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
            parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, self.x_title, anchor="middle"))
        for index, (name, line) in enumerate(self.lines.items()):
            colour = self.colours.get(name, COLOURS[index % len(COLOURS)])
            parts += _line(line, colour, xs[-1], ys[-1])
            y = TOP + 14 + 20 * index
            parts.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{y - 4}" r="5" fill="{colour}"/>')
            parts.append(_text(WIDTH - RIGHT + 32, y, name))
        return "\n".join([*parts, "</svg>"]) + "\n"


def nice_ticks(most: float) -> list[float]:
    """Return about NUM_TICKS round numbers from 0 up to at least ``most``.

    0.0 counts as 1.
    """
    most = most or 1.0
    rough = most / NUM_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    return [step * number for number in range(math.ceil(most / step) + 1)]


def _line(marks: Sequence[Mark], colour: str, most_x: float, most_y: float) -> list[str]:
    """Return a line, with its points named."""
    places = [(_x(mark.x, most_x), _y(mark.y, most_y)) for mark in marks]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for mark, (x, y) in zip(marks, places, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 6, y - 6, mark.text, size=10))
    return parts


def _x(value: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / most


def _y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{TEXT}" font-weight="{weight}">{html.escape(text)}</text>'
