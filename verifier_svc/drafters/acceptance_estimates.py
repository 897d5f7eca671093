"""What one drafter's scores are worth: how often nodes of a score were really on the target's path.

Scores are binned by the probability that they stand for; a bin's estimate is its share of
accepted nodes, smoothed towards the score itself, so that a drafter starts by being
believed and is soon corrected.

The nodes of all trees of a step are estimated together: trees are small, and an array costs more to
touch than to use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.drafting import FEW_NODES

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
        self._factors: NDArray[np.float64] | None = None

    def of_scores(self, scores: NDArray[np.float32]) -> list[float]:
        """Return what the scores of nodes are worth, as chances. NaN is worth nothing."""
        if len(scores) <= FEW_NODES:
            return [self._chance(score) for score in scores.tolist()]
        if self._factors is None:
            # The probability 1 is in the last bin too.
            self._factors = np.array([self._factor(min(n, NUM_BINS - 1)) for n in range(NUM_BINS + 1)])
        values = np.nan_to_num(scores.astype(np.float64), nan=-np.inf)
        probabilities = np.exp(np.minimum(values, 0.0, out=values), out=values)
        chances: list[float] = (probabilities * self._factors[(probabilities * NUM_BINS).astype(np.intp)]).tolist()
        return chances

    def _chance(self, score: float) -> float:
        probability = 0.0 if math.isnan(score) else math.exp(min(score, 0.0))
        return probability * self._factor(_bin(probability))

    def observe(self, scores: Sequence[float], is_accepted: Sequence[bool]) -> None:
        """Learn from a verified tree's nodes, the root left out."""
        self._factors = None
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


def bounded(chances: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Return the chances of a tree's nodes, as Draft.chances: none is above its parent's.

    The first one is the root's.
    """
    out = [1.0]
    for node in range(1, len(chances)):
        chance, above = chances[node], out[parents[node]]
        out.append(chance if chance < above else above)
    return out


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
