"""Decide above which batch size the server decodes plainly."""

from __future__ import annotations


class BatchLimit:
    """A limit on decoding sequences, and how many steps were above it."""

    def __init__(self, most: int) -> None:
        """``most`` of 0 means no limit."""
        self._most = most
        self.num_steps_above = 0
        # Whether the last counted step was above the limit.
        self.was_exceeded = False

    def is_exceeded(self, num_decoding: int) -> bool:
        return 0 < self._most < num_decoding

    def count(self, num_decoding: int) -> bool:
        """Count a step of so many sequences; return whether it is above the limit."""
        is_above = self.was_exceeded = self.is_exceeded(num_decoding)
        self.num_steps_above += is_above
        return is_above
