"""The requests of each workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import UnexpectedAnswerError
from benchmarks.workloads import LOGPROBS, NGRAM_DRAFTS, ODD_GROUP, WORKLOADS, LoadPoint, Requests
from foretoken.bench.load import CompletedRequest

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
PROMPTS = [[1, 2], [3, 4], [5, 6]]


def requests(name: str, body: dict[str, Any] | None = None) -> Requests:
    return Requests(WORKLOADS[name], PROMPTS, body or {})


def test_every_request_is_cold_greedy_and_of_fixed_length() -> None:
    streams = requests("core", {"speculative": {"drafter": "eagle3"}}).closed(LoadPoint(4), 5)
    bodies = [body for stream in streams for body in stream.bodies]
    assert len(streams) == 4 and len(bodies) == 20
    assert len({body["cache_salt"] for body in bodies}) == 20
    for body in bodies:
        assert body["temperature"] == 0 and body["ignore_eos"] and body["stream"] and body["max_tokens"] == 192
        assert body["speculative"] == {"drafter": "eagle3"} and body["prompt"] in PROMPTS


def test_a_tenth_of_the_mix_has_a_schema_and_a_tenth_wants_logprobs() -> None:
    streams = requests("mixed").closed(LoadPoint(16), 5)
    for turn in range(5):
        bodies = [stream.bodies[turn] for stream in streams]
        assert 1 <= sum("structured_outputs" in body for body in bodies) <= 2
        assert 1 <= sum("logprobs" in body for body in bodies) <= 2
    bodies = [body for stream in streams for body in stream.bodies]
    assert sum("structured_outputs" in body for body in bodies) == sum("logprobs" in body for body in bodies) == 8


def test_one_stream_is_odd() -> None:
    named = {"speculative": {"drafter": "eagle3"}}
    for point in WORKLOADS["odd"].points:
        streams = requests("odd", named).closed(point, 2)
        *others, last = streams
        assert all(stream.group == "" and stream.bodies[0]["speculative"] == named["speculative"] for stream in others)
        assert last.group == ("" if point.case == "none odd" else ODD_GROUP)
        if point.case == "1 with logprobs":
            assert all(body["logprobs"] == LOGPROBS["logprobs"] for body in last.bodies)
        if point.case == "1 with n-grams":
            assert all(body["speculative"] == NGRAM_DRAFTS["speculative"] for body in last.bodies)


def test_arrivals_are_random_and_the_same_for_every_arm() -> None:
    first, second = (requests("poisson").poisson(50.0, 20.0, "50%") for _ in range(2))
    assert [stream.starts_after for stream in first] == [stream.starts_after for stream in second]
    assert 800 < len(first) < 1200 and max(stream.starts_after for stream in first) < 20
    assert all(len(stream.bodies) == 1 for stream in first)
    assert len(requests("poisson").poisson(0.001, 1.0, "slow")) == 1


def test_prompts_have_the_workloads_length() -> None:
    assert all(200 <= len(prompt) <= 400 for prompt in WORKLOADS["core"].prompts(TARGET, 5))
    found = WORKLOADS["long-1k"].prompts(TARGET, 3)
    assert [len(prompt) for prompt in found] == [1000] * 3 and found == WORKLOADS["long-1k"].prompts(TARGET, 3)


@pytest.mark.parametrize(("tokens", "cached", "reason"), [(191, 0, "191 tokens, not 192"), (192, 16, "16 prompt")])
def test_an_answer_that_does_not_match_is_refused(tokens: int, cached: int, reason: str) -> None:
    good = CompletedRequest(0.0, 1.0, 2.0, 300, 0, 192, ())
    WORKLOADS["core"].check([good])
    with pytest.raises(UnexpectedAnswerError, match=reason):
        WORKLOADS["core"].check([good, CompletedRequest(0.0, 1.0, 2.0, 300, cached, tokens, ())])
