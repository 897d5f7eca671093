"""The figures of a served load. Times are milliseconds, rates are per second.

The number of tokens comes from the answers' ``usage``. A chunk may hold several tokens: a server
that speculates sends one chunk a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.bench.load import CompletedRequest


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a good request holds, in seconds.

    The time to its first token, its mean time per output token after it, and its whole time.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    def hold(self, answer: CompletedRequest) -> bool:
        """Return whether the request met all bounds."""
        return ttft_s(answer) <= self.ttft_s and tpot_s(answer) <= self.tpot_s and e2e_s(answer) <= self.e2e_s


# The bounds of the project's own measurements.
GOOD = Bounds(ttft_s=2.0, tpot_s=0.025)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed.

    0.0 without values: a stream of one chunk has no gaps.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def ttft_s(answer: CompletedRequest) -> float:
    """Return the seconds from sending the request to its first chunk."""
    return answer.first_at - answer.sent_at


def tpot_s(answer: CompletedRequest) -> float:
    """Return (last chunk - first chunk) / (tokens - 1); 0.0 for one token."""
    return (answer.last_at - answer.first_at) / (answer.num_tokens - 1) if answer.num_tokens > 1 else 0.0


def e2e_s(answer: CompletedRequest) -> float:
    """Return the seconds from sending the request to its last chunk."""
    return answer.last_at - answer.sent_at


def normalized_s(answer: CompletedRequest) -> float:
    """Return the seconds of the whole request for each of its output tokens."""
    return e2e_s(answer) / max(answer.num_tokens, 1)


def duration_s(answers: Sequence[CompletedRequest]) -> float:
    """Return last token - first submission."""
    return max(answer.last_at for answer in answers) - min(answer.sent_at for answer in answers)


def figures_of(answers: Sequence[CompletedRequest], bounds: Bounds = GOOD) -> dict[str, Any]:
    """Return a row's figures. ``tokens_per_s`` = usage tokens / (last token - first submission).

    ``interactivity_pN`` = 1 / percentile N of the seconds per output token of whole requests: that
    many tokens a second, the wait for the first one included, reach all but the slowest requests.
    """
    seconds = duration_s(answers)
    ttft = [ttft_s(answer) for answer in answers]
    tpot = [tpot_s(answer) for answer in answers]
    e2e = [e2e_s(answer) for answer in answers]
    normalized = [normalized_s(answer) for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    num_tokens = sum(answer.num_tokens for answer in answers)
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_good = sum(map(bounds.hold, answers))
    tpot_p50_ms = 1e3 * percentile(tpot, 0.5)
    return {
        "num_requests": len(answers),
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(answer.num_cached_tokens for answer in answers),
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "prompt_tokens_per_s": num_prompt_tokens / seconds,
        "requests_per_s": len(answers) / seconds,
        "user_tokens_per_s": 1e3 * _inverse(tpot_p50_ms),
        **_percentiles("ttft", ttft),
        **_percentiles("tpot", tpot),
        **_percentiles("e2e", e2e),
        **{f"interactivity_p{n}": _inverse(percentile(normalized, n / 100)) for n in (50, 90, 99)},
        "gap_p50_ms": 1e3 * percentile(gaps, 0.5),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "gap_max_ms": 1e3 * max(gaps, default=0.0),
        "num_chunks": len(gaps) + len(answers),
        "good_requests_per_s": num_good / seconds,
        "good_share": num_good / len(answers),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{n}_ms": 1e3 * percentile(values, n / 100) for n in (50, 90, 99)}


def _inverse(value: float) -> float:
    """Return 1 / value; 0.0 for a time too short to be measured."""
    return 1 / value if value else 0.0
