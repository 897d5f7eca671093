"""What a step of a shape takes: the target's pass over its rows, and what was measured beside it.

The rest (draft passes, hand-over, what a lost overlap costs) is learned by shape and batch bucket. Where a shape was
not measured it is taken from the same shape at a batch nearby, or from other shapes of this batch by their depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from verifier_svc.drafters.request import NO_DRAFT, Shape

# Weight of a new step once there are enough of them.
SMOOTHING = 0.08
# Before any draft was measured: a level's share of the target's pass over the batch. Asking costs as much as a level.
LEVEL_SHARE = 0.08
# A step of so many times the estimate was disturbed from outside.
MOST_RATIO = 2.0
# The same while there are fewer steps than this.
FIRST_RATIO = 4.0
FIRST_STEPS = 4.0
# Steps for which the target's times are taken as they are.
HOLD_FOR = 64
PROMPT_SMOOTHING = 0.1
# Half-octaves up to which the same shape at another batch is a better guess than other shapes at this one.
NEARBY = 3


def batch_bucket(batch: int) -> int:
    """Return the half-octave of a batch size."""
    return round(2 * math.log2(batch))


class ShapeCosts:
    """Used by the engine thread alone."""

    def __init__(self, verify_s: Callable[[int], float]) -> None:
        """``verify_s``: seconds of the target's pass by rows; infinite where it cannot run so many."""
        self._verify_s = verify_s
        self._held: dict[int, float] = {}
        self._held_for = 0
        self._rests: dict[Shape, dict[int, _Rest]] = {}
        self._shape = NO_DRAFT
        # A prompt's seconds over those of the target's pass over as many rows.
        self.prompt_factor = 1.0

    def observe(self, shape: Shape, batch: int, seconds: float, num_prompt_tokens: int) -> float:
        """Learn from a step; return its seconds without prompts.

        The first step of another shape says more of the change than of the shape.
        """
        self._held_for += 1
        if self._held_for >= HOLD_FOR:
            self._held, self._held_for = {}, 0
        expected = self.estimate(shape, batch)
        prompt_s = self.verify(num_prompt_tokens) * self.prompt_factor if num_prompt_tokens else 0.0
        if shape != self._shape:
            self._shape = shape
            return min(expected, seconds)
        rest = self._rests.setdefault(shape, {}).setdefault(batch_bucket(batch), _Rest(seconds=0.0))
        if not rest.weight:
            rest.seconds = expected - self.verify(batch * shape.nodes)
        most = MOST_RATIO if rest.weight >= FIRST_STEPS else FIRST_RATIO
        error = min(seconds - prompt_s, most * expected) - expected
        trust = (expected / (expected + prompt_s)) ** 2
        rest.observe(error, trust)
        if num_prompt_tokens and rest.weight >= FIRST_STEPS / 2:
            error = min(max(seconds - expected - prompt_s, -prompt_s), 2 * prompt_s)
            gain = PROMPT_SMOOTHING * (1 - trust)
            self.prompt_factor *= 1 + gain * error / prompt_s
        return max(seconds - prompt_s, 0.0)

    def estimate(self, shape: Shape, batch: int) -> float:
        """Return the seconds of a step in which ``batch`` rows verify trees of this shape, without prompts."""
        verify_s = self.verify(batch * shape.nodes)
        return max(verify_s + self._rest(shape, batch), 0.3 * verify_s)

    def weight(self, shape: Shape, batch: int) -> float:
        """Return how many steps of this shape were measured at this bucket."""
        rest = self._rests.get(shape, {}).get(batch_bucket(batch))
        return rest.weight if rest is not None else 0.0

    def verify(self, num_rows: int) -> float:
        """Return the seconds of the target's pass."""
        seconds = self._held.get(num_rows)
        if seconds is None:
            seconds = self._held[num_rows] = self._verify_s(num_rows)
        return seconds

    def _rest(self, shape: Shape, batch: int) -> float:
        """Return the seconds of a step beside the target's pass."""
        bucket = batch_bucket(batch)
        own = self._rests.get(shape, {})
        known = own.get(bucket)
        if known is not None and known.weight:
            return known.seconds
        nearest = min(own, key=lambda other: abs(other - bucket), default=None)
        if nearest is not None and (abs(nearest - bucket) <= NEARBY or shape == NO_DRAFT):
            return own[nearest].seconds
        if shape == NO_DRAFT:
            return 0.0
        others = self._by_depth(bucket)
        if not others:
            return own[nearest].seconds if nearest is not None else self._first_guess(shape, batch)
        return _on_line(others, shape.depth)

    def _first_guess(self, shape: Shape, batch: int) -> float:
        return LEVEL_SHARE * self.verify(batch) * (1 + shape.depth)

    def _by_depth(self, bucket: int) -> list[tuple[int, float, float]]:
        """Return depth, seconds beside the target's pass, and weight of the shapes measured nearest to this bucket."""
        found = [
            (abs(other - bucket), shape.depth, rest.seconds, min(rest.weight, 1 / SMOOTHING))
            for shape, rests in self._rests.items()
            if shape != NO_DRAFT
            for other, rest in rests.items()
            if rest.weight
        ]
        nearest = min((distance for distance, *_ in found), default=0)
        return [(depth, seconds, weight) for distance, depth, seconds, weight in found if distance == nearest]


class _Rest:
    """Smoothed seconds beside the target's pass, and how many steps they rest on."""

    __slots__ = ("seconds", "weight")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.weight = 0.0

    def observe(self, error: float, trust: float) -> None:
        self.weight += trust
        self.seconds += error * max(trust / self.weight, SMOOTHING * trust)


def _on_line(points: list[tuple[int, float, float]], depth: int) -> float:
    """Return the seconds at ``depth`` on the line through points of depth, seconds and weight.

    One depth alone says nothing of the slope: asking then costs as much as one level.
    """
    total = sum(weight for *_, weight in points)
    mean_depth = sum(weight * at for at, _, weight in points) / total
    mean_s = sum(weight * seconds for _, seconds, weight in points) / total
    spread = sum(weight * (at - mean_depth) ** 2 for at, _, weight in points)
    if spread < 1e-3:
        return mean_s * (1 + depth) / (1 + mean_depth)
    slope = sum(weight * (at - mean_depth) * (seconds - mean_s) for at, seconds, weight in points) / spread
    return max(mean_s + max(slope, 0.0) * (depth - mean_depth), 0.0)
