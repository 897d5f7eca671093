"""How many tokens a step yields for each shape, from the walks of the steps before.

Chances are kept by depth, because a draft head's later tokens are worse than its first. All chains
share their counts. A tree, and a chain whose batch shares rows, have counts of their own. Where
there are few, or only old ones, they are filled up from the shape that was verified last: the
misses are a learned share of that shape's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from verifier_svc.drafters.request import Shape
from verifier_svc.speculation.candidate_shapes import is_chain

# What a first level is believed to hold before anything was verified, and how many trials that is
# worth. It is more than most drafters reach, so that a new one is tried.
FIRST_CHANCE = 0.8
FIRST_TRIALS = 2.0
# Trials' worth of trust in the level above, and in the shape that was verified last.
LEVEL_TRIALS = 2.0
OTHER_TRIALS = 6.0
# Trials of one step at most: rows of one step are alike, and a large batch must
# not make the past immovable.
STEP_TRIALS = 16.0
# Steps after which a step's walks weigh 1/e: many for one row, fewer for many.
LONGEST_MEMORY, SHORTEST_MEMORY, MEMORY_WALKS = 128, 32, 512
# The same for other shapes than the one that is verified, which says more of the texts by now.
OTHER_MEMORY = 64
# While nothing is verified: the same for the latest shape, the trials that are left of it for good,
# and for others.
IDLE_MEMORY = 64
IDLE_TRIALS = 4.0
OTHER_IDLE_MEMORY = 256
# Misses' worth of trust in what is known of that share.
SHARE_MISSES = 6.0
# Where one shape replaces another, their misses are compared: at most so many for each step of the
# former shape. Few steps are of few texts: at first, of the beginnings of all, which are the
# hardest to draft.
MISSES_A_STEP = 0.125
MOST_UNUSUAL = 2.0
SURELY = 0.98
# A chain with a budget yields no fewer tokens than one with as many rows for everybody, and no more
# than its rows or all of the chain. It gets this share of the way: the demo model's walks over
# held-out code with its EAGLE-3 head gave 0.5 to 1. Its misses, levels without a row among them,
# over the chain's: nodes a row to this power (1.1 to 1.9). Both are needed. Only the first keeps
# these bounds when few tokens are accepted; only the second, from a budget back to the chain,
# learns what the drafter's scores are worth. With one for both ways, the tests' synthetic machine
# made up to 2% (the first) or 9% (the second) fewer tokens a second.
BUDGET_GAIN = 0.65
BUDGET_POWER = 1.5

Walks = Mapping[tuple[int, int], int]
# Whose counts all chains share.
_CHAINS = Shape(2, 1, 1)


class PathAcceptance:
    """Estimate the tokens of each shape. Only the engine thread uses it."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._counts: dict[Shape, _Counts] = {}
        # Of each tree: its misses over a chain's.
        self._shares: dict[Shape, float] = {}
        self._latest = _CHAINS
        first = self._counts[self._latest] = _Counts(max_depth)
        first.tried[0], first.accepted[0] = FIRST_TRIALS, FIRST_TRIALS * FIRST_CHANCE
        # What was verified before the latest shape, and that one's misses and steps since then.
        self._before: _Before | None = None
        self._expected_misses = self._misses = 0.0
        self._num_steps = 0
        # Chances by family, until something is learned: a decision asks
        # for the same ones many times.
        self._known: dict[Shape, list[float]] = {}

    def pass_steps(self, num_steps: int, verified: set[Shape]) -> None:
        """Believe what was not verified in the last ``num_steps`` steps less."""
        families = {_family(shape) for shape in verified}
        for family, counts in self._counts.items():
            if family in families:
                continue
            if families:
                counts.fade((1 - 1 / OTHER_MEMORY) ** num_steps, 0.0)
            elif family == self._latest:
                counts.fade((1 - 1 / IDLE_MEMORY) ** num_steps, IDLE_TRIALS)
            else:
                counts.fade((1 - 1 / OTHER_IDLE_MEMORY) ** num_steps, 0.0)
        self._known.clear()

    def observe(self, shape: Shape, walks: Walks, num_steps: int, batch: int, *, is_probe: bool = False) -> None:
        """Learn from the walks of ``num_steps`` steps of ``batch`` rows.

        Args:
            walks: how many walks matched so many of so many drafted levels.
            is_probe: whether another shape stands, which says more of the text.
        """
        family = _family(shape)
        if family != self._latest and not is_probe:
            self._change_latest(family)
        memory = min(max(MEMORY_WALKS // batch, SHORTEST_MEMORY), LONGEST_MEMORY)
        counts = self._counts.setdefault(family, _Counts(self._max_depth))
        counts.fade((1 - 1 / memory) ** num_steps, 0.0)
        if not is_probe:
            self._num_steps += num_steps
        weight = min(1.0, STEP_TRIALS / batch)
        # While all requests ask for one shape, many steps may pass before the next decision. All of
        # them together weigh no more than the memory holds.
        kept = min(1.0, memory / num_steps)
        for (num_matched, depth), count in walks.items():
            counts.add(num_matched, depth, count * weight * kept)
            if self._before is not None and not is_probe:
                for level in range(min(num_matched + 1, depth)):
                    self._expected_misses += (1 - self._before.chances[level]) * count * weight
                self._misses += (num_matched < depth) * count * weight
        self._known.clear()

    def tokens(self, shape: Shape, *, at_least: float = 0.0) -> float:
        """Return the tokens that a row of this shape yields a step.

        ``at_least``: the least chance with which each level holds.
        """
        if shape.depth == 0 or shape.nodes == 1:
            return 1.0
        expected = running = 1.0
        for chance in self.chances(shape)[: shape.depth]:
            running *= max(chance, at_least)
            expected += running
        return min(expected, float(shape.rows))

    def chances(self, shape: Shape) -> list[float]:
        """Return for each level the chance that the path holds there if it held above."""
        family = _family(shape)
        known = self._known.get(family)
        if known is None:
            known = self._known[family] = self._chances(family)
        return known

    def _chances(self, family: Shape) -> list[float]:
        counts = self._counts.get(family)
        out: list[float] = []
        if family == self._latest:
            assert counts is not None
            above = FIRST_CHANCE
            for level in range(self._max_depth):
                trust = LEVEL_TRIALS if level else 1e-3
                above = counts.chance(level, above, trust)
                out.append(above)
            return out
        for level, guess in enumerate(self._guesses(family)):
            out.append(counts.chance(level, guess, OTHER_TRIALS) if counts is not None else guess)
        return out

    def _guesses(self, family: Shape) -> list[float]:
        """Return the chances that follow from the latest shape's."""
        if family.budget:
            return self._shared_guesses(family)
        share = self._share(family) / self._share(self._latest)
        return [1 - min(max((1 - chance) * share, 1 - SURELY), 1.0) for chance in self.chances(self._latest)]

    def _shared_guesses(self, family: Shape) -> list[float]:
        """Return the chances of a chain with a budget.

        They follow from the chain's: all are lower by one factor.
        """
        chances = self.chances(_CHAINS)
        reached = list(accumulate(chances[: family.depth], operator.mul))
        least, most = sum(reached[: family.budget - 1]), min(sum(reached), family.budget - 1.0)
        wanted = least + BUDGET_GAIN * max(most - least, 0.0)
        low, high = 0.0, 1.0
        for _ in range(12):
            factor = (low + high) / 2
            held = sum(each * factor**level for level, each in enumerate(reached, start=1))
            low, high = (factor, high) if held < wanted else (low, factor)
        return [chance * high for chance in chances]

    def _share(self, family: Shape) -> float:
        """Return a shape's misses over a chain's.

        Until measured, a tree's misses fall with the root of its nodes a level.
        """
        if is_chain(family):
            return 1.0
        return self._shares.get(family, self._usual_share(family))

    @staticmethod
    def _usual_share(family: Shape) -> float:
        if family.budget:
            return float((family.nodes / family.budget) ** BUDGET_POWER)
        return math.sqrt(family.depth / (family.nodes - 1))

    def _change_latest(self, family: Shape) -> None:
        """Learn how the latest shape's misses compare with the shape's before.

        Then begin with this one.
        """
        if self._before is not None and self._expected_misses > 0:
            former = self._before.family
            tree = self._latest if is_chain(former) else former
            if not is_chain(tree):
                known = self._share(self._latest) / self._share(former)
                weight = min(MISSES_A_STEP * self._before.num_steps / self._expected_misses, 1.0)
                ratio = (weight * self._misses + SHARE_MISSES * known) / (weight * self._expected_misses + SHARE_MISSES)
                share = self._share(former) * ratio if tree == self._latest else self._share(self._latest) / ratio
                # The text may have changed at the same time.
                usual = self._usual_share(tree)
                self._shares[tree] = min(max(share, usual / MOST_UNUSUAL), usual * MOST_UNUSUAL)
                self._known.clear()
        self._before = _Before(self._latest, self.chances(self._latest), self._num_steps)
        self._expected_misses = self._misses = 0.0
        self._num_steps = 0
        self._counts.setdefault(family, _Counts(self._max_depth))
        # What was believed of this shape a moment ago is its past now.
        self._counts[family].fill_up(self.chances(family), IDLE_TRIALS)
        self._latest = family


class _Before(NamedTuple):
    """A shape that another one has replaced.

    Attributes:
        chances: by level, as it was replaced.
        num_steps: for which it stood.
    """

    family: Shape
    chances: list[float]
    num_steps: int


class _Counts:
    """Faded counts by level of one family of shapes."""

    def __init__(self, max_depth: int) -> None:
        self.accepted = [0.0] * max_depth
        self.tried = [0.0] * max_depth

    def add(self, num_matched: int, depth: int, weight: float) -> None:
        # The level after the last one that held was tried too, unless the draft ended there.
        for level in range(min(num_matched + 1, depth)):
            self.tried[level] += weight
            self.accepted[level] += weight * (level < num_matched)

    def fade(self, keep: float, floor: float) -> None:
        """Keep this share of all trials, but not fewer than ``floor`` where there were as many."""
        for level, tried in enumerate(self.tried):
            factor = keep if tried * keep >= floor else min(floor / tried, 1.0) if tried else 1.0
            self.tried[level] *= factor
            self.accepted[level] *= factor

    def fill_up(self, chances: list[float], trials: float) -> None:
        """Add trials that went as expected where there are fewer than ``trials``."""
        for level, tried in enumerate(self.tried):
            missing = max(trials - tried, 0.0)
            self.tried[level] += missing
            self.accepted[level] += missing * chances[level]

    def chance(self, level: int, guess: float, trust: float) -> float:
        return (self.accepted[level] + trust * guess) / (self.tried[level] + trust)


def _family(shape: Shape) -> Shape:
    """Return the shape whose counts this one shares."""
    return _CHAINS if is_chain(shape) else shape
