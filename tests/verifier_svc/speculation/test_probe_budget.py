"""Probes spend what steps have saved, after pauses that double."""

from __future__ import annotations

import math

import pytest

from verifier_svc.drafters.request import NO_DRAFT, TreeBounds
from verifier_svc.speculation.candidate_shapes import chain
from verifier_svc.speculation.probe_budget import ProbeBudget, probe_steps
from verifier_svc.speculation.shape_speeds import Forecast, ShapeSpeeds

# Every pass of the target takes 10 ms, and so does a plain step before anything was measured.
SPEEDS = ShapeSpeeds(TreeBounds(4), lambda num_rows: 0.01, limit_s=math.inf, log=None)
CHAIN = chain(1)


def forecast(chain_speed: float, plain_speed: float = 100.0, *, batch: int = 12) -> Forecast:
    speeds = {NO_DRAFT: plain_speed, CHAIN: chain_speed}
    return Forecast(40, batch, NO_DRAFT, speeds, dict.fromkeys(speeds, 1.0), speeds)


def test_a_probe_waits_until_its_cost_is_saved() -> None:
    budget = ProbeBudget(SPEEDS)
    # A probe of six steps that are as fast as plain ones costs the changes there and back: about 22 ms.
    costs = SPEEDS.step_s(CHAIN, 12) + SPEEDS.step_s(NO_DRAFT, 12)
    num_steps = 0
    while not budget.affords(CHAIN, forecast(100.0)):
        budget.save(0.01)
        num_steps += 1
    assert num_steps == math.ceil(costs / (0.007 * 0.01))
    budget.owe(CHAIN)
    budget.pay(forecast(100.0))
    assert not budget.affords(CHAIN, forecast(100.0))


def test_a_slow_probe_costs_more() -> None:
    budget = ProbeBudget(SPEEDS)
    for _ in range(400):
        budget.save(0.01)
    assert budget.affords(CHAIN, forecast(100.0))
    assert not budget.affords(CHAIN, forecast(10.0))


def test_savings_have_a_limit() -> None:
    budget = ProbeBudget(SPEEDS)
    for _ in range(100_000):
        budget.save(0.01)
    # Six steps of 1.8 tokens lose 0.64 s at this speed, besides the changes.
    assert not budget.affords(CHAIN, forecast(1 / (0.01 + 0.64 / 6 / SPEEDS.tokens(CHAIN))))
    assert budget.affords(CHAIN, forecast(1 / (0.01 + 0.6 / 6 / SPEEDS.tokens(CHAIN))))


def test_a_probe_that_cannot_run_now_is_paid_for_later() -> None:
    budget = ProbeBudget(SPEEDS)
    for _ in range(400):
        budget.save(0.01)
    budget.owe(CHAIN)
    budget.pay(forecast(0.0))
    assert budget.affords(CHAIN, forecast(100.0))
    budget.pay(forecast(100.0))
    assert not budget.affords(CHAIN, forecast(100.0))


def test_nothing_is_lost_where_the_standing_shape_cannot_run() -> None:
    budget = ProbeBudget(SPEEDS)
    assert budget.affords(CHAIN, forecast(1.0, 0.0))
    assert not budget.affords(CHAIN, forecast(0.0, 0.0))


def test_pauses_double_up_to_a_limit() -> None:
    budget = ProbeBudget(SPEEDS)
    assert not budget.is_due(31)
    assert budget.is_due(32)
    step = 32
    for pause in (64, 128, 256, 256):
        assert not budget.allows_hopeless(255)
        assert budget.allows_hopeless(256) is (step > 32 + 64 + 128)
        budget.back_off(step)
        assert not budget.is_due(step + pause - 1)
        step += pause
        assert budget.is_due(step)
    budget.shorten_pauses()
    budget.pause(step)
    assert not budget.is_due(step + 31)
    assert budget.is_due(step + 32)
    assert not budget.allows_hopeless(10_000)


@pytest.mark.parametrize(("batch", "steps"), [(1, 12), (2, 6), (256, 6)])
def test_a_probe_lasts_until_there_are_some_walks(batch: int, steps: int) -> None:
    assert probe_steps(batch) == steps
