"""What a model's trees yield where a look-up has found something.

Text that repeats itself is often easy for the model, too. So the mean over all rows, from which
such rows are missing, says too little of them, and a look-up seems to gain more than it does. Now
and then such a row verifies the model's tree instead, and its tokens show it.
"""

from __future__ import annotations

import random

# Before anything was compared the model is taken to yield as much as elsewhere, with this many
# rows' worth of trust.
PRIOR_ROWS = 4.0
# What a row still weighs after one more.
MEMORY = 0.98
# One row of so many is compared, by chance: of the first ones, and of later ones.
FIRST_EVERY, LATER_EVERY = 8, 32
FIRST_ROWS = 32


class ModelYield:
    """Compare tokens with the expected ones. Only the engine thread uses it."""

    def __init__(self) -> None:
        # Sums over rows that were compared: tokens over those expected, and weights.
        self._ratios = self._weights = PRIOR_ROWS
        self._num_compared = 0
        self._random = random.Random(0)

    def is_compared(self) -> bool:
        """Return whether the next row for which something was found verifies the model's tree.

        Count it then.

        By chance, because sequences come in the order of their batch rows.
        """
        every = FIRST_EVERY if self._num_compared < FIRST_ROWS else LATER_EVERY
        is_compared = self._random.random() * every < 1
        self._num_compared += is_compared
        return is_compared

    def observe(self, num_tokens: int, expected: float) -> None:
        """Learn from a row that got ``num_tokens`` by the model's tree.

        The mean of all rows is ``expected``.
        """
        self._ratios = self._ratios * MEMORY + num_tokens / expected
        self._weights = self._weights * MEMORY + 1

    def tokens(self, expected: float, most: int) -> float:
        """Return the tokens that the model's tree should yield where something was found.

        Args:
            expected: the mean of all rows.
            most: what its deepest path yields.
        """
        return min(max(expected * self._ratios / self._weights, 1.0), max(most, expected))
