"""Draw the README's picture from the committed measurements.

    python -m benchmarks.headline

Two panels show the decode speed of one stream, plain and with drafts: the widened demo model on a
GPU (``benchmarks.gpu.speedup``) and the demo model on a CPU (``benchmarks.run``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
GPU_RESULT = ROOT / "benchmarks/gpu/results/other/speedup-2026-11-22.json"
CPU_RESULT = ROOT / "benchmarks/results/cpu.json"
PICTURE = ROOT / "docs/images/headline.svg"

WIDTH, PANEL_HEIGHT, MARGIN = 760, 118, 16
# Where bars begin, and the length of the longest one.
BAR_LEFT, BAR_LENGTH, BAR_HEIGHT = 190, 420, 26
GREY, BLUE, TEXT = "#9aa5b1", "#2563eb", "#1f2933"


class Panel(NamedTuple):
    """One machine's pair of bars, in tokens a second of one stream."""

    title: str
    plain: float
    drafter: str
    drafted: float


def panels() -> list[Panel]:
    """Read both measurements. Raises OSError, or KeyError for a file of another form."""
    gpu: dict[str, Any] = json.loads(GPU_RESULT.read_text())
    cpu: dict[str, Any] = json.loads(CPU_RESULT.read_text())
    cold = {row["name"]: row["tokens_per_s"] for row in cpu["cold"]}
    return [
        Panel(
            f"{gpu['device']['gpu']}, Llama-3.1-8B shape, {gpu['dtype']}",
            gpu["plain_tokens_per_s"],
            f"EAGLE-3, tree {gpu['tree']}",
            gpu["drafted_tokens_per_s"],
        ),
        Panel("2 CPU cores, bundled demo model, float32", cold["plain"], "n-gram", cold["n-gram"]),
    ]


def draw(found: list[Panel]) -> str:
    """Return the picture as SVG text."""
    height = MARGIN + len(found) * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif" role="img">',
        "<title>Tokens a second of one stream, plain and with drafts</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(found):
        parts += _panel(panel, MARGIN + index * PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int) -> list[str]:
    lines = [_text(MARGIN, top + 16, f"{panel.title}: tokens a second, one stream", weight="600")]
    scale = BAR_LENGTH / panel.drafted
    for row, (name, rate, colour) in enumerate(
        [("plain decode", panel.plain, GREY), (panel.drafter, panel.drafted, BLUE)]
    ):
        y = top + 28 + row * (BAR_HEIGHT + 8)
        lines.append(_text(BAR_LEFT - 10, y + 18, name, anchor="end"))
        lines.append(
            f'<rect x="{BAR_LEFT}" y="{y}" width="{rate * scale:.1f}" height="{BAR_HEIGHT}" rx="3" fill="{colour}"/>'
        )
        speedup = f"{rate:.0f}" if row == 0 else f"{rate:.0f}  ({rate / panel.plain:.1f}x)"
        lines.append(_text(round(BAR_LEFT + rate * scale + 8), y + 18, speedup, weight="600"))
    return lines


def _text(x: int, y: int, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {place} font-size="14" fill="{TEXT}" font-weight="{weight}">{text}</text>'


def main() -> None:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(panels()))
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
