"""The arithmetic of a served load's figures."""

from __future__ import annotations

import pytest

from foretoken.bench.load import CompletedRequest
from foretoken.bench.measures import GOOD, Bounds, figures_of, percentile


def answer(
    sent: float, first: float, last: float, tokens: int = 11, gaps: tuple[float, ...] = (), prompt: int = 300
) -> CompletedRequest:
    return CompletedRequest(sent, first, last, prompt, 0, tokens, gaps)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50 and percentile(values, 0.99) == 99
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2 and percentile([3.0, 1.0, 2.0], 0.99) == 3
    assert percentile([7.0], 0.5) == 7 and percentile([], 0.99) == 0


def test_a_rate_begins_with_the_first_submission_and_ends_with_the_last_token() -> None:
    found = figures_of([answer(10.0, 10.5, 11.5, 11), answer(9.0, 9.2, 14.0, 21)])
    assert found["seconds"] == 5.0
    assert found["tokens_per_s"] == pytest.approx(32 / 5)
    assert found["prompt_tokens_per_s"] == pytest.approx(600 / 5)
    assert found["requests_per_s"] == pytest.approx(2 / 5)


def test_tpot_leaves_the_first_token_out() -> None:
    found = figures_of([answer(0.0, 0.5, 1.5, 11)])
    assert found["ttft_p50_ms"] == pytest.approx(500) and found["tpot_p50_ms"] == pytest.approx(100)
    assert found["user_tokens_per_s"] == pytest.approx(10)


def test_one_token_has_no_tpot_and_no_gap() -> None:
    found = figures_of([answer(0.0, 0.5, 0.5, 1)])
    assert (found["tpot_p99_ms"], found["gap_max_ms"], found["user_tokens_per_s"]) == (0, 0, 0)


def test_gaps_are_those_of_all_streams() -> None:
    found = figures_of([answer(0.0, 1.0, 2.0, gaps=(0.1,) * 98), answer(0.0, 1.0, 2.0, gaps=(0.2, 0.9))])
    assert found["gap_p50_ms"] == pytest.approx(100) and found["gap_p99_ms"] == pytest.approx(200)
    assert found["gap_max_ms"] == pytest.approx(900) and found["num_chunks"] == 102


@pytest.mark.parametrize(
    ("first", "last", "good"),
    [(2.0, 2.25, True), (2.01, 2.2, False), (1.0, 1.251, False)],
)
def test_a_good_request_meets_both_limits(first: float, last: float, good: bool) -> None:
    assert GOOD.hold(answer(0.0, first, last, 11)) is good


def test_goodput_counts_good_requests_alone() -> None:
    found = figures_of([answer(0.0, 1.0, 1.1), answer(0.0, 3.0, 3.1), answer(0.0, 1.0, 4.0)])
    assert found["good_share"] == pytest.approx(1 / 3) and found["good_requests_per_s"] == pytest.approx(1 / 4)


def test_percentiles_of_whole_requests_and_interactivity_count_the_first_tokens_wait() -> None:
    # 10 tokens in 1, 2, ..., 10 seconds: 0.1 to 1.0 s a token.
    found = figures_of([answer(100.0, 100.5, 100.0 + seconds, 10) for seconds in range(1, 11)])
    assert [found[f"e2e_p{n}_ms"] for n in (50, 90, 99)] == pytest.approx([5_000, 9_000, 10_000])
    assert [found[f"interactivity_p{n}"] for n in (50, 90, 99)] == pytest.approx([1 / 0.5, 1 / 0.9, 1 / 1.0])
    assert [found[f"ttft_p{n}_ms"] for n in (50, 90, 99)] == pytest.approx([500] * 3)
    # The first token is left out: (seconds - 0.5) / 9.
    assert found["tpot_p90_ms"] == pytest.approx(8_500 / 9) and found["tpot_p50_ms"] == pytest.approx(4_500 / 9)


def test_each_bound_counts_and_one_that_is_not_given_does_not() -> None:
    answers = [answer(0.0, 1.0, 2.0, 11), answer(0.0, 0.2, 4.2, 11)]

    def share(bounds: Bounds) -> float:
        return figures_of(answers, bounds)["good_share"]

    assert share(Bounds()) == 1.0
    assert share(Bounds(ttft_s=0.5)) == share(Bounds(tpot_s=0.1)) == share(Bounds(e2e_s=3.0)) == 0.5
    assert share(Bounds(ttft_s=0.5, tpot_s=0.1)) == 0.0
