"""The figures of a served load. Times are milliseconds, rates are per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from foretoken.bench.load import Answer

# A request is good if its first token and its mean time per output token are in time.
GOOD_TTFT_S = 2.0
GOOD_TPOT_S = 0.025
# From this CPU share on, a client process may be what limits the load.
CLIENT_LIMIT = 0.8


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed.

    0.0 without values: a stream of one chunk has no gaps.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def ttft_s(answer: Answer) -> float:
    """Return the seconds from sending the request to its first chunk."""
    return answer.first_at - answer.sent_at


def tpot_s(answer: Answer) -> float:
    """Return (last chunk - first chunk) / (tokens - 1); 0.0 for one token."""
    return (answer.last_at - answer.first_at) / (answer.num_tokens - 1) if answer.num_tokens > 1 else 0.0


def is_good(answer: Answer) -> bool:
    """Return whether the request met both limits."""
    return ttft_s(answer) <= GOOD_TTFT_S and tpot_s(answer) <= GOOD_TPOT_S


def duration_s(answers: Sequence[Answer]) -> float:
    """Return last token - first submission."""
    return max(answer.last_at for answer in answers) - min(answer.sent_at for answer in answers)


def figures_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a row's figures. ``tokens_per_s`` = usage tokens / (last token - first submission)."""
    seconds = duration_s(answers)
    ttft = [ttft_s(answer) for answer in answers]
    tpot = [tpot_s(answer) for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    num_tokens = sum(answer.num_tokens for answer in answers)
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_good = sum(map(is_good, answers))
    tpot_p50_ms = 1e3 * percentile(tpot, 0.5)
    return {
        "num_requests": len(answers),
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "prompt_tokens_per_s": num_prompt_tokens / seconds,
        "requests_per_s": len(answers) / seconds,
        "user_tokens_per_s": 1e3 / tpot_p50_ms if tpot_p50_ms else 0.0,
        "ttft_p50_ms": 1e3 * percentile(ttft, 0.5),
        "ttft_p99_ms": 1e3 * percentile(ttft, 0.99),
        "tpot_p50_ms": tpot_p50_ms,
        "tpot_p99_ms": 1e3 * percentile(tpot, 0.99),
        "gap_p50_ms": 1e3 * percentile(gaps, 0.5),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "gap_max_ms": 1e3 * max(gaps, default=0.0),
        "num_chunks": len(gaps) + len(answers),
        "good_requests_per_s": num_good / seconds,
        "good_share": num_good / len(answers),
    }
