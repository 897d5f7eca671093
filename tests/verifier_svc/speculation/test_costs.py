"""A step verifies the draft nodes that make the most tokens a second over all rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.tree import DraftTree
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.drafters.waits import DraftTimes
from verifier_svc.scheduling.draft import Draft
from verifier_svc.speculation.costs import DraftCosts, StepBase, StepCosts
from verifier_svc.speculation.draft_round import ModelRound
from verifier_svc.speculation.plan import DraftPlan


def chain(*chances: float) -> Draft:
    """Return a chain whose nodes after the root have these chances, as far as their parents' allow."""
    count = 1 + len(chances)
    tree = DraftTree(np.arange(count, dtype=np.int32), np.arange(-1, count - 1, dtype=np.int32))
    return Draft(tree, [0] + [1] * len(chances), [0.0] * count, [1.0, *accumulate(chances, min)])


def costs_of(measured: dict[int, float]) -> DraftCosts:
    return DraftCosts(StepCosts(measured), TreeBounds(8))


def best_counts(costs: DraftCosts, drafts: list[Draft], batch: int) -> list[int]:
    return costs.best_counts(drafts, costs.base(batch), [1] * len(drafts))


def test_a_node_is_worth_what_it_costs_the_whole_batch() -> None:
    # One more row always takes 1 s. A plain step makes 0.8 tokens a second with 8 rows, and half a
    # token with one.
    costs = costs_of({1: 2.0, 64: 65.0})
    assert best_counts(costs, [chain(0.7, 0.6)], batch=8) == [1]
    assert best_counts(costs, [chain(0.9, 0.7)], batch=8) == [2]
    assert best_counts(costs, [chain(0.7, 0.6)], batch=1) == [3]


def test_the_likeliest_nodes_are_taken_whosever_they_are() -> None:
    # The next three rows are free, later ones are not.
    costs = costs_of({1: 1.0, 2: 1.0, 5: 1.0, 6: 9.0})
    assert best_counts(costs, [chain(0.5, 0.4), chain(0.9, 0.8, 0.3)], batch=2) == [2, 3]


def test_what_a_step_has_waited_makes_more_of_it_worthwhile() -> None:
    costs = costs_of({1: 2.0, 64: 65.0})
    drafter: Any = SimpleNamespace(counters=DrafterCounters(), record=SimpleNamespace(times=DraftTimes()))
    for waited_s, count in ((0.0, 1), (2.0, 2)):
        costs.begin_step([drafter], batch=1)
        drafter.counters.wait_seconds += waited_s
        costs.end_waits([drafter])
        assert best_counts(costs, [chain(0.4)], batch=1) == [count]


def model_drafter() -> Any:
    record = SimpleNamespace(times=DraftTimes())
    return SimpleNamespace(name="model", has_model=True, counters=DrafterCounters(), record=record)


def plan_of(costs: DraftCosts, tokens: float, batch: int, *, is_fixed: bool = False) -> DraftPlan:
    """Return a plan with seven drafted tokens. A step is expected to make ``tokens``.

    Its drafter answers within 1 s, however many rows ask.
    """
    times = SimpleNamespace(estimate=lambda depth, num_rows: 1.0)
    drafter: Any = SimpleNamespace(name="model", has_model=True, record=SimpleNamespace(times=times))
    bounds = TreeBounds(8, num_steps=7) if is_fixed else TreeBounds(8)
    rate = tokens / costs.relative([drafter], batch)[7]
    sequence: Any = tokens
    return DraftPlan(sequence, [drafter], 7, 7, True, bounds, rate)


def test_few_rows_do_not_make_all_others_wait() -> None:
    # A step takes 1 s for any number of rows, and waiting as long again.
    costs = costs_of({1: 1.0, 64: 1.0})
    for batch, expected, count in ((1, [5.0], 1), (8, [5.0], 0), (8, [5.0, 5.0], 0), (8, [5.0, 5.0, 5.0], 3)):
        assert len(costs.best_plans([plan_of(costs, tokens, batch) for tokens in expected], batch)) == count


def test_rows_for_which_a_step_does_not_wait_ask_for_nothing_unless_they_must() -> None:
    costs = costs_of({1: 1.0, 64: 1.0})
    model_round: Any = SimpleNamespace(_costs=costs)
    probe, likely, fixed = plan_of(costs, 1.0, 8), plan_of(costs, 5.0, 8), plan_of(costs, 5.0, 8, is_fixed=True)
    assert probe.is_probe and not likely.is_probe
    assert ModelRound.worth_waiting(model_round, [probe, likely, fixed], 8) == [probe, fixed]
    assert ModelRound.worth_waiting(model_round, [likely] * 3, 8) == [likely] * 3


def test_slow_steps_around_a_models_drafts_are_forgotten_while_there_are_none() -> None:
    """A busy machine made waiting for a model dear.

    Then nobody waits, so nothing shows that it is cheap again.
    """
    costs, drafter = costs_of({1: 1.0, 8: 1.0}), model_drafter()
    costs.observe_overhead(0.1, has_model=False)
    for _ in range(1000):
        costs.begin_step([drafter], batch=1)
        costs.observe_overhead(20.0, has_model=True)
    assert costs.relative([drafter], 1)[1] > 10.0
    for _ in range(10_000):
        costs.begin_step([drafter], batch=1)
    assert costs.relative([drafter], 1)[1] == pytest.approx(1.0, abs=0.2)


def test_the_first_disturbed_step_that_waits_for_a_model_says_little() -> None:
    costs, drafter = costs_of({1: 1.0, 8: 1.0}), model_drafter()
    costs.observe_overhead(0.1, has_model=False)
    costs.begin_step([drafter], batch=1)
    costs.observe_overhead(300.0, has_model=True)
    assert costs.relative([drafter], 1)[1] == pytest.approx(1.0, abs=0.1)


def test_nodes_whose_rows_the_step_has_anyway_are_free() -> None:
    costs = costs_of({1: 2.0, 64: 65.0})
    drafts = [chain(0.1, 0.1, 0.1), chain(0.9, 0.1)]
    # Three rows of the first sequence, one of the second, and two of others.
    assert costs.best_counts(drafts, StepBase(6, 4.5, 0.0), [3, 1]) == [3, 2]
    assert best_counts(costs, drafts, batch=4) == [1, 2]


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=4), min_size=1, max_size=4),
    st.integers(0, 4),
    st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
)
def test_no_other_choice_of_nodes_makes_more_tokens_a_second(
    chances: list[list[float]], num_plain: int, seconds: list[float]
) -> None:
    drafts = [chain(*row) for row in chances]
    batch = len(drafts) + num_plain
    curve = StepCosts(dict(zip((1, 4, 8, 24), np.cumsum(seconds).tolist(), strict=True)))
    counts = best_counts(DraftCosts(curve, TreeBounds(8)), drafts, batch)

    def rate(counts: list[int]) -> float:
        gained = sum(sum(draft.chances[1:count]) for draft, count in zip(drafts, counts, strict=True))
        return (batch + gained) / curve.estimate(batch + sum(counts) - len(counts))

    choices: list[list[int]] = [[]]
    for draft in drafts:
        choices = [[*choice, count] for choice in choices for count in range(1, draft.tree.num_nodes + 1)]
    assert rate(counts) == pytest.approx(max(map(rate, choices)))


def test_what_a_draft_promises_where_every_row_has_one_like_it() -> None:
    costs = costs_of({1: 2.0, 64: 65.0})
    # Two rows: plain 3 s a step; with one node each 5 s and 1.9 tokens a row.
    assert costs.best_rate(chain(0.9), 2) == pytest.approx(1.9 * 3 / 5)
    assert costs.best_rate(chain(0.1), 2) == 1.0


def test_between_and_past_measured_counts() -> None:
    costs = StepCosts({1: 2.0, 4: 2.6, 8: 3.4})
    assert costs.estimate(1) == 2.0
    assert costs.estimate(2) == pytest.approx(2.2)
    assert costs.estimate(8) == 3.4
    assert costs.estimate(16) == pytest.approx(5.0)


def test_one_measured_count_is_flat() -> None:
    assert StepCosts({1: 2.0}).estimate(9) == 2.0


def test_observations_move_the_curve_and_most_where_they_were_made() -> None:
    costs = StepCosts({1: 2.0, 8: 4.0})
    for _ in range(500):
        costs.observe(8, 8.0)
    assert costs.estimate(8) == pytest.approx(8.0, rel=0.05)
    assert 2.0 < costs.estimate(1) < 6.0


def test_rows_that_none_was_seen_of_do_not_look_cheap() -> None:
    """Plain steps of 8 rows that contexts and other processes slow down say as much of 16 rows."""
    costs = StepCosts({1: 2.0, 8: 4.0, 16: 8.0})
    for _ in range(500):
        costs.observe(8, 12.0)
    assert costs.estimate(16) == pytest.approx(2 * costs.estimate(8))


def test_a_count_between_two_moves_the_nearer_one_most() -> None:
    """Else the farther one would have to move by many times the error."""
    costs = StepCosts({1: 2.0, 8: 4.0, 16: 8.0})
    for _ in range(500):
        costs.observe(9, 9.0)
    assert costs.estimate(9) == pytest.approx(9.0, rel=0.01)
    assert 7.0 < costs.estimate(8) < 9.0 and 14.0 < costs.estimate(16) < 20.0


def test_what_more_rows_were_seen_to_cost_is_forgotten() -> None:
    """They are not tried while they look dear."""
    costs = StepCosts({1: 2.0, 8: 4.0, 16: 8.0, 32: 16.0})
    for _ in range(500):
        costs.observe(32, 200.0)
    assert costs.estimate(32) == pytest.approx(200.0, rel=0.01)
    for _ in range(500):
        costs.observe(8, 4.0)
    assert costs.estimate(8) == pytest.approx(4.0, rel=0.01)
    dear = costs.estimate(32)
    for _ in range(4000):
        costs.observe(8, 4.0)
    assert dear > 40.0 and costs.estimate(32) == pytest.approx(16.0, rel=0.05)


def test_what_long_contexts_taught_is_forgotten_while_drafts_run() -> None:
    """Steps with drafts say nothing of the curve, so nothing else would correct it."""
    measured = {1: 2.0, 8: 4.0, 16: 8.0, 32: 16.0}
    costs = StepCosts(measured)
    for _ in range(400):
        costs.observe(8, 20.0)
    learned = {rows: costs.estimate(rows) for rows in measured}
    assert learned[32] > 60.0
    for _ in range(400):
        costs.skip()
    assert {rows: costs.estimate(rows) for rows in measured} == learned
    for _ in range(1500):
        costs.skip()
    assert [costs.estimate(rows) for rows in measured] == pytest.approx(list(measured.values()), rel=0.05)
    # Steps that others come between are no long pause.
    for _ in range(400):
        costs.observe(8, 20.0)
        for _ in range(8):
            costs.skip()
    assert costs.estimate(8) == pytest.approx(20.0, rel=0.01)


def _costs_of(rows: int) -> float:
    """Return what so many rows cost, where more than four are dearer than at the start."""
    return (1.0 + 0.16 * rows) * (1.5 if rows > 4 else 1.0)


def _after(rows_of: Callable[[int], int], num_steps: int) -> StepCosts:
    """Return the curve after steps of these rows, in which times spread by 5%."""
    spread = random.Random(1)
    costs = StepCosts({rows: 1.0 + 0.16 * rows for rows in (1, 2, 4, 8, 16, 32, 64)})
    for step in range(num_steps):
        rows = rows_of(step)
        costs.observe(rows, _costs_of(rows) * spread.gauss(1.0, 0.05))
    return costs


def test_counts_that_no_step_has_do_not_drift() -> None:
    """Others pull them along, each by a part of its error."""
    kinds = (4, 4, 4, 6, 8, 12, 16, 20)
    costs = _after(lambda step: kinds[step % len(kinds)], 50_000)
    for rows in (1, 2, 4, 16, 20, 32, 64):
        assert costs.estimate(rows) == pytest.approx(_costs_of(rows), rel=0.15), rows


def test_counts_that_are_tried_rarely_are_learned() -> None:
    costs = _after(lambda step: 16 if step % 256 == 0 else 4, 30_000)
    assert costs.estimate(16) == pytest.approx(_costs_of(16), rel=0.1)


def test_one_disturbed_step_says_little() -> None:
    costs = StepCosts({1: 2.0, 8: 4.0})
    costs.observe(1, 200.0)
    assert costs.estimate(1) < 2.5


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        StepCosts({})
