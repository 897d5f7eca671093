"""The cost curve: straight lines between measured counts, moved by what runs."""

from __future__ import annotations

import pytest

from verifier_svc.speculation.step_costs import StepCosts


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


def test_one_disturbed_step_says_little() -> None:
    costs = StepCosts({1: 2.0, 8: 4.0})
    costs.observe(1, 200.0)
    assert costs.estimate(1) < 2.5


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        StepCosts({})
