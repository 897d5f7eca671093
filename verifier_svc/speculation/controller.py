"""Chooses the shape in which a whole batch drafts: nothing, a chain, or a tree.

It compares predicted tokens a second: the tokens that a shape yields over the seconds of its steps, both learned from
the steps before. The first steps draft, whatever the drafter is believed to be worth. Later another shape takes over
if it is better by a margin. What may have become better meanwhile is probed for a few steps, rarely enough that a
probe in vain costs 1% of the time at most, and ever more rarely while probes fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.speculation.candidate_shapes import is_chain
from verifier_svc.speculation.controller_log import Record
from verifier_svc.speculation.shape_speeds import Forecast, ShapeSpeeds

# Steps for which a choice holds, and the same at first: until there are some walks of the first shape.
DECIDE_EVERY = 8
FIRST_WALKS = 12
# Rows from which a few steps of a short chain tell enough.
MANY_ROWS = 16
# A batch that has grown or shrunk by this factor is decided for at once.
OTHER_BATCH = 1.25
# Another shape must be better by this much. It must have been for so many steps since the last change, unless the
# gain is large: a change costs about one step.
LEAST_GAIN = 1.03
# Plain decode is what drafts must not fall behind: they replace it for more and give way to it for less.
GAIN_OVER_PLAIN, GAIN_OF_PLAIN = 1.04, 1.01
LARGE_GAIN = 1.10
STAY = 24
# Consecutive steps and walks of a probe at least; then steps until its last result has been read.
PROBE_STEPS, PROBE_WALKS = 6, 12
PROBE_RESULTS = 3
# Steps until the first probe, and until the next one at most where each fails.
FIRST_PROBE_AFTER = 32
RAREST_PROBE_AFTER = 256
# Share of the time that probes in vain may cost.
PROBE_SHARE = 0.007
# Steps that may be lost at once, if none were lost for long.
MOST_SAVED = 64


class Reason(StrEnum):
    """Why the present shape was chosen."""

    FIXED = "fixed"
    FIRST_STEPS = "first_steps"
    DRAFTS_PAY = "drafts_pay"
    DRAFTS_DO_NOT_PAY = "drafts_do_not_pay"
    PROBE = "probe"


class Controller:  # large: the figures of one decision and of its probes
    """The controller of one drafter with a model. Used by the engine thread alone."""

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
            verify_s: measured seconds of the target's pass by rows; infinite where it cannot run so many.
            limit_s: seconds that a step should take at most with its prompts.
            log: is given all that the controller learns and decides, so that ``replay`` decides the same.
        """
        self._log = log
        if log is not None:
            log(("bounds", bounds.max_nodes, bounds.num_steps, bounds.branches, limit_s))
        self._speeds = ShapeSpeeds(bounds, verify_s, limit_s=limit_s, log=log)
        self.shapes = self._speeds.shapes
        self._is_fixed = len(self.shapes) == 1
        self.reason = Reason.FIXED if self._is_fixed else Reason.FIRST_STEPS
        # The shape of the last step, and the one that stands while others are probed.
        self._shape = self._standing = self.shapes[0]
        # Of the last decision.
        self._forecast = Forecast(0, 0, self._standing, {}, {})
        self._num_steps = 0
        self._decide_at = 0
        self._standing_since = 0
        self._has_begun = False
        self._probe: Shape | None = None
        # The shape of a probe that has ended and was not paid for yet.
        self._probed: Shape | None = None
        self._probe_at = FIRST_PROBE_AFTER
        self._probe_pause = FIRST_PROBE_AFTER
        # What may be lost by probes now.
        self._saved_s = 0.0
        self._num_switches = self._num_probes = 0

    def choose(self, batch: int) -> Shape:
        """Return the shape in which ``batch`` sequences draft in the next step. Called once a step."""
        if batch < 1:
            return self._shape
        self._num_steps += 1
        former = self._forecast.batch
        is_other_batch = batch > former * OTHER_BATCH or batch * OTHER_BATCH < former
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
        self._saved_s = min(self._saved_s + PROBE_SHARE * seconds, MOST_SAVED * seconds)

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
        """Return the figures behind the present choice. Tokens a second are those of the whole batch."""
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
        if self._probe is not None:
            self._end_probe()
            if not is_other_batch:
                return
        if self._probed is not None and self._forecast.speeds[self._probed]:
            self._saved_s -= self._lost_s(self._probed)
            self._probed = None
        if not self._switch() and self._num_steps >= self._probe_at:
            self._consider_probe()

    def _begin(self) -> None:
        """Draft a chain of middle depth or less: what the drafter is worth is found out by using it."""
        self._has_begun = True
        batch, speeds = self._forecast.batch, self._forecast.speeds
        paying = [shape for shape in self.shapes if is_chain(shape) and speeds[shape] > speeds[NO_DRAFT]]
        if paying:
            self._probed = self._chain_to_try(paying)
            self._stand(self._probed, Reason.FIRST_STEPS)
            self._decide_at = self._num_steps + max(FIRST_WALKS // batch, PROBE_RESULTS) + PROBE_RESULTS
        else:
            self._stand(NO_DRAFT, Reason.DRAFTS_DO_NOT_PAY)
            self._probe_at = self._num_steps + DECIDE_EVERY

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
        self._probe_pause = FIRST_PROBE_AFTER
        if self._speeds.is_measured(NO_DRAFT, self._forecast.batch):
            self._probe_at = self._num_steps + self._probe_pause
        self._stand(shape)
        return True

    def _least_gain(self, shape: Shape) -> float:
        """Return how much better this shape must be to take over."""
        if self._standing == NO_DRAFT:
            return GAIN_OVER_PLAIN
        return GAIN_OF_PLAIN if shape == NO_DRAFT else LEAST_GAIN

    def _stand(self, shape: Shape, reason: Reason | None = None) -> None:
        if shape != self._standing:
            self._standing_since = self._num_steps
        self._shape = self._standing = shape
        self.reason = reason or (Reason.DRAFTS_PAY if shape != NO_DRAFT else Reason.DRAFTS_DO_NOT_PAY)

    def _consider_probe(self) -> None:
        """Begin a probe if a shape may be better than predicted, and the probes before have been paid for."""
        speeds = self._forecast.speeds
        hopes = {shape: self._speeds.hope(shape, self._forecast) for shape in self.shapes if shape != self._standing}
        hopeful = [shape for shape, hope in hopes.items() if hope > speeds[self._standing]]
        if hopeful and self._standing == NO_DRAFT:
            shape = self._chain_to_try(hopeful)
        elif hopeful:
            shape = max(hopeful, key=hopes.__getitem__)
        else:
            # Not even good luck would do: the load must change, or what was measured was disturbed.
            if self._num_steps - self._standing_since < RAREST_PROBE_AFTER or self._probe_pause < RAREST_PROBE_AFTER:
                self._back_off()
                return
            shape = max(hopes, key=speeds.__getitem__)
        if NO_DRAFT in hopeful and not self._speeds.is_measured(NO_DRAFT, self._forecast.batch):
            # Drafts must not fall behind plain decode, so what that takes is found out at once.
            shape = NO_DRAFT
        elif self._lost_s(shape) > self._saved_s:
            shape = hopeful[0] if hopeful and self._standing == NO_DRAFT else shape
            if self._lost_s(shape) > self._saved_s:
                return
        self._num_probes += 1
        self._probe = self._shape = shape
        self.reason = Reason.PROBE
        self._decide_at = self._num_steps + _probe_steps(self._forecast.batch)
        self._back_off()

    def _lost_s(self, shape: Shape) -> float:
        """Return the seconds that a probe of this shape loses. The changes there and back cost a step each."""
        batch, speeds = self._forecast.batch, self._forecast.speeds
        if not speeds[shape]:
            return math.inf
        if not speeds[self._standing]:
            # What stands cannot run at this batch.
            return 0.0
        seconds, tokens = self._speeds.step_s(shape, batch), self._speeds.tokens(shape)
        lost_s = tokens * (1 / speeds[shape] - 1 / speeds[self._standing])
        return _probe_steps(batch) * max(lost_s, 0.0) + seconds + self._speeds.step_s(self._standing, batch)

    def _chain_to_try(self, paying: Sequence[Shape]) -> Shape:
        """Return the one of these chains by which to find out whether the text suits the drafter.

        A few rows need a long chain to tell much. Many tell enough by a short one, and a long one costs much.
        """
        middle = (self.shapes[-1].depth + 1) // 2
        short = [shape for shape in paying if shape.depth <= middle]
        return short[-1] if short and self._forecast.batch < MANY_ROWS else paying[0]

    def _end_probe(self) -> None:
        """Go back to the shape that stands; the last results of the probe are still to come."""
        self._probed, self._probe = self._probe, None
        self._stand(self._standing)
        self._decide_at = self._num_steps + PROBE_RESULTS

    def _back_off(self) -> None:
        self._probe_pause = min(2 * self._probe_pause, RAREST_PROBE_AFTER)
        self._probe_at = self._num_steps + self._probe_pause


def _probe_steps(batch: int) -> int:
    """Return the consecutive steps of a probe."""
    return max(PROBE_STEPS, PROBE_WALKS // batch)
