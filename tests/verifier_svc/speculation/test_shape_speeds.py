"""Predicted speeds follow what steps and walks have shown."""

from __future__ import annotations

import math

import pytest

from verifier_svc.drafters.request import NO_DRAFT, TreeBounds
from verifier_svc.speculation.candidate_shapes import chain
from verifier_svc.speculation.controller_log import Record
from verifier_svc.speculation.shape_speeds import ShapeSpeeds

BATCH = 4


def make(*, limit_s: float = math.inf, records: list[Record] | None = None) -> ShapeSpeeds:
    """Return speeds where every pass of the target takes 10 ms."""
    log = None if records is None else records.append
    return ShapeSpeeds(TreeBounds(4), lambda num_rows: 0.01, limit_s=limit_s, log=log)


def observe(speeds: ShapeSpeeds, num_matched: int, *, num_prompt_tokens: int = 0) -> None:
    """Observe steps of one drafted token, in which so many hold, and learn from them."""
    for step in range(64):
        speeds.observe_step(chain(1), BATCH, 0.011, num_prompt_tokens)
        speeds.observe_walk(chain(1), num_matched, 1, BATCH)
        if step % 8 == 7:
            speeds.learn(step + 1, BATCH, chain(1))


def test_before_anything_is_measured() -> None:
    forecast = make().forecast(1, BATCH, NO_DRAFT)
    assert forecast.rates == forecast.speeds
    assert forecast.rates[NO_DRAFT] == pytest.approx(1 / 0.01)
    # A level and the request for it are believed to take 8% of the pass each; 0.8 tokens are believed to hold.
    assert forecast.rates[chain(1)] == pytest.approx(1.8 / 0.0116)


def test_walks_and_steps_change_the_forecast() -> None:
    speeds = make()
    observe(speeds, 1)
    forecast = speeds.forecast(65, BATCH, chain(1))
    assert forecast.rates[chain(1)] == pytest.approx(2 / 0.011, rel=0.02)
    assert speeds.tokens(chain(1)) == pytest.approx(2, rel=0.02)
    assert speeds.step_s(chain(1), BATCH) == pytest.approx(0.011, rel=0.02)
    assert speeds.draft_s(chain(1), BATCH) == pytest.approx(0.001, rel=0.1)


def test_it_learns_only_at_a_decision() -> None:
    speeds = make()
    before = speeds.tokens(chain(1))
    speeds.observe_walk(chain(1), 0, 1, BATCH)
    assert speeds.tokens(chain(1)) == before
    speeds.learn(1, BATCH, chain(1))
    assert speeds.tokens(chain(1)) < before


def test_full_steps_with_prompts_count_for_less() -> None:
    free, full = make(), make(limit_s=0.011)
    for speeds in (free, full):
        observe(speeds, 1, num_prompt_tokens=1)
    free_forecast, forecast = (speeds.forecast(65, BATCH, chain(1)) for speeds in (free, full))
    assert forecast.rates == free_forecast.rates == free_forecast.speeds
    assert 0.9 <= forecast.speeds[chain(1)] / forecast.rates[chain(1)] < 1


def test_hope_grows_with_the_time_since_a_shape_was_measured() -> None:
    speeds = make()
    observe(speeds, 1)
    for step, doubt in ((64, 0.02), (64 + 512, 0.085), (64 + 5000, 0.15)):
        forecast = speeds.forecast(step, BATCH, chain(2))
        assert speeds.hope(chain(1), forecast) == pytest.approx(forecast.speeds[chain(1)] * (1 + doubt))
    assert speeds.hope(chain(3), forecast) == pytest.approx(forecast.speeds[chain(3)] * 1.15)
    assert speeds.hope(NO_DRAFT, forecast) == pytest.approx(forecast.speeds[NO_DRAFT] * 1.3)


def test_while_nothing_is_drafted_a_chain_may_hold_as_at_first() -> None:
    speeds = make()
    observe(speeds, 0)
    forecast = speeds.forecast(64, BATCH, NO_DRAFT)
    assert forecast.speeds[chain(1)] < forecast.speeds[NO_DRAFT]
    assert speeds.hope(chain(1), forecast) == pytest.approx(1.8 / speeds.step_s(chain(1), BATCH) * 1.02)
    shared = next(shape for shape in speeds.shapes if shape.budget)
    assert speeds.hope(shared, forecast) == 0.0


def test_it_logs_what_it_learns() -> None:
    records: list[Record] = []
    speeds = make(records=records)
    speeds.observe_step(NO_DRAFT, BATCH, 0.01, 7)
    speeds.observe_walk(chain(2), 1, 2, BATCH)
    speeds.observe_walk(chain(2), 1, 2, 1)
    speeds.observe_walk(NO_DRAFT, 0, 0, BATCH)
    speeds.learn(1, BATCH, NO_DRAFT)
    assert [record for record in records if record[0] != "verify"] == [
        ("step", *NO_DRAFT, BATCH, 0.01, 7),
        ("walks", *chain(2), 1, 2, BATCH + 1),
    ]
