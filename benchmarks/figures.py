"""The formulas of the benchmark. Times are seconds, rates are output tokens a second."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.bench.completion import StreamedCompletion

NGRAM = 8


class TooShortError(Exception):
    """The run is too short for a rate."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Token times of one output. ``decode_s`` = last token - first token."""

    num_tokens: int
    first_token_s: float
    decode_s: float

    @property
    def ms_per_token(self) -> float:
        """Return 1000 x (last token - first token) / (tokens - 1).

        It is 0 where a busy client read all tokens at once. Raises TooShortError for one token.
        """
        if self.num_tokens < 2:
            raise TooShortError("a time a token needs two tokens")
        return 1e3 * self.decode_s / (self.num_tokens - 1)


def timing_of(completion: StreamedCompletion) -> Timing:
    """Return a completion's times at the client. Time to first token begins with the request."""
    return Timing(
        completion.num_tokens,
        completion.first_at - completion.sent_at,
        completion.last_at - completion.first_at,
    )


def decode_rate(timings: Sequence[Timing]) -> float:
    """Return sum(tokens - 1) / sum(last token - first token) over runs that followed each other."""
    num_tokens = sum(timing.num_tokens - 1 for timing in timings)
    seconds = sum(timing.decode_s for timing in timings)
    if num_tokens < 1 or seconds <= 0:
        raise TooShortError("a rate needs two tokens that came at different times")
    return num_tokens / seconds


def concurrent_rate(completions: Sequence[StreamedCompletion]) -> float:
    """Return tokens that arrived while all streams were active / length of that time.

    The window goes from the last first token of a stream to the first last token of one. It
    contains no prefill, and the batch is full. A token at the start of the window was computed
    before it and does not count.
    """
    start = max(completion.first_at for completion in completions)
    end = min(completion.last_at for completion in completions)
    if end <= start:
        raise TooShortError("the streams were never all active at once")
    return sum(tokens_by(each, end) - tokens_by(each, start) for each in completions) / (end - start)


def tokens_by(completion: StreamedCompletion, at: float) -> int:
    """Return the output tokens that had arrived by ``at``.

    The stream must have running totals (continuous_usage_stats).
    """
    arrived = 0
    for chunk in completion.chunks:
        if chunk.num_tokens is None:
            raise ValueError("the server sends no running usage totals")
        if chunk.at <= at:
            arrived = chunk.num_tokens
    return arrived


def repeated_share(outputs: Sequence[Sequence[int]], size: int = NGRAM) -> float:
    """Return the share of tokens inside an n-gram of ``size`` that the same output repeats."""
    inside = 0
    for tokens in outputs:
        starts: dict[tuple[int, ...], list[int]] = {}
        for start in range(len(tokens) - size + 1):
            starts.setdefault(tuple(tokens[start : start + size]), []).append(start)
        covered = {start + i for found in starts.values() if len(found) > 1 for start in found for i in range(size)}
        inside += len(covered)
    total = sum(len(tokens) for tokens in outputs)
    return inside / total if total else 0.0


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    return float(statistics.median(values))
