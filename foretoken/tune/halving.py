"""Successive halving: measure all candidates a little, keep the better half, and repeat.

Each time, those that are left are measured for longer.

Jamieson and Talwalkar, arXiv 1502.07943. The candidates of a rung take turns round
by round, so that a machine that slows down slows all of them. A candidate counts
by the median of all its rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

# Contenders of the last rung.
FINALISTS = 2

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Rung:
    """So many candidates, each measured for so many rounds."""

    num_candidates: int
    num_rounds: int


class TooFewRoundsError(ValueError):
    """A budget is smaller than ``least``, one round of each candidate in each rung."""

    def __init__(self, least: int) -> None:
        super().__init__(f"needs at least {least} rounds")
        self.least = least


def plan_rungs(num_contenders: int, num_kept: int, budget: int) -> tuple[Rung, ...]:
    """Return the rungs that ``budget`` rounds in all allow: about as many rounds in each rung.

    Args:
        num_contenders: candidates; half of them are dropped after each rung.
        num_kept: candidates that are never dropped.

    Raises:
        TooFewRoundsError: the budget is too small for one round of each.
    """
    sizes = [num_contenders]
    while sizes[-1] > FINALISTS:
        sizes.append(max(FINALISTS, math.ceil(sizes[-1] / 2)))
    sizes = [size + num_kept for size in sizes]
    if budget < sum(sizes):
        raise TooFewRoundsError(sum(sizes))
    rungs, left = [], budget
    for place, size in enumerate(sizes):
        later = sizes[place + 1 :]
        # What rounding leaves of a rung goes to the later ones, which
        # need at least a round of each.
        share = min(left // (1 + len(later)), left - sum(later))
        rungs.append(Rung(size, max(1, share // size)))
        left -= size * rungs[-1].num_rounds
    return tuple(rungs)


@dataclass
class Halving(Generic[Name]):
    """The course of one halving.

    Args:
        contenders: dropped by halves.
        kept: never dropped.
        measure: makes one round of a candidate; returns its tokens a second.
    """

    contenders: Sequence[Name]
    kept: Sequence[Name]
    measure: Callable[[Name], float]
    # Of each candidate, in the order of the rounds.
    rates: dict[Name, list[float]] = field(default_factory=dict)
    # Those that are in the present rung.
    survivors: list[Name] = field(default_factory=list)
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self.survivors = [*self.kept, *self.contenders]

    def rate(self, name: Name) -> float:
        """Return the median of a candidate's rounds; 0.0 without any."""
        return median(self.rates[name]) if self.rates.get(name) else 0.0

    @property
    def best(self) -> Name:
        """Return the fastest survivor."""
        return max(self.survivors, key=self.rate)

    def run(self, rungs: Sequence[Rung]) -> Iterator[Rung]:
        """Measure rung by rung; yield each when it is done and its worse half was dropped."""
        for place, rung in enumerate(rungs):
            self.add_rounds(self.survivors, rung.num_rounds)
            if place + 1 < len(rungs):
                self._drop(rungs[place + 1].num_candidates)
            yield rung

    def add_rounds(self, names: Sequence[Name], count: int) -> None:
        """Measure ``count`` rounds of each of these. They take turns, forwards and backwards."""
        for number in range(count):
            for name in names if number % 2 == 0 else tuple(reversed(names)):
                self.rates.setdefault(name, []).append(self.measure(name))
                self.num_rounds += 1

    def _drop(self, size: int) -> None:
        contenders = sorted((name for name in self.survivors if name not in self.kept), key=self.rate, reverse=True)
        left = set(contenders[: size - len(self.kept)])
        self.survivors = [name for name in self.survivors if name in self.kept or name in left]
