"""Draw candidates' speeds at one number of requests as horizontal bars, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foretoken.bench.label_places import text_width
from foretoken.bench.picture import GRID, TEXT_SIZE, nice_ticks, svg_start, text_at

TOP, BOTTOM, ROW, THICKNESS = 52, 56, 28, 18
# From the axis to the longest bar's end, and after it, where the speeds stand.
LENGTH, AFTER = 420, 210


class Bar(NamedTuple):
    """One candidate's speed, and what is written after its bar."""

    name: str
    value: float
    text: str
    colour: str
    is_bold: bool = False


def draw_bars(title: str, x_title: str, bars: Sequence[Bar]) -> str:
    """Return the picture as SVG text: a row for each bar, in the order given."""
    ticks = nice_ticks(max(bar.value for bar in bars))
    left = round(30 + max(text_width(bar.name, TEXT_SIZE) for bar in bars))
    height = TOP + ROW * len(bars) + BOTTOM
    bottom = height - BOTTOM
    parts = svg_start(title, left + LENGTH + AFTER, height)
    parts.append(text_at(16, 26, title, weight="600"))
    for tick in ticks:
        x = left + LENGTH * tick / ticks[-1]
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
        parts.append(text_at(x, bottom + 20, f"{tick:g}", anchor="middle"))
    parts.append(text_at(left + LENGTH / 2, height - 14, x_title, anchor="middle"))
    for index, bar in enumerate(bars):
        y = TOP + ROW * index + (ROW - THICKNESS) / 2
        length = LENGTH * bar.value / ticks[-1]
        weight = "600" if bar.is_bold else "400"
        parts.append(f'<rect x="{left}" y="{y:g}" width="{length:.1f}" height="{THICKNESS}" fill="{bar.colour}"/>')
        parts.append(text_at(left - 8, y + 14, bar.name, anchor="end", weight=weight))
        parts.append(text_at(left + length + 8, y + 14, bar.text, weight=weight))
    return "\n".join([*parts, "</svg>"]) + "\n"
