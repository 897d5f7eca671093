"""Choose the shape in which a whole batch drafts: nothing, a chain, or a tree.

It compares predicted tokens a second (``shape_speeds``). The first steps draft, whatever the
drafter is believed to be worth. Later another shape takes over if it is better by a margin. Now and
then a few steps probe a shape that may have become better. A budget (``probe_budget``) keeps such
probes rare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.speculation.candidate_shapes import is_chain, suits
from verifier_svc.speculation.controller_log import Record
from verifier_svc.speculation.probe_budget import ProbeBudget, probe_steps
from verifier_svc.speculation.shape_speeds import Forecast, ShapeSpeeds

# Steps for which a choice holds, and the same at first, for some walks of the first shape.
DECIDE_EVERY = 8
FIRST_WALKS = 12
# Rows from which a few steps of a short chain tell enough.
MANY_ROWS = 16
# A batch that has grown or shrunk by this factor is decided for at once.
OTHER_BATCH = 1.25
# Another shape must be better by this much. It must have been for so many steps since the last
# change, unless the gain is large: a change costs about one step.
LEAST_GAIN = 1.03
# Drafts must not fall behind plain decode: they replace it for more and yield to it for less.
GAIN_OVER_PLAIN, GAIN_OF_PLAIN = 1.04, 1.01
LARGE_GAIN = 1.10
STAY = 24
# Steps after a probe until its last result has been read.
PROBE_RESULTS = 3


class Reason(StrEnum):
    """Why the present shape was chosen."""

    FIXED = "fixed"
    FIRST_STEPS = "first_steps"
    DRAFTS_PAY = "drafts_pay"
    DRAFTS_DO_NOT_PAY = "drafts_do_not_pay"
    PROBE = "probe"


class Controller:
    """The controller of one drafter with a model. Only the engine thread uses it."""

    def __init__(
        self,
        bounds: TreeBounds,
        verify_s: Callable[[int], float],
        *,
        limit_s: float = math.inf,
        log: Callable[[Record], None] | None = None,
    ) -> None:
        """
        Args:
            verify_s: measured seconds of the target's pass by rows; infinite if it cannot run them.
            limit_s: seconds that a step should take at most with its prompts.
            log: gets all that the controller learns and decides, for ``replay`` to decide the same.
        """
        self._log = log
        if log is not None:
            log(("bounds", bounds.max_nodes, bounds.num_steps, bounds.branches, limit_s))
        self._speeds = ShapeSpeeds(bounds, verify_s, limit_s=limit_s, log=log)
        self._budget = ProbeBudget(self._speeds)
        self.shapes = self._speeds.shapes
        self._is_fixed = len(self.shapes) == 1
        self.reason = Reason.FIXED if self._is_fixed else Reason.FIRST_STEPS
        # The shape of the last step, and the one that stands while others are probed.
        self._shape = self._standing = self.shapes[0]
        # What the last decision compared.
        self._forecast = Forecast(0, 0, self._standing, {}, {}, {})
        self._num_steps = 0
        self._decide_at = 0
        self._standing_since = 0
        self._has_begun = False
        self._num_switches = self._num_probes = 0

    def choose(self, batch: int) -> Shape:
        """Return the shape in which ``batch`` sequences draft in the next step.

        Call this once a step.
        """
        if batch < 1:
            return self._shape
        self._num_steps += 1
        former = self._forecast.batch
        # A batch that has grown by little may be too large for its trees.
        is_other_batch = batch > former * OTHER_BATCH or batch * OTHER_BATCH < former or not suits(self._shape, batch)
        if self._num_steps >= self._decide_at or (is_other_batch and not self._is_fixed):
            self._decide(batch, is_other_batch=is_other_batch)
        if self._log is not None:
            self._log(("choose", batch, *self._shape))
        return self._shape

    def observe_step(self, shape: Shape, batch: int, seconds: float, *, num_prompt_tokens: int = 0) -> None:
        """Learn what a step took: ``seconds`` from the results of the step before to its own."""
        if batch < 1:
            return
        self._speeds.observe_step(shape, batch, seconds, num_prompt_tokens)
        self._budget.save(seconds)

    def observe_walk(self, shape: Shape, num_matched: int, depth: int, num_rows: int = 1) -> None:
        """Learn that ``num_matched`` tokens of a path were accepted in drafts of ``depth`` levels.

        Of shared rows, levels that got no row count as missed.
        """
        self._speeds.observe_walk(shape, num_matched, depth, num_rows)

    def step_s(self, shape: Shape, batch: int) -> float:
        """Return the seconds that a step of ``batch`` sequences should take without prompts."""
        return self._speeds.step_s(shape, batch)

    def expected_tokens(self, shape: Shape) -> float:
        """Return the tokens that a row of this shape yields a step."""
        return self._speeds.tokens(shape)

    def draft_s(self, shape: Shape, batch: int) -> float:
        """Return the seconds of a step of this shape beside the target's pass."""
        return self._speeds.draft_s(shape, batch)

    def explain(self) -> Mapping[str, str | float]:
        """Return the figures behind the present choice.

        Tokens a second are for the whole batch.
        """
        batch, rates = self._forecast.batch, self._forecast.rates
        return {
            "shape": self._shape.name,
            "reason": self.reason.value,
            "batch": batch,
            "tokens_per_step": self._speeds.tokens(self._shape),
            "tokens_per_second": batch * rates.get(self._shape, 0.0),
            "plain_tokens_per_second": batch * rates.get(NO_DRAFT, 0.0),
            "steps": self._num_steps,
            "switches": self._num_switches,
            "probes": self._num_probes,
        }

    # ---- decisions ----

    def _decide(self, batch: int, *, is_other_batch: bool) -> None:
        self._speeds.learn(self._num_steps, self._forecast.batch, self._standing)
        self._forecast = self._speeds.forecast(self._num_steps, batch, self._standing)
        self._decide_at = self._num_steps + DECIDE_EVERY
        if self._is_fixed:
            return
        if not self._has_begun:
            self._begin()
            return
        if self.reason is Reason.PROBE:
            self._end_probe()
            if not is_other_batch:
                return
        self._budget.pay(self._forecast)
        if not self._switch() and self._budget.is_due(self._num_steps):
            self._consider_probe()

    def _begin(self) -> None:
        """Draft a chain of middle depth or less, because only use shows a drafter's worth."""
        self._has_begun = True
        batch, speeds = self._forecast.batch, self._forecast.speeds
        paying = [shape for shape in self.shapes if is_chain(shape) and speeds[shape] > speeds[NO_DRAFT]]
        if paying:
            shape = self._chain_to_try(paying)
            self._budget.owe(shape)
            self._stand(shape, Reason.FIRST_STEPS)
            self._decide_at = self._num_steps + max(FIRST_WALKS // batch, PROBE_RESULTS) + PROBE_RESULTS
        else:
            self._stand(NO_DRAFT, Reason.DRAFTS_DO_NOT_PAY)
            self._budget.wait_until(self._num_steps + DECIDE_EVERY)

    def _switch(self) -> bool:
        """Change to the fastest shape if that pays; return whether it did."""
        speeds = self._forecast.speeds
        has_stayed = self._num_steps - self._standing_since >= STAY
        # Where the fastest shape is not worth a change, plain decode may be.
        for shape in (max(self.shapes, key=speeds.__getitem__), NO_DRAFT):
            if speeds[shape] >= speeds[self._standing] * (self._least_gain(shape) if has_stayed else LARGE_GAIN):
                break
        else:
            self._stand(self._standing)
            return False
        self._num_switches += 1
        self._budget.shorten_pauses()
        if self._speeds.is_measured(NO_DRAFT, self._forecast.batch):
            self._budget.pause(self._num_steps)
        self._stand(shape)
        return True

    def _least_gain(self, shape: Shape) -> float:
        """Return how much better this shape must be to take over."""
        if self._standing == NO_DRAFT:
            return GAIN_OVER_PLAIN
        if shape == NO_DRAFT:
            return GAIN_OF_PLAIN
        # A shape that leaves more room for prompts has an advantage already.
        rooms = self._forecast.rooms
        return 1.0 if rooms[shape] > rooms[self._standing] else LEAST_GAIN

    def _stand(self, shape: Shape, reason: Reason | None = None) -> None:
        if shape != self._standing:
            self._standing_since = self._num_steps
        self._shape = self._standing = shape
        self.reason = reason or (Reason.DRAFTS_PAY if shape != NO_DRAFT else Reason.DRAFTS_DO_NOT_PAY)

    def _consider_probe(self) -> None:
        """Begin a probe if a shape may beat its prediction and earlier probes are paid for."""
        forecast = self._forecast
        hopes = {shape: self._speeds.hope(shape, forecast) for shape in self.shapes if shape != forecast.standing}
        hopeful = [shape for shape, hope in hopes.items() if hope > forecast.speeds[forecast.standing]]
        if NO_DRAFT in hopeful and not self._speeds.is_measured(NO_DRAFT, forecast.batch):
            # Drafts must not fall behind plain decode, so what that takes is found out at once.
            self._begin_probe(NO_DRAFT)
        elif hopeful or self._budget.allows_hopeless(self._num_steps - self._standing_since):
            for shape in self._shapes_to_probe(hopes, hopeful):
                if self._budget.affords(shape, forecast):
                    self._begin_probe(shape)
                    break
        else:
            self._budget.back_off(self._num_steps)

    def _shapes_to_probe(self, hopes: Mapping[Shape, float], hopeful: Sequence[Shape]) -> list[Shape]:
        """Return the shapes that a probe may try, the best one first."""
        if not hopeful:
            return [max(hopes, key=self._forecast.speeds.__getitem__)]
        if self._standing == NO_DRAFT:
            return [self._chain_to_try(hopeful), hopeful[0]]
        return [max(hopeful, key=hopes.__getitem__)]

    def _chain_to_try(self, paying: Sequence[Shape]) -> Shape:
        """Return the one of these chains by which to find out whether the text suits the drafter.

        A few rows need a long chain to tell much. Many tell enough by a short one, and a
        long one costs much.
        """
        middle = (self.shapes[-1].depth + 1) // 2
        short = [shape for shape in paying if shape.depth <= middle]
        return short[-1] if short and self._forecast.batch < MANY_ROWS else paying[0]

    def _begin_probe(self, shape: Shape) -> None:
        self._num_probes += 1
        self._shape, self.reason = shape, Reason.PROBE
        self._decide_at = self._num_steps + probe_steps(self._forecast.batch)
        self._budget.owe(shape)
        self._budget.back_off(self._num_steps)

    def _end_probe(self) -> None:
        """Go back to the shape that stands; the last results of the probe are still to come."""
        self._stand(self._standing)
        self._decide_at = self._num_steps + PROBE_RESULTS
