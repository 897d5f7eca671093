"""When a failing drafter is left alone, and which of its figures become metrics."""

from __future__ import annotations

from verifier_svc.drafters.source import (
    FIRST_BACKOFF_S,
    MAX_ABSENT_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_GAUGES,
    MIN_DRAFTS_OF_SUCCESS,
    CircuitBreaker,
    checked_gauges,
)


def test_backoff_doubles_and_starts_over_after_a_success() -> None:
    breaker = CircuitBreaker()
    backoffs = [breaker.next_backoff_s() for _ in range(8)]
    assert backoffs == [FIRST_BACKOFF_S, 0.2, 0.4, 0.8, 1.6, 3.2, MAX_BACKOFF_S, MAX_BACKOFF_S]
    for _ in range(MIN_DRAFTS_OF_SUCCESS - 1):
        breaker.success()
    assert breaker.next_backoff_s() == MAX_BACKOFF_S
    for _ in range(MIN_DRAFTS_OF_SUCCESS):
        breaker.success()
    assert [breaker.next_backoff_s() for _ in range(2)] == [FIRST_BACKOFF_S, 0.2]


def test_an_absent_drafter_is_looked_for_often() -> None:
    """Its absence neither lengthens nor ends the backoff of its faults."""
    breaker = CircuitBreaker()
    backoffs = [breaker.next_backoff_s(is_absent=True) for _ in range(6)]
    assert backoffs == [FIRST_BACKOFF_S, 0.2, 0.4, *[MAX_ABSENT_BACKOFF_S] * 3]
    assert [breaker.next_backoff_s() for _ in range(3)] == [0.5, 1.0, 2.0]
    assert breaker.next_backoff_s(is_absent=True) == MAX_ABSENT_BACKOFF_S
    assert breaker.next_backoff_s() == 4.0


def test_gauges_that_can_be_no_metrics_are_left_out() -> None:
    good = {f"g_{number}": number for number in range(MAX_GAUGES)}
    assert checked_gauges({"Bad": 1.0, "": 1.0, "a b": 1.0, "a" * 65: 1.0, **good}) == good
    assert len(checked_gauges({**good, "one_more": 1.0})) == MAX_GAUGES
