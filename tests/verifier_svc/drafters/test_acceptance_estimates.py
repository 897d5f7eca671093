"""Acceptance estimates start at the drafter's scores and follow what is accepted.

Waits are fitted by a line over the depth.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from verifier_svc.drafters import acceptance_estimates
from verifier_svc.drafters.acceptance_estimates import AcceptanceEstimates, AcceptanceRate, bounded
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.request import DEFAULT_STEPS, Shape, TreeBounds
from verifier_svc.drafters.waits import DraftTimes


@pytest.fixture(autouse=True, params=[0, 100])
def _few_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at all scores as an array, or one by one."""
    monkeypatch.setattr(acceptance_estimates, "FEW_NODES", request.param)


def chances(estimates: AcceptanceEstimates, scores: list[float], parents: list[int]) -> list[float]:
    """Return the chances of a tree's nodes."""
    return bounded(estimates.of_scores(np.array(scores, np.float32)), parents)


def test_a_new_drafter_is_believed() -> None:
    probabilities = [1.0, 0.83, 0.5, 0.07]
    scores = list(map(math.log, probabilities))
    assert chances(AcceptanceEstimates(), scores, [-1, 0, 1, 2]) == pytest.approx(probabilities)


@pytest.mark.parametrize("really", [0.1, 0.5, 0.9])
def test_estimates_become_what_is_accepted(really: float) -> None:
    """The drafter's own scores do not matter in the end."""
    estimates, rng = AcceptanceEstimates(), random.Random(1)
    score = math.log(0.75)
    for _ in range(2000):
        estimates.observe([score], [rng.random() < really])
    found = chances(estimates, [0.0, score], [-1, 0])
    assert found[0] == 1.0 and abs(found[1] - really) < 0.08


def test_no_node_has_a_better_chance_than_its_parent() -> None:
    """Even if the drafter's most modest scores have proved to be the best."""
    estimates = AcceptanceEstimates()
    high, low = math.log(0.75), math.log(0.35)
    for _ in range(500):
        estimates.observe([high, low], [False, True])
    parent, child, other = chances(estimates, [0.0, high, low, low], [-1, 0, 1, 0])[1:]
    assert parent == child < 0.1 and other > 0.9


def test_scores_beyond_what_a_chance_can_be_do_no_harm() -> None:
    estimates = AcceptanceEstimates()
    scores, siblings = [0.0, 5.0, -math.inf, math.inf], [-1, 0, 0, 0]
    assert chances(estimates, scores, siblings) == [1.0, 1.0, 0.0, 1.0]
    assert estimates.of_scores(np.array([math.nan], np.float32)) == [0.0]
    estimates.observe(scores[1:], [True, False, True])
    assert all(map(math.isfinite, chances(estimates, scores, siblings)))


def test_waits_are_a_line_over_the_depth() -> None:
    times = DraftTimes()
    assert times.estimate(3, 1) == 0.0
    times.observe(2, 1, 0.0005)
    assert times.estimate(2, 1) == times.estimate(5, 1) == pytest.approx(0.0005)
    for number in range(400):
        depth = 1 + number % 5
        times.observe(depth, 1, 0.0002 + 0.0001 * depth)
    assert times.estimate(1, 1) == pytest.approx(0.0003, rel=0.02)
    assert times.estimate(5, 1) == pytest.approx(0.0007, rel=0.02)
    before = times.estimate(3, 1)
    times.observe(3, 1, 1.0)
    assert times.estimate(3, 1) < 1.5 * before, "one wait that was disturbed says little"


def test_waits_are_known_by_rows_and_those_never_waited_for_are_taken_as_short() -> None:
    times = DraftTimes()
    times.observe(3, 8, 0.008)
    assert times.estimate(3, 5) == times.estimate(3, 8) == times.estimate(3, 64) == pytest.approx(0.008)
    assert times.estimate(3, 1) == pytest.approx(0.001)
    times.observe(3, 1, 0.002)
    assert times.estimate(3, 1) == times.estimate(3, 2) == pytest.approx(0.002)
    assert times.estimate(3, 8) == pytest.approx(0.008), "a wait for one row says nothing of eight"


def test_a_wait_that_was_long_ago_is_believed_ever_less_until_the_next() -> None:
    times = DraftTimes()
    times.observe(3, 1, 0.002)
    times.observe(3, 8, 10.0)
    times.fade(1, 10_000)
    assert times.estimate(3, 8) == 10.0, "steps of one row say nothing of eight"
    times.observe(3, 1, 0.002)
    times.fade(8, 1400)
    assert times.estimate(3, 8) == pytest.approx(5.0, rel=0.01)
    times.fade(8, 100_000)
    assert times.estimate(3, 8) == pytest.approx(0.002), "no faster than fewer rows"
    times.observe(3, 8, 0.008)
    assert times.estimate(3, 8) > 0.002


def test_shapes_by_flag_are_exact_and_others_follow_the_reach() -> None:
    fixed = TreeBounds(16, 5, 4)
    assert fixed.of_row(True, 1, 15) == fixed.of_row(True, 9, 15) == Shape(16, 5, 4)
    assert fixed.of_row(True, 5, 3) == Shape(4, 3, 4), "never more than may still be emitted"
    free = TreeBounds(8)
    assert free.of_row(True, 2, 7).depth == 2 and free.of_row(True, 40, 7).depth == DEFAULT_STEPS
    assert free.of_row(True, 2, 7).nodes < free.of_row(True, 5, 7).nodes <= 8
    assert free.of_row(False, 3, 7) == Shape(4, 3, 8), "without a model reach counts tokens"
    assert free.of_row(False, 3, 2) == Shape(3, 2, 8)


def test_rows_that_are_observed_together_count_like_rows_one_by_one() -> None:
    one_by_one, together = AcceptanceRate(), AcceptanceRate()
    for _ in range(5):
        one_by_one.observe(2, 3)
    one_by_one.observe(0, 3)
    together.observe(2, 3, 5)
    together.observe(0, 3)
    assert together.value == pytest.approx(one_by_one.value)
    counted, at_once = DrafterCounters(), DrafterCounters()
    for _ in range(5):
        counted.add(3, (1, 2))
    at_once.add(3, (1, 2), 5)
    assert at_once == counted and counted.accepted_per_position == [5, 5]
