"""Estimate what steps cost.

A plain step costs by its rows; one with drafts adds waits for drafters and other work.

For ordinary steps and look-ups. The controller of overlapped steps has its own
estimates: ``shape_costs.py``.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.scheduling.draft import Draft
from verifier_svc.speculation.plan import DraftPlan

# Weight of a new observation. Machines are shared and contexts grow: follow, but not every jump.
CURVE_SMOOTHING = 0.05
# If no step has had about so many rows for FORGET_AFTER steps, what was learned of their cost is
# forgotten, a share of it in each step. Probes and tries of look-ups come more often than that.
FORGET_AFTER, FORGETTING = 512, 0.005
# Weight of a new step in what steps take beside the pass and the waits.
OVERHEAD_SMOOTHING = 0.02
# How much each step lowers the belief that steps which wait for a model take longer.
OVERHEAD_FADING = 0.0005
# Steps for which costs are taken as they are: they move slowly, and a step has better to do.
HOLD_FOR = 16


class StepCosts:
    """Estimate the seconds of a step without prefill by its rows.

    Straight lines run between and past measured counts.
    """

    def __init__(self, measured: dict[int, float]) -> None:
        """``measured``: seconds by rows; at least one entry."""
        if not measured:
            raise ValueError("step costs need at least one measured row count")
        self._rows = sorted(measured)
        self._measured = [measured[rows] for rows in self._rows]
        self._seconds = list(self._measured)
        # Each over the one before, as measured at the start.
        self._growths = [1.0] + [right / left for left, right in pairwise(self._seconds)]
        # Steps so far, and the last one whose rows were nearest to each count.
        self._num_steps = 0
        self._seen_at = [0] * len(self._rows)

    def estimate(self, num_rows: int) -> float:
        """Return the seconds of a step of ``num_rows`` rows."""
        rows, seconds = self._rows, self._seconds
        if len(rows) == 1:
            return seconds[0]
        right = min(max(bisect.bisect_left(rows, num_rows), 1), len(rows) - 1)
        left = right - 1
        share = (num_rows - rows[left]) / (rows[right] - rows[left])
        return max(seconds[left] + share * (seconds[right] - seconds[left]), seconds[0] * 0.5)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Move the curve towards a step that ran.

        It moves as much at the step's rows and above, and less and less below.

        Contexts and other processes slow each row down. If a few rows showed it and more rows were
        believed to be as fast as ever, then rows beyond the few would look cheap.
        """
        ratio = seconds / self.estimate(num_rows)
        # A step of three times the estimate was disturbed from outside; it
        # says little of the next one.
        ratio = min(max(ratio, 1 / 3), 3.0)
        rows, known = self._rows, self._seconds
        right = min(bisect.bisect_left(rows, num_rows), len(rows) - 1)
        # Measured counts from the one on the left to the step's rows.
        share = min((num_rows - rows[right - 1]) / (rows[right] - rows[right - 1]), 1.0) if right else 1.0
        for i in range(right):
            known[i] *= 1 + CURVE_SMOOTHING / (1 + 2 * (right - 1 - i + share)) * (ratio - 1)
        growth = 1 + CURVE_SMOOTHING * (ratio - 1)
        known[right:] = [seconds * growth for seconds in known[right:]]
        self._forget_unseen(right if share >= 0.5 else right - 1)

    def skip(self) -> None:
        """Count a step that says nothing of the curve.

        After FORGET_AFTER of them in a row, forget a share of what was learned in each: what long
        contexts taught would else hold for short ones for as long as drafts run.
        """
        self._num_steps += 1
        if max(self._seen_at) < self._num_steps - FORGET_AFTER:
            for i, measured in enumerate(self._measured):
                self._seconds[i] += FORGETTING * (measured - self._seconds[i])

    def _forget_unseen(self, seen: int) -> None:
        """Count a step whose rows were nearest to the count ``seen``, and forget what is long ago.

        Rows that look dear are not tried, so nothing would show that they no longer are. And what
        other counts pull along drifts where nothing holds it. So such counts go back to what they
        were at the start beside their neighbours.
        """
        self._num_steps += 1
        self._seen_at[seen] = self._num_steps
        known, growths = self._seconds, self._growths
        before = self._num_steps - FORGET_AFTER
        for i in range(seen + 1, len(known)):
            if self._seen_at[i] < before:
                known[i] += FORGETTING * (known[i - 1] * growths[i] - known[i])
        for i in range(seen - 1, -1, -1):
            if self._seen_at[i] < before:
                known[i] += FORGETTING * (known[i + 1] / growths[i + 1] - known[i])


class StepBase(NamedTuple):
    """A step before its drafts are chosen: rows, expected tokens, and seconds beside the pass."""

    rows: int
    tokens: float
    seconds: float


class DraftCosts:
    """Costs of steps with drafts, measured while they run. Only the engine thread uses it.

    ``num_steps``: how often a step, or a run of overlapped steps, began.
    """

    def __init__(self, costs: StepCosts, bounds: TreeBounds) -> None:
        self._costs = costs
        self._bounds = bounds
        self.num_steps = 0
        # Seconds of a step outside the target's pass and the waits (asking, taking over,
        # publishing), by whether it waits for a model.
        self._overhead_s = {False: 0.0, True: 0.0}
        self._waited_s = 0.0
        # Seconds of a step by its rows, without waits, and the step at which they were estimated.
        self._seconds: dict[int, float] = {}
        self._seconds_from = 0
        # By drafters and batch size: the step at which they were estimated,
        # and relative costs by reach.
        self._cost_lists: dict[tuple[str, int], tuple[int, list[float]]] = {}

    def begin_step(self, drafters: Sequence[DrafterHandle], batch: int, num_steps: int = 1) -> None:
        """Begin a step of ``batch`` rows, ``num_steps`` after the last call."""
        self.num_steps += 1
        self._waited_s = -_wait_seconds(drafters)
        # Otherwise a disturbed time would end drafts for good: without them
        # there is nothing to learn from.
        excess_s = max(self._overhead_s[True] - self._overhead_s[False], 0.0)
        self._overhead_s[True] -= excess_s * (1 - (1 - OVERHEAD_FADING) ** num_steps)
        for drafter in drafters:
            drafter.record.times.fade(batch, num_steps)

    def end_waits(self, drafters: Sequence[DrafterHandle]) -> None:
        """End the waits of this step."""
        self._waited_s += _wait_seconds(drafters)

    def plain_step_s(self, batch: int) -> float:
        """Return the seconds of the target's pass over one row of each of ``batch`` sequences."""
        return self._costs.estimate(batch)

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of an ordinary step of so many decode rows.

        Its waits are as in the last one.
        """
        return self._step_s(num_rows) + max(self._waited_s, 0.0)

    def best_rate(self, draft: Draft, batch: int) -> float:
        """Return the speed of a draft's best part over plain decode.

        Each of ``batch`` rows is assumed to have one like it.
        """
        plain_s = self._step_s(batch)
        best, expected = 0.0, 0.0
        for count, chance in enumerate(sorted(draft.chances, reverse=True), start=1):
            expected += chance
            best = max(best, expected * plain_s / self._step_s(batch * count))
        return best

    def base(self, batch: int) -> StepBase:
        """Return a step of ``batch`` roots that has waited for drafts as long as this one has."""
        return StepBase(batch, float(batch), self._waited_s)

    def best_counts(self, drafts: Sequence[Draft], base: StepBase, free: Sequence[int]) -> list[int]:
        """Return how many nodes of each draft make a step fastest in tokens a second.

        The root is one of them.

        The likeliest nodes of all drafts are taken first, as long as the step gains by them: a node
        must be worth what it costs the whole batch.

        Args:
            base: the step without any further node.
            free: how many nodes of each draft the base has, with its root.
        """
        nodes = [
            (chance, row)
            for row, draft in enumerate(drafts)
            for chance in sorted(draft.chances, reverse=True)[free[row] :]
        ]
        nodes.sort(reverse=True)
        expected = base.tokens
        best, best_rate = 0, expected / (self._step_s(base.rows) + base.seconds)
        for count, (chance, _) in enumerate(nodes, start=1):
            expected += chance
            rate = expected / (self._step_s(base.rows + count) + base.seconds)
            if rate > best_rate:
                best, best_rate = count, rate
        counts = list(free)
        for _, row in nodes[:best]:
            counts[row] += 1
        return counts

    def _step_s(self, num_rows: int) -> float:
        """Return the seconds of a step that verifies so many rows, without waits."""
        if self.num_steps - self._seconds_from >= HOLD_FOR:
            self._seconds, self._seconds_from = {}, self.num_steps
        seconds = self._seconds.get(num_rows)
        if seconds is None:
            seconds = self._seconds[num_rows] = self._costs.estimate(num_rows) + self._overhead_s[False]
        return seconds

    def observe_overhead(self, seconds: float, *, has_model: bool) -> None:
        """Learn what a step took after the target's pass.

        Also learn whether it waited for a model meanwhile.
        """
        overhead_s = max(seconds - self._waited_s, 0.0)
        known = self._overhead_s[has_model] or self._overhead_s[False] or overhead_s
        # A step that took many times as long was disturbed from outside.
        self._overhead_s[has_model] = known + OVERHEAD_SMOOTHING * (min(overhead_s, 4 * known) - known)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Learn the cost of a step without prefill."""
        self._costs.observe(num_rows, seconds)

    def skip_step(self) -> None:
        """Count a step whose time says nothing of the target's pass alone."""
        self._costs.skip()

    def relative(self, drafters: Sequence[DrafterHandle], batch: int) -> list[float]:
        """Return the cost of a step by reach, over a plain step.

        In the step, ``batch`` rows verify drafts of that reach.

        ``drafters``: of one kind.
        """
        key = ",".join(drafter.name for drafter in drafters), batch
        counted_at, costs = self._cost_lists.get(key, (0, []))
        if not costs or self.num_steps - counted_at >= HOLD_FOR:
            has_model = drafters[0].has_model
            plain = self._costs.estimate(batch) + self._overhead_s[False]
            costs = [1.0]
            for reach in range(1, self._bounds.max_nodes):
                nodes = self._bounds.of_row(has_model, reach, reach).nodes
                costs.append(self._drafted_step_s(drafters, reach, batch * nodes, batch) / plain)
            self._cost_lists[key] = (self.num_steps, costs)
        return costs

    def best_plans(self, plans: Sequence[DraftPlan], batch: int) -> list[DraftPlan]:
        """Return the plans that make a step of ``batch`` rows fastest in tokens a second.

        All of them are models' plans.

        Those that promise most are taken first. All rows wait for the drafts, be
        they one row's or everybody's.
        """
        promised = [(plan.rate * self.relative(plan.drafters, batch)[plan.reach], plan) for plan in plans]
        promised.sort(key=lambda pair: -pair[0])
        best, tokens, rows = 0, float(batch), batch
        best_rate = tokens / (self._costs.estimate(batch) + self._overhead_s[False])
        for count, (expected, plan) in enumerate(promised, start=1):
            tokens += expected - 1
            rows += self._bounds.of_row(True, plan.reach, plan.reach).nodes - 1
            rate = tokens / self._drafted_step_s(plan.drafters, plan.reach, rows, count)
            if rate > best_rate:
                best, best_rate = count, rate
        return [plan for _, plan in promised[:best]]

    def _drafted_step_s(self, drafters: Sequence[DrafterHandle], reach: int, num_rows: int, num_drafting: int) -> float:
        """Return the seconds of a step of ``num_rows`` rows.

        It waits for drafts of ``num_drafting`` sequences.
        """
        seconds = self._costs.estimate(num_rows) + self._overhead_s[drafters[0].has_model]
        return seconds + self.wait_s(drafters, reach, num_drafting)

    def wait_s(self, drafters: Sequence[DrafterHandle], reach: int, num_rows: int) -> float:
        """Return the seconds that a step waits for drafts of so many rows.

        The drafters work side by side.
        """
        return max(
            drafter.record.times.estimate(self._bounds.of_row(True, reach, reach).depth, num_rows)
            if drafter.has_model
            else drafter.record.budget.wait_s
            for drafter in drafters
        )


def _wait_seconds(drafters: Sequence[DrafterHandle]) -> float:
    """Return the seconds of all waits so far."""
    return sum(drafter.counters.wait_seconds for drafter in drafters)
