"""What the passes of one drafter come to, for its gauges."""

from __future__ import annotations


class PassFigures:
    """Running totals for the drafter's gauges."""

    def __init__(self) -> None:
        self.rows = 0
        self.drafted_rows = 0
        self.window_rows = 0
        self.extend_tokens = 0
        self.extend_s = 0.0
        self.grow_s = 0.0

    def gauges(self) -> dict[str, float]:
        return {f"draft_{name}": float(value) for name, value in vars(self).items()}
