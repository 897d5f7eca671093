"""Choose one candidate for all numbers of requests at once, from what was measured at each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.tune.candidates import BASELINES, PLAIN, Candidate

# A candidate that is simpler, or follows the load by itself, is taken where it
# reaches this share of the best one.
NEARLY = 0.99

# Tokens a second of each candidate, by requests at once.
Rates = Mapping[int, Mapping[Candidate, float]]


@dataclass(frozen=True, slots=True)
class LimitedCandidate:
    """A candidate, and the largest batch that it drafts for.

    Larger batches decode plainly. 0: no limit.

    Attributes:
        score: the weighted geometric mean of its speeds, each over the best
            measured at that number of requests.
    """

    candidate: Candidate
    max_batch_size: int
    score: float

    @property
    def name(self) -> str:
        limit = f", plain above {self.max_batch_size} at once" if self.max_batch_size else ""
        return f"{self.candidate.name}{limit}"

    @property
    def _effort(self) -> tuple[bool, bool]:
        return self.candidate not in BASELINES, self.max_batch_size > 0


def best_of(rates: Mapping[Candidate, float]) -> Candidate:
    """Return the fastest candidate; of nearly equal ones plain decode, then ``auto``."""
    most = max(rates.values())
    for candidate in BASELINES:
        if rates.get(candidate, 0.0) >= NEARLY * most:
            return candidate
    return max(rates, key=lambda candidate: rates[candidate])


def choose(rates: Rates, weights: Mapping[int, float]) -> LimitedCandidate:
    """Return the candidate with the best score; of nearly equal ones the simplest."""
    found = [choice for choice in _choices(rates, weights) if choice.score > 0]
    most = max(choice.score for choice in found)
    nearly = [choice for choice in found if choice.score >= NEARLY * most]
    least = min(choice._effort for choice in nearly)
    return max((choice for choice in nearly if choice._effort == least), key=lambda choice: choice.score)


def score_of(candidate: Candidate, rates: Rates, weights: Mapping[int, float], max_batch_size: int = 0) -> float:
    """Return a choice's score; 0.0 if it was not measured everywhere."""
    total = 0.0
    for batch, measured in rates.items():
        taken = PLAIN if max_batch_size and batch > max_batch_size else candidate
        rate = measured.get(taken, 0.0)
        if not rate:
            return 0.0
        total += weights[batch] * math.log(rate / max(measured.values()))
    return math.exp(total / sum(weights[batch] for batch in rates))


def _choices(rates: Rates, weights: Mapping[int, float]) -> list[LimitedCandidate]:
    batches = sorted(rates)
    candidates = list(dict.fromkeys(candidate for measured in rates.values() for candidate in measured))
    found = []
    for candidate in candidates:
        limits = [0] if candidate == PLAIN else [0, *batches[:-1]]
        found += [LimitedCandidate(candidate, limit, score_of(candidate, rates, weights, limit)) for limit in limits]
    return found
