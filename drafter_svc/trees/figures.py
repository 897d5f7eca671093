"""Totals of one drafter's passes, for its gauges."""

from __future__ import annotations


class PassFigures:
    """Totals since the attachment began."""

    def __init__(self) -> None:
        self.rows = 0
        self.drafted_rows = 0
        self.window_rows = 0
        self.extend_tokens = 0
        self.extend_s = 0.0
        self.grow_s = 0.0

    def gauges(self) -> dict[str, float]:
        """Return all totals by the names of their gauges."""
        return {f"draft_{name}": float(value) for name, value in vars(self).items()}
