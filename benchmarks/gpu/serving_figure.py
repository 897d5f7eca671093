"""Draw one workload: throughput against the speed of one user, a line for each arm."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 820, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 44, 60
COLOURS = {
    "plain": "#7b8794",
    "auto": "#2563eb",
    "auto-ngram": "#0ea5e9",
    "fixed-1-1-2": "#d6bcfa",
    "fixed-3-1-4": "#b794f4",
    "fixed-5-1-6": "#805ad5",
    "fixed-5-8-32": "#553c9a",
    "fixed-ngram-5-1-6": "#805ad5",
    "vllm-plain": "#f6ad55",
    "vllm-eagle3-3": "#dd6b20",
    "vllm-eagle3-5": "#c53030",
}
TEXT, GRID = "#1f2933", "#e4e7eb"
NUM_TICKS = 5


def draw(content: dict[str, Any]) -> str:
    """Return the picture of a result's rows as SVG text."""
    rows = content["rows"]
    xs, ys = (nice_ticks(max(row[key] for row in rows)) for key in ("user_tokens_per_s", "tokens_per_s"))
    title = f"{content['workload']}: output tok/s of the server against tok/s of one user"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="system-ui, sans-serif" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 26, f"{title} ({content['device']['gpu']})", weight="600"),
    ]
    for tick in xs:
        x = _x(tick, xs[-1])
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 20, f"{tick:g}", anchor="middle"))
    for tick in ys:
        y = _y(tick, ys[-1])
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "tok/s of one user (1 / TPOT p50)", anchor="middle"))
    for index, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        found = sorted((row for row in rows if row["arm"] == arm), key=lambda row: (row["concurrency"], row["rate"]))
        parts += _line(found, COLOURS.get(arm, TEXT), xs[-1], ys[-1])
        y = TOP + 14 + 20 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{y - 4}" r="5" fill="{COLOURS.get(arm, TEXT)}"/>')
        parts.append(_text(WIDTH - RIGHT + 32, y, arm))
    return "\n".join([*parts, "</svg>"]) + "\n"


def nice_ticks(most: float) -> list[float]:
    """Return round numbers from 0 up to at least ``most`` (0.0 counts as 1), about NUM_TICKS of them."""
    most = most or 1.0
    rough = most / NUM_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    return [step * number for number in range(math.ceil(most / step) + 1)]


def _line(rows: Sequence[dict[str, Any]], colour: str, most_x: float, most_y: float) -> list[str]:
    """Return an arm's line, with its points named by their loads."""
    places = [(_x(row["user_tokens_per_s"], most_x), _y(row["tokens_per_s"], most_y)) for row in rows]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for row, (x, y) in zip(rows, places, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 6, y - 6, row["point"], size=10))
    return parts


def _x(value: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / most


def _y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / most


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{TEXT}" font-weight="{weight}">{html.escape(text)}</text>'
