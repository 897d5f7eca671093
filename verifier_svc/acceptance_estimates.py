"""What one drafter's scores are worth: how often nodes of a score were really on the target's path.

Scores are binned by the probability that they stand for; a bin's estimate is its share of accepted nodes, smoothed
towards the score itself, so that a drafter starts by being believed and is soon corrected.
"""

from __future__ import annotations

import numpy as np

from foretoken.drafting import Float32
from foretoken.tree import Int32

NUM_BINS = 10
# Nodes' worth of trust in the scores themselves.
PRIOR_NODES = 8.0
# Counts fade by this at every step that drafted: text changes.
MEMORY = 0.998


class AcceptanceEstimates:
    """Of one drafter, over all sequences."""

    def __init__(self) -> None:
        nominal = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
        self._nominal = nominal
        self._accepted = PRIOR_NODES * nominal
        self._nodes = np.full(NUM_BINS, PRIOR_NODES)

    def chances(self, scores: Float32) -> np.ndarray:
        """float64 [nodes]: the chance that the text runs through each node; the root's is 1."""
        probabilities = np.exp(np.minimum(scores, 0.0).astype(np.float64))
        factors = self._accepted / (self._nodes * self._nominal)
        out: np.ndarray = np.minimum(probabilities * factors[_bins(probabilities)], 1.0)
        out[0] = 1.0
        return out

    def observe(self, scores: Float32, is_accepted: np.ndarray) -> None:
        """Learn from a verified tree's nodes, the root left out."""
        bins = _bins(np.exp(np.minimum(scores, 0.0).astype(np.float64)))
        self._nodes = PRIOR_NODES + MEMORY * (self._nodes - PRIOR_NODES) + np.bincount(bins, minlength=NUM_BINS)
        prior = PRIOR_NODES * self._nominal
        self._accepted = prior + MEMORY * (self._accepted - prior)
        self._accepted += np.bincount(bins, weights=is_accepted, minlength=NUM_BINS)


def _bins(probabilities: np.ndarray) -> Int32:
    return np.minimum((probabilities * NUM_BINS).astype(np.int32), NUM_BINS - 1)
