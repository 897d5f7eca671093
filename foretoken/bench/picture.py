"""Draw lines through measured points as SVG, such as throughput against the speed of one user."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretoken.bench.label_places import Box, along, around, place, text_width

# Of the picture without its legend, which is as wide as its names.
PLOT_WIDTH, HEIGHT = 550, 520
LEFT, TOP, BOTTOM = 88, 44, 60
LEAST_LEGEND = 182
# Of lines that have no colour of their own.
COLOURS = ("#2563eb", "#dd6b20", "#553c9a", "#2f855a")
TEXT, GRID = "#1f2933", "#e4e7eb"
NUM_TICKS = 5
TEXT_SIZE, LABEL_SIZE = 13, 10
LINE_WIDTH = 2.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of a line, with what is written beside it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines by name, and what they show.

    Attributes:
        x_title: the name of the x axis, with its unit; ``y_title`` likewise.
        colours: by a line's name; may lack names.
        places: names of evenly spaced places on the x axis, which the marks' ``x`` count from 0;
            empty: the axis is a scale of numbers from 0.
        widths: of lines, by name; a wide one shows under a narrow one. May lack names.
    """

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Sequence[Mark]]
    colours: Mapping[str, str]
    places: Sequence[str] = ()
    widths: Mapping[str, float] = field(default_factory=dict)

    def svg(self) -> str:
        """Return the picture as SVG text."""
        marks = [mark for line in self.lines.values() for mark in line]
        ys = nice_ticks(max(mark.y for mark in marks))
        # By the x of a mark; half a place stays free at both ends.
        xs: dict[float, str]
        if self.places:
            xs, least, most = (
                {float(index): name for index, name in enumerate(self.places)},
                -0.5,
                len(self.places) - 0.5,
            )
        else:
            ticks = nice_ticks(max(mark.x for mark in marks))
            xs, least, most = {tick: f"{tick:g}" for tick in ticks}, 0.0, ticks[-1]
        right, bottom = LEFT + PLOT_WIDTH, HEIGHT - BOTTOM
        legend = 44 + max(text_width(name, TEXT_SIZE) for name in self.lines)
        parts = svg_start(self.title, round(right + max(LEAST_LEGEND, legend)), HEIGHT)
        parts.append(text_at(LEFT, 26, self.title, weight="600"))
        for value, name in xs.items():
            x = LEFT + PLOT_WIDTH * (value - least) / (most - least)
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
            parts.append(text_at(x, bottom + 20, name, anchor="middle"))
        for tick in ys:
            y = _y(tick, ys[-1])
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
            parts.append(text_at(LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
        parts.append(text_at((LEFT + right) / 2, HEIGHT - 16, self.x_title, anchor="middle"))
        parts.append(text_at(20, (TOP + bottom) / 2, self.y_title, anchor="middle", is_upright=True))
        points = {
            name: [(LEFT + PLOT_WIDTH * (mark.x - least) / (most - least), _y(mark.y, ys[-1])) for mark in line]
            for name, line in self.lines.items()
        }
        for index, name in enumerate(self.lines):
            colour = self.colours.get(name, COLOURS[index % len(COLOURS)])
            parts += _line(points[name], colour, self.widths.get(name, LINE_WIDTH))
            y = TOP + 14 + 20 * index
            parts.append(f'<circle cx="{right + 20}" cy="{y - 4}" r="5" fill="{colour}"/>')
            parts.append(text_at(right + 32, y, name))
        parts += self._labels(points, Box(LEFT - 6, TOP - 8, right, bottom))
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _labels(self, points: Mapping[str, Sequence[tuple[float, float]]], room: Box) -> list[str]:
        """Return the texts of all marks, except where there is no room for one."""
        taken = [
            around(x, y, _radius(self.widths.get(name, LINE_WIDTH))) for name, line in points.items() for x, y in line
        ]
        lines = [box for line in points.values() for box in along(line)]
        dots = [point for line in points.values() for point in line]
        parts = []
        for name, marks in self.lines.items():
            for mark, point in zip(marks, points[name], strict=True):
                box = place(mark.text, point, LABEL_SIZE, room, taken, lines, dots) if mark.text else None
                if box is not None:
                    taken.append(box)
                    middle = (box.left + box.right) / 2
                    parts.append(text_at(middle, box.bottom - 2, mark.text, anchor="middle", size=LABEL_SIZE))
        return parts


def nice_ticks(most: float) -> list[float]:
    """Return about NUM_TICKS round numbers from 0 up to at least ``most``.

    0.0 counts as 1.
    """
    most = most or 1.0
    rough = most / NUM_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    return [step * number for number in range(math.ceil(most / step) + 1)]


def svg_start(title: str, width: int, height: int) -> list[str]:
    """Return the first lines of a picture: its size, title and background."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]


def text_at(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "400",
    size: int = TEXT_SIZE,
    is_upright: bool = False,
) -> str:
    """Return a text element; ``is_upright``: it reads from below."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    if is_upright:
        place += f' transform="rotate(-90 {x:.1f} {y:.1f})"'
    return f'<text {place} font-size="{size}" fill="{TEXT}" font-weight="{weight}">{html.escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_radius(width):g}" fill="{colour}"/>' for x, y in points),
    ]


def _radius(width: float) -> float:
    return 3 + width / 2


def _y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most
