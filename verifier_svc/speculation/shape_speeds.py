"""How fast a batch should be in each shape, learned from the steps before.

The speed of a shape is the tokens that it yields over the seconds of its steps. What steps show is
collected until the next decision, which first learns from it and then makes a forecast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.speculation.candidate_shapes import candidate_shapes, is_chain, suits
from verifier_svc.speculation.controller_log import LoggedTimes, Record
from verifier_svc.speculation.path_acceptance import FIRST_CHANCE, PathAcceptance
from verifier_svc.speculation.shape_costs import ShapeCosts

# How much better a shape may be than predicted: never measured at this batch; measured just now,
# and long ago. Plain decode is what drafts must never fall behind.
UNKNOWN_DOUBT, UNKNOWN_PLAIN_DOUBT = 0.15, 0.3
LEAST_DOUBT, MOST_DOUBT = 0.02, 0.15
LONG_AGO = 1024
# Weight of the time since the last decision in what prompts take.
PROMPT_SMOOTHING = 0.05
# A shape whose steps, with the prompts that its tokens bring along, exceed this share of the limit
# counts for less: by the square root of the excess, and for so much at least. In a full batch long
# drafts and short ones yield nearly as many tokens a second, but the long ones leave less room for
# prompts, which then wait. With long prompts it is the other way round: fewer tokens a step mean more
# steps over the same contexts. So this only decides between shapes that are nearly as fast.
MOST_FULL, LEAST_ROOM = 0.9, 0.97


class Forecast(NamedTuple):
    """The predicted speeds that one decision compares, in tokens a second of one row.

    Attributes:
        step: the number of the step for which the decision is made.
        batch: how many sequences it has.
        standing: the shape that stands until then.
        rates: what each shape yields; 0 where it cannot run.
        rooms: what that counts for; less than 1 where steps leave too little room for prompts.
        speeds: rates times rooms.
    """

    step: int
    batch: int
    standing: Shape
    rates: Mapping[Shape, float]
    rooms: Mapping[Shape, float]
    speeds: Mapping[Shape, float]


class ShapeSpeeds:
    """Predicts how fast a batch is in each shape. Only the engine thread uses it."""

    def __init__(
        self,
        bounds: TreeBounds,
        verify_s: Callable[[int], float],
        *,
        limit_s: float,
        log: Callable[[Record], None] | None,
    ) -> None:
        """Args are the controller's."""
        self.shapes = candidate_shapes(bounds)
        self._limit_s, self._log = limit_s, log
        self._costs = ShapeCosts(verify_s if log is None else LoggedTimes(verify_s, log))
        self._acceptance = PathAcceptance(max(bounds.max_depth, 1))
        self._observed_at: dict[Shape, int] = {}
        # Seconds of prompts for each token of output, and since the last decision: of all prompts.
        self._prompt_s = self._prompts_s = 0.0
        # Since the last decision: walks by shape, matched and drafted levels; steps by shape.
        self._walks: defaultdict[Shape, defaultdict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
        self._observed_steps: defaultdict[Shape, int] = defaultdict(int)

    # ---- what steps show ----

    def observe_step(self, shape: Shape, batch: int, seconds: float, num_prompt_tokens: int) -> None:
        """Learn what a step took, and count it until the next decision."""
        self._costs.observe(shape, batch, seconds, num_prompt_tokens)
        if num_prompt_tokens:
            self._prompts_s += self._costs.prompt_s(num_prompt_tokens)
        self._observed_steps[shape] += 1
        if self._log is not None:
            self._log(("step", *shape, batch, seconds, num_prompt_tokens))

    def observe_walk(self, shape: Shape, num_matched: int, depth: int, num_rows: int) -> None:
        """Count a walk until the next decision."""
        if depth > 0:
            self._walks[shape][num_matched, depth] += num_rows

    def learn(self, step: int, batch: int, standing: Shape) -> None:
        """Learn from what was observed since the last decision.

        Args:
            step: the number of the step for which the next decision is made.
            batch: the sequences of the last decision.
            standing: the shape that has stood since then.
        """
        num_steps = max(sum(self._observed_steps.values()), 1)
        if self._log is not None:
            for shape, walks in self._walks.items():
                for (num_matched, depth), count in walks.items():
                    self._log(("walks", *shape, num_matched, depth, count))
        self._acceptance.pass_steps(num_steps, set(self._walks))
        for shape, walks in self._walks.items():
            is_probe = shape != standing != NO_DRAFT
            steps = max(self._observed_steps[shape], 1)
            self._acceptance.observe(shape, walks, steps, max(batch, 1), is_probe=is_probe)
        for shape in self._observed_steps:
            self._observed_at[shape] = step
        tokens = sum(max(batch, 1) * self._acceptance.tokens(shape) * n for shape, n in self._observed_steps.items())
        if tokens:
            self._prompt_s += PROMPT_SMOOTHING * (self._prompts_s / tokens - self._prompt_s)
            self._prompts_s = 0.0
        self._walks.clear()
        self._observed_steps.clear()

    # ---- predictions ----

    def forecast(self, step: int, batch: int, standing: Shape) -> Forecast:
        """Predict the speeds of all shapes for the next decision."""
        rates = {shape: self._rate(shape, batch) for shape in {NO_DRAFT, *self.shapes}}
        rooms = {shape: self._room(shape, batch) for shape in rates}
        speeds = {shape: rate * rooms[shape] for shape, rate in rates.items()}
        return Forecast(step, batch, standing, rates, rooms, speeds)

    def hope(self, shape: Shape, forecast: Forecast) -> float:
        """Return the speed of a shape with good luck."""
        speed = forecast.speeds[shape]
        if forecast.standing == NO_DRAFT:
            # Nothing was verified for a while: the text may suit the drafter better now. Chains
            # find that out.
            if not is_chain(shape):
                return 0.0
            batch = forecast.batch
            speed = self._rate(shape, batch, at_least=FIRST_CHANCE) * self._room(shape, batch)
        return speed * (1 + self._doubt(shape, forecast))

    def is_measured(self, shape: Shape, batch: int) -> bool:
        """Return whether a step of this shape was measured at such a batch size."""
        return self._costs.weight(shape, batch) > 0

    def step_s(self, shape: Shape, batch: int) -> float:
        """Return the seconds that a step of ``batch`` sequences should take without prompts."""
        return self._costs.estimate(shape, batch)

    def draft_s(self, shape: Shape, batch: int) -> float:
        """Return the seconds of a step of this shape beside the target's pass."""
        return max(self._costs.estimate(shape, batch) - self._costs.verify(batch * shape.rows), 0.0)

    def tokens(self, shape: Shape) -> float:
        """Return the tokens that a row of this shape yields a step."""
        return self._acceptance.tokens(shape)

    def _rate(self, shape: Shape, batch: int, *, at_least: float = 0.0) -> float:
        """Return one row's predicted tokens a second, with the prompts that tokens bring along.

        Tokens of whatever shape bring as many, so prompts change no order. They damp its gain.
        """
        has_choice = len(self.shapes) > 1
        if has_choice and not suits(shape, batch):
            return 0.0
        tokens = self._acceptance.tokens(shape, at_least=at_least)
        return tokens / self._full_step_s(shape, batch, tokens)

    def _room(self, shape: Shape, batch: int) -> float:
        """Return what a shape's speed counts for.

        It is less than 1 if the shape's steps leave too little room for prompts.
        """
        step_s = self._full_step_s(shape, batch, self._acceptance.tokens(shape))
        if not self._prompt_s or step_s <= MOST_FULL * self._limit_s:
            return 1.0
        return max(math.sqrt(MOST_FULL * self._limit_s / step_s), LEAST_ROOM)

    def _full_step_s(self, shape: Shape, batch: int, tokens: float) -> float:
        """Return the seconds of a step in which each row yields so many tokens.

        They include the prompts that the tokens bring along.
        """
        return self._costs.estimate(shape, batch) + tokens * batch * self._prompt_s

    def _doubt(self, shape: Shape, forecast: Forecast) -> float:
        """Return the share by which a shape may be better than predicted.

        It grows with the time since the shape was measured.
        """
        if not self.is_measured(shape, forecast.batch):
            return UNKNOWN_PLAIN_DOUBT if shape == NO_DRAFT else UNKNOWN_DOUBT
        age = min((forecast.step - self._observed_at.get(shape, 0)) / LONG_AGO, 1.0)
        return LEAST_DOUBT + age * (MOST_DOUBT - LEAST_DOUBT)
