"""What a step of a shape takes: the target's pass over its rows, and what was measured beside it.

The rest (draft passes, hand-over, what a lost overlap costs) is learned by shape and batch bucket. Where a shape was
not measured it is taken from the same shape at a batch nearby, or from other shapes of this batch by their depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from verifier_svc.drafters.request import NO_DRAFT, Shape

# Weight of a new step once there are enough of them.
SMOOTHING = 0.05
# Before any draft was measured: a level's share of the target's pass over the batch. Asking costs as much as a level.
LEVEL_SHARE = 0.08
# The first steps of a kind count by their median: one of them may have been disturbed.
FIRST_STEPS = 5
# A later step that takes so many times as long as expected was disturbed, and counts as this much. If so many in a row
# do, it is the estimate that is wrong.
MOST_RATIO, MOST_DISTURBED = 1.5, 3
# Steps for which the target's times are taken as they are.
HOLD_FOR = 64
# Weight of a new step in what prompts take, and steps' worth of trust that a prompt's token takes what a row takes in
# the target's pass over many.
PROMPT_SMOOTHING = 0.02
PROMPT_TRUST = 5.0
MANY_ROWS = (1024, 256, 64, 1)
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
        # How steps' seconds vary with what their prompts should take, within kinds of steps. What a prompt costs
        # whatever its length counts as a part of the steps that have one.
        self._prompt_variance = self._prompt_covariance = 0.0

    def observe(self, shape: Shape, batch: int, seconds: float, num_prompt_tokens: int) -> None:
        """Learn from a step. The first one of another shape says more of the change than of the shape."""
        self._held_for += 1
        if self._held_for >= HOLD_FOR:
            self._held, self._held_for = {}, 0
        if shape != self._shape:
            self._shape = shape
            return
        verify_s = self.verify(batch * shape.nodes)
        if not math.isfinite(verify_s):
            return
        rest = self._rests.setdefault(shape, {}).setdefault(batch_bucket(batch), _Rest())
        prompt_s = self._nominal_prompt_s(num_prompt_tokens)
        factor = self.prompt_factor
        trust = 1.0
        if rest.weight >= FIRST_STEPS:
            expected = verify_s + rest.seconds(factor) + factor * prompt_s
            # What prompts take is known less well than what a step takes.
            trust = (1 - min(factor * prompt_s / expected, 0.7)) ** 2
            rest.num_disturbed = rest.num_disturbed + 1 if seconds > MOST_RATIO * expected else 0
            if rest.num_disturbed <= MOST_DISTURBED:
                seconds = min(seconds, MOST_RATIO * expected)
            prompt_off, seconds_off = prompt_s - rest.prompt_s, seconds - verify_s - rest.mean_s
            self._prompt_variance += PROMPT_SMOOTHING * (prompt_off**2 - self._prompt_variance)
            self._prompt_covariance += PROMPT_SMOOTHING * (prompt_off * seconds_off - self._prompt_covariance)
        rest.observe(seconds - verify_s, prompt_s, factor, trust)

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds of prompts of so many tokens."""
        return self.prompt_factor * self._nominal_prompt_s(num_tokens)

    def _nominal_prompt_s(self, num_tokens: int) -> float:
        """Return what prompts of so many tokens should take."""
        if not num_tokens:
            return 0.0
        return num_tokens * next(s / rows for rows in MANY_ROWS if math.isfinite(s := self.verify(rows)))

    @property
    def prompt_factor(self) -> float:
        """What prompts take over what they should take."""
        trust = PROMPT_TRUST * PROMPT_SMOOTHING * self.verify(1) ** 2
        return max(self._prompt_covariance + trust, 0.0) / (self._prompt_variance + trust)

    def estimate(self, shape: Shape, batch: int) -> float:
        """Return the seconds of a step in which ``batch`` rows verify trees of this shape, without prompts."""
        verify_s = self.verify(batch * shape.nodes)
        return max(verify_s + self._rest(shape, batch), 0.3 * verify_s)

    def weight(self, shape: Shape, batch: int) -> int:
        """Return how many steps of this shape were measured at this bucket."""
        rest = self._rests.get(shape, {}).get(batch_bucket(batch))
        return rest.weight if rest is not None else 0

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
            return known.seconds(self.prompt_factor)
        nearest = min(own, key=lambda other: abs(other - bucket), default=None)
        if nearest is not None and (abs(nearest - bucket) <= NEARBY or shape == NO_DRAFT):
            return own[nearest].seconds(self.prompt_factor)
        if shape == NO_DRAFT:
            return 0.0
        level_s = LEVEL_SHARE * self.verify(batch)
        others = self._by_levels(bucket)
        if not any(levels for levels, *_ in others):
            return level_s * _levels(shape) if nearest is None else own[nearest].seconds(self.prompt_factor)
        return _on_line(others, _levels(shape), level_s)

    def _by_levels(self, bucket: int) -> list[tuple[int, float, float]]:
        """Return levels, seconds beside the target's pass, and weight of the shapes measured nearest to this bucket."""
        found = [
            (abs(other - bucket), _levels(shape), rest.seconds(self.prompt_factor), min(rest.weight, 1 / SMOOTHING))
            for shape, rests in self._rests.items()
            for other, rest in rests.items()
            if rest.weight
        ]
        nearest = min((distance for distance, levels, *_ in found if levels), default=0)
        # What plain decode takes beside the pass (longer contexts, the host) all shapes take.
        nearest_plain = min((distance for distance, levels, *_ in found if not levels), default=0)
        return [
            (levels, seconds, weight)
            for distance, levels, seconds, weight in found
            if (distance == nearest if levels else distance == nearest_plain <= NEARBY)
        ]


class _Rest:
    """Smoothed seconds of a kind of step beside the target's pass.

    They contain prompts: what those take is known better later.
    """

    __slots__ = ("_first", "mean_s", "num_disturbed", "prompt_s", "weight")

    def __init__(self) -> None:
        self.mean_s = self.prompt_s = 0.0
        self.weight = self.num_disturbed = 0
        self._first: list[tuple[float, float]] = []

    def observe(self, seconds: float, prompt_s: float, prompt_factor: float, trust: float) -> None:
        """Learn from a step with ``seconds`` beside the target's pass, and prompts of ``prompt_s``."""
        self.weight += 1
        if self.weight <= FIRST_STEPS:
            self._first.append((seconds, prompt_s))
            by_rest = sorted(self._first, key=lambda step: step[0] - prompt_factor * step[1])
            self.mean_s, self.prompt_s = by_rest[(len(by_rest) - 1) // 2]
            return
        share = max(1 / self.weight, SMOOTHING) * trust
        self.mean_s += share * (seconds - self.mean_s)
        self.prompt_s += share * (prompt_s - self.prompt_s)

    def seconds(self, prompt_factor: float) -> float:
        """Return the seconds without prompts."""
        return self.mean_s - prompt_factor * self.prompt_s


def _levels(shape: Shape) -> int:
    """Return how many levels' time a shape's drafts take. Asking for them costs as much as a level."""
    return 0 if shape == NO_DRAFT else 1 + shape.depth


def _on_line(points: list[tuple[int, float, float]], levels: int, level_s: float) -> float:
    """Return the seconds at ``levels`` on the line through points of levels, seconds and weight.

    One point says nothing of the slope. Then ``level_s`` is what a level should take, and the seconds over all levels
    are the most that it can take: the truth is assumed to lie between them.
    """
    total = sum(weight for *_, weight in points)
    mean_levels = sum(weight * at for at, _, weight in points) / total
    mean_s = sum(weight * seconds for _, seconds, weight in points) / total
    spread = sum(weight * (at - mean_levels) ** 2 for at, _, weight in points)
    if spread < 1e-3:
        most = max(mean_s / mean_levels, 0.0)
        slope = math.sqrt(min(level_s, most) * most)
    else:
        slope = sum(weight * (at - mean_levels) * (seconds - mean_s) for at, seconds, weight in points) / spread
    return max(mean_s + max(slope, 0.0) * (levels - mean_levels), 0.0)
