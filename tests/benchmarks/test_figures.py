"""The figures' formulas on literal data."""

from __future__ import annotations

import pytest

from benchmarks.figures import (
    Timing,
    TooShortError,
    concurrent_rate,
    decode_rate,
    median,
    repeated_share,
    timing_of,
    tokens_by,
)
from foretoken.bench.completion import Chunk, StreamedCompletion


def completion(arrivals: list[tuple[float, int | None]], sent_at: float = 0.0) -> StreamedCompletion:
    """Return a completion whose chunks came at these times, each with the total tokens so far."""
    chunks = tuple(Chunk(at, "x", total) for at, total in arrivals)
    return StreamedCompletion(sent_at, chunks, (), 3, 0, arrivals[-1][1] or 0, "length", {})


def test_rate_leaves_the_first_token_out() -> None:
    assert decode_rate([Timing(num_tokens=11, first_token_s=5.0, decode_s=2.0)]) == 5.0
    assert Timing(num_tokens=11, first_token_s=5.0, decode_s=2.0).ms_per_token == 200.0


def test_rate_of_several_runs_is_all_tokens_over_all_time() -> None:
    assert decode_rate([Timing(11, 1.0, 1.0), Timing(31, 1.0, 7.0)]) == 40 / 8


@pytest.mark.parametrize("timing", [Timing(1, 1.0, 1.0), Timing(5, 1.0, 0.0)])
def test_one_token_or_no_time_has_no_rate(timing: Timing) -> None:
    with pytest.raises(TooShortError):
        decode_rate([timing])


def test_tokens_read_at_once_took_no_time_each() -> None:
    # A client without a free core may find the whole stream in its buffer.
    assert Timing(num_tokens=5, first_token_s=1.0, decode_s=0.0).ms_per_token == 0.0
    with pytest.raises(TooShortError):
        _ = Timing(num_tokens=1, first_token_s=1.0, decode_s=0.0).ms_per_token


def test_timing_counts_tokens_not_chunks() -> None:
    timing = timing_of(completion([(2.0, 1), (3.0, 5), (4.0, 9)], sent_at=0.5))
    assert timing == Timing(num_tokens=9, first_token_s=1.5, decode_s=2.0)
    assert timing.ms_per_token == 250.0


def test_concurrent_rate_counts_only_while_all_streams_are_active() -> None:
    early = completion([(0.0, 1), (1.0, 2), (2.0, 4), (3.0, 5), (4.0, 6)])
    late = completion([(2.0, 1), (3.0, 2), (4.0, 3), (9.0, 8)])
    # From 2 to 4: the first stream goes from 4 to 6 tokens, the second from 1 to 3.
    assert concurrent_rate([early, late]) == (2 + 2) / 2


def test_streams_that_never_overlap_have_no_concurrent_rate() -> None:
    with pytest.raises(TooShortError):
        concurrent_rate([completion([(0.0, 1), (1.0, 2)]), completion([(1.0, 1), (2.0, 2)])])


def test_concurrent_rate_needs_running_totals() -> None:
    with pytest.raises(ValueError, match="running usage"):
        tokens_by(completion([(0.0, None), (1.0, None)]), 1.0)


@pytest.mark.parametrize(
    ("outputs", "share"),
    [
        # All different.
        ([list(range(20))], 0.0),
        # One 8-gram at 0 and again at 9: 16 of 18 tokens.
        ([[*range(8), 50, *range(8), 51]], 16 / 18),
        # A loop of two tokens: every 8-gram starts again two later.
        ([[1, 2] * 10], 1.0),
        # A run of nine holds two 8-grams, which overlap.
        ([[7] * 9 + list(range(20, 31))], 9 / 20),
        # Seven equal tokens are no 8-gram; 8-grams of different outputs do not match.
        ([[*range(7), 50, *range(7), 51]], 0.0),
        ([list(range(8)), list(range(8))], 0.0),
        # Over all outputs: 16 of 18 and 0 of 18.
        ([[*range(8), 50, *range(8), 51], list(range(18))], 16 / 36),
        ([], 0.0),
        ([[1, 2, 3]], 0.0),
    ],
)
def test_share_of_tokens_in_a_repeated_8_gram(outputs: list[list[int]], share: float) -> None:
    assert repeated_share(outputs) == pytest.approx(share)


def test_median_of_pairs() -> None:
    assert median([1.5, 0.2, 1.4, 9.0, 1.3]) == 1.4
    assert median([1.0, 2.0]) == 1.5
