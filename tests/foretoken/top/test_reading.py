"""Readings of a gateway's metrics: what rose between two, and percentiles of a histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from foretoken.telemetry import MetricRegistry, render
from foretoken.top.reading import Reading, Series, bucket_bounds, by_label, increases, quantile, total


def series(text: str) -> Series:
    """Return the series of ``name{label=value,...}``."""
    name, _, labels = text.rstrip("}").partition("{")
    pairs = [tuple(pair.split("=")) for pair in labels.split(",") if pair]
    return Series(name, tuple(sorted((label, value) for label, value in pairs)))


def of(values: Mapping[str, float]) -> dict[Series, float]:
    return {series(name): value for name, value in values.items()}


def rises(before: Mapping[str, float], after: Mapping[str, float]) -> dict[Series, float]:
    return increases(Reading(0, of(before)), Reading(1, of(after)))


def test_a_reading_holds_our_samples_without_the_prefix() -> None:
    registry = MetricRegistry("gateway", {"model_name": "m"})
    registry.counter("failures", "Failures.").add(3, {"reason": "x"})
    registry.histogram("seconds", "Seconds.", (1.0, 2.0)).record(1.5)
    text = render(registry.families()).decode() + '# TYPE vllm:failures counter\nvllm:failures_total{reason="x"} 3\n'
    registry.close()
    read = Reading.of(text, 5.0)
    assert read.at == 5.0
    assert read.values == of(
        {
            "failures_total{model_name=m,reason=x}": 3,
            "seconds_bucket{le=1.0,model_name=m}": 0,
            "seconds_bucket{le=2.0,model_name=m}": 1,
            "seconds_bucket{le=+Inf,model_name=m}": 1,
            "seconds_count{model_name=m}": 1,
            "seconds_sum{model_name=m}": 1.5,
        }
    )


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError):
        Reading.of("<!doctype html>\n<html>", 0)


def test_a_total_that_fell_began_again_at_zero() -> None:
    assert rises({"a_total": 10, "b_total": 10}, {"a_total": 13, "b_total": 4}) == of({"a_total": 3, "b_total": 4})


def test_with_one_bucket_all_parts_of_its_histogram_began_again() -> None:
    """After a restart a bucket may hold more than before, and the sum be larger."""
    before = {"s_bucket{le=1}": 2, "s_bucket{le=+Inf}": 9, "s_count": 9, "s_sum": 3, "t_bucket{le=1}": 1}
    after = {"s_bucket{le=1}": 5, "s_bucket{le=+Inf}": 6, "s_count": 6, "s_sum": 4, "t_bucket{le=1}": 2}
    assert rises(before, after) == of(after | {"t_bucket{le=1}": 1})


def test_a_histogram_that_vanished_and_is_there_again_began_again() -> None:
    """A gateway shows none before the first observation."""
    gone, again = rises({"s_count": 5}, {}), rises({}, {"s_count": 2})
    assert gone == {} and again == of({"s_count": 2})


@pytest.mark.parametrize(
    ("before", "risen"),
    [
        # Its verifier was not there: it may have counted for days.
        ({}, 0),
        ({"verifier_up{verifier=v}": 0}, 0),
        ({"verifier_up{verifier=w}": 1}, 0),
        ({"verifier_up{verifier=v}": 1}, 7),
    ],
)
def test_a_new_count_of_a_verifier_rose_only_if_the_verifier_was_there(before: dict[str, float], risen: float) -> None:
    name = "fallback_reasons_total{reason=first_step,verifier=v}"
    assert rises(before, {name: 7})[series(name)] == risen


def test_a_total_that_a_drafter_brings_with_it_has_not_risen() -> None:
    name = "drafter_draft_grow_s{drafter=d,verifier=v}"
    assert rises({"verifier_up{verifier=v}": 1}, {name: 7})[series(name)] == 0
    assert rises({name: 7}, {name: 7.5})[series(name)] == 0.5
    # The drafter was restarted.
    assert rises({name: 7}, {name: 0.25})[series(name)] == 0.25


def test_sums_by_labels() -> None:
    values = of({"a{x=1,y=1}": 1, "a{x=1,y=2}": 2, "a{x=2,y=2}": 4, "b{x=1}": 8, "a": 16})
    assert total(values, "a") == 23
    assert total(values, "a", x="1") == 3
    assert total(values, "a", x=("1", "2"), y="2") == 6
    assert by_label(values, "a", "x") == {"1": 3, "2": 4, "": 16}
    assert by_label(values, "a", "x", y="2") == {"1": 2, "2": 4}


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        # 4 of 10 up to 1 s, 4 more up to 3 s, none up to 5 s, two above.
        (0.2, 0.5),
        (0.4, 1.0),
        (0.5, 1.5),
        (0.8, 3.0),
        (0.81, math.inf),
        (0.99, math.inf),
    ],
)
def test_quantiles_are_interpolated_within_a_bucket(share: float, expected: float) -> None:
    # Of two models: buckets add up.
    one = {"s_bucket{le=1,m=a}": 1, "s_bucket{le=3,m=a}": 3, "s_bucket{le=5,m=a}": 3, "s_bucket{le=+Inf,m=a}": 5}
    two = {"s_bucket{le=1,m=b}": 3, "s_bucket{le=3,m=b}": 5, "s_bucket{le=5,m=b}": 5, "s_bucket{le=+Inf,m=b}": 5}
    values = of(one | two)
    assert quantile(values, "s", share) == pytest.approx(expected)
    assert bucket_bounds(values, "s") == (1, 3, 5)


def test_no_observation_has_no_quantile() -> None:
    values = of({"s_bucket{le=1}": 0, "s_bucket{le=+Inf}": 0})
    assert quantile(values, "s", 0.5) is None
    assert quantile({}, "s", 0.5) is None
    assert bucket_bounds({}, "s") == ()
