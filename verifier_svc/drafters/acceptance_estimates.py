"""What one drafter's scores are worth: how often nodes of a score were really on the target's path.

Scores are binned by the probability that they stand for; a bin's estimate is its share of
accepted nodes, smoothed towards the score itself, so that a drafter starts by being
believed and is soon corrected.

Trees are small and a step is short: plain numbers here, an array of ten
costs more to touch than to use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NUM_BINS = 10
# Nodes' worth of trust in the scores themselves.
PRIOR_NODES = 8.0
# Counts fade by this at every step that drafted: text changes.
MEMORY = 0.998
# A row, and a drafter, starts as a fair prospect; one refused draft does not change that, a few do.
PRIOR_TRIALS = 2.0
PRIOR_ACCEPTANCE = 0.65
# What a step's outcome weighs in the acceptance that a new row is believed to have.
RATE_MEMORY = 0.99


class AcceptanceEstimates:
    """Of one drafter, over all sequences."""

    def __init__(self) -> None:
        self._nominal = [(number + 0.5) / NUM_BINS for number in range(NUM_BINS)]
        # Of each bin: nodes accepted and nodes seen, the prior ones left out.
        self._accepted = [0.0] * NUM_BINS
        self._nodes = [0.0] * NUM_BINS
        # What a probability of each bin is multiplied by, until ``observe`` changes it.
        self._factors: list[float] = []

    def chances(self, scores: Sequence[float], parents: Sequence[int]) -> list[float]:
        """Return the chance that the text runs through each node of a tree, as Draft.chances.

        The first one is the root, whose chance is 1.
        """
        # The probability 1 is in the last bin too.
        factors = self._factors = self._factors or [self._factor(min(n, NUM_BINS - 1)) for n in range(NUM_BINS + 1)]
        out = [1.0]
        for score, parent in zip(scores[1:], parents[1:], strict=True):
            probability = math.exp(score) if score < 0.0 else 1.0
            chance, above = probability * factors[int(probability * NUM_BINS)], out[parent]
            out.append(chance if chance < above else above)
        return out

    def observe(self, scores: Sequence[float], is_accepted: Sequence[bool]) -> None:
        """Learn from a verified tree's nodes, the root left out."""
        self._factors = []
        self._accepted = [MEMORY * count for count in self._accepted]
        self._nodes = [MEMORY * count for count in self._nodes]
        for score, accepted in zip(scores, is_accepted, strict=True):
            number = _bin(math.exp(min(score, 0.0)))
            self._accepted[number] += accepted
            self._nodes[number] += 1.0

    def _factor(self, number: int) -> float:
        """Return how many of a bin's nodes were accepted, divided by what their scores promised."""
        nominal = self._nominal[number]
        return (PRIOR_NODES * nominal + self._accepted[number]) / ((PRIOR_NODES + self._nodes[number]) * nominal)


def _bin(probability: float) -> int:
    return min(int(probability * NUM_BINS), NUM_BINS - 1)


class AcceptanceRate:
    """Estimate how likely a drafted token is accepted if its parent was.

    The estimate is over all recent rows of one drafter.
    """

    def __init__(self) -> None:
        self._accepted, self._trials = PRIOR_TRIALS * PRIOR_ACCEPTANCE, PRIOR_TRIALS

    @property
    def value(self) -> float:
        return self._accepted / self._trials

    def observe(self, num_accepted: int, depth: int, num_rows: int = 1) -> None:
        """Learn from ``num_rows`` trees of this drafter alone, ``depth`` edges deep."""
        kept = RATE_MEMORY**num_rows
        # The sum of what is left of each tree once the last one was counted.
        weight = (1 - kept) / (1 - RATE_MEMORY)
        self._accepted = self._accepted * kept + num_accepted * weight
        # The token after the last accepted one was tried too, unless the draft ended there.
        self._trials = self._trials * kept + min(num_accepted + 1, depth) * weight
