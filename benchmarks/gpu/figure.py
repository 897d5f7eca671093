"""Draw one run: medians beside the bars and the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.bars import BARS, BATCHES, SETTINGS

_MARKS = {"SGLang": ("v", "tab:orange"), "vLLM": ("^", "tab:green")}


def draw(result: dict[str, Any], file: Path) -> None:
    """Write a PNG with a panel for each batch size and a column for each setting.

    It shows times at the verifier, with the drafter in its own process.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, panels = pyplot.subplots(1, len(BATCHES), figsize=(15, 5), squeeze=False)
    for panel, batch in zip(panels[0], BATCHES, strict=True):
        names = [setting.name for setting in SETTINGS]
        rows = {row["setting"]: row for row in result["rows"] if row["batch"] == batch and row["path"] == "processes"}
        for x, name in enumerate(names):
            if name in rows:
                panel.bar(x, rows[name]["median_ms"], color="tab:blue", width=0.6)
                panel.hlines(rows[name]["floor_ms"], x - 0.3, x + 0.3, color="black", linestyles="dotted")
            bar = BARS.get((name, batch))
            if bar is not None:
                panel.hlines(bar.must, x - 0.4, x + 0.4, color="tab:red")
                panel.hlines(bar.goal, x - 0.4, x + 0.4, color="tab:red", linestyles="dashed")
                for peer, value in bar.peers:
                    mark, colour = _MARKS[peer]
                    panel.plot(x, value, mark, color=colour, markersize=8)
        panel.set_xticks(range(len(names)), names, rotation=30, ha="right")
        panel.set_title(f"batch {batch}")
        panel.set_ylabel("ms a step (median)")
    handles = [
        Line2D([], [], color="tab:blue", linewidth=8, label="foretoken"),
        Line2D([], [], color="black", linestyle="dotted", label="floor (bytes / bandwidth)"),
        Line2D([], [], color="tab:red", label="must"),
        Line2D([], [], color="tab:red", linestyle="dashed", label="goal"),
        *(
            Line2D([], [], color=colour, marker=mark, linestyle="none", label=peer)
            for peer, (mark, colour) in _MARKS.items()
        ),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles))
    figure.text(0.5, 0.005, f"{result['device']['gpu']}, {result['commit']}, {result['began_at']}", ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 0.93))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
