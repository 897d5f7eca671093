"""A server says how it speculated in its answers, its counters, or SGLang's /server_info."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.bench.load import CompletedRequest
from foretoken.bench.speculation import DrafterAcceptance, WatchedServer, from_answers, from_counters, from_server_info
from tests.support.scripted_server import scripted_server

# Three drafts of up to 3 tokens: 0, 2 and 3 of them accepted; and one step without a draft.
OURS: dict[str, Any] = {
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 5,
    "fallback_steps": 1,
    "acceptance_histogram": [1, 0, 1, 1],
    "drafters": {"eagle3": {"num_draft_tokens": 9, "num_accepted_draft_tokens": 5}},
}
# vLLM's own fields, with another longest draft: one draft, 1 token accepted.
VLLM: dict[str, Any] = {"num_spec_steps": 1, "num_accepted_draft_tokens": 1, "acceptance_histogram": [0, 1]}
PLAIN: dict[str, Any] = {"num_spec_steps": 0, "num_accepted_draft_tokens": 0, "acceptance_histogram": None}


def answers(*figures: dict[str, Any]) -> list[CompletedRequest]:
    return [CompletedRequest(0.0, 1.0, 2.0, 1, 0, 10, (), speculation=each) for each in figures]


def test_answers_are_summed_and_not_averaged() -> None:
    found = from_answers(answers(OURS, VLLM))
    assert found is not None
    # 6 accepted tokens in 5 steps.
    assert found.tokens_per_step == pytest.approx(1 + 6 / 5)
    # Of 4 drafts, 3 had a first accepted token, 2 a second, 1 a third.
    assert found.acceptance == pytest.approx((3 / 4, 2 / 4, 1 / 4))
    assert found.drafters == (DrafterAcceptance("eagle3", 9, 5),) and found.source == "answers"


def test_answers_without_drafts_or_without_figures() -> None:
    found = from_answers(answers(PLAIN))
    assert found is not None and (found.tokens_per_step, found.acceptance) == (1.0, ())
    assert from_answers(answers(OURS, {})) is None and from_answers([]) is None


def test_counters_of_both_servers() -> None:
    found = from_counters(
        {
            "spec_decode_num_drafts": 10.0,
            "spec_decode_num_draft_tokens": 30.0,
            "spec_decode_num_accepted_tokens": 14.0,
            "spec_decode_num_accepted_tokens_per_pos{position=0}": 8.0,
            "spec_decode_num_accepted_tokens_per_pos{position=2}": 6.0,
        }
    )
    assert found is not None and found.tokens_per_step == pytest.approx(2.4) and found.drafters == ()
    assert found.acceptance == pytest.approx((0.8, 0.0, 0.6))
    found = from_counters(
        {
            "spec_decode_num_drafts{drafter=a}": 1.0,
            "spec_decode_num_drafts{drafter=b}": 3.0,
            "spec_decode_num_draft_tokens{drafter=a}": 2.0,
            "spec_decode_num_draft_tokens{drafter=b}": 6.0,
            "spec_decode_num_accepted_tokens{drafter=b}": 4.0,
            "spec_decode_num_accepted_tokens_per_pos{drafter=a,position=0}": 1.0,
            "spec_decode_num_accepted_tokens_per_pos{drafter=b,position=0}": 2.0,
            "fallback_steps": 4.0,
        }
    )
    assert found is not None and found.acceptance == (0.75,) and found.tokens_per_step == pytest.approx(1.5)
    assert found.drafters == (DrafterAcceptance("a", 2, 0), DrafterAcceptance("b", 6, 4))
    assert from_counters({"engine_steps": 5.0}) is None


@pytest.mark.parametrize(
    ("info", "length"),
    [
        ({"internal_states": [{"avg_spec_accept_length": 2.5}]}, 2.5),
        ({"internal_states": [{"avg_spec_accept_length": None}]}, None),
        ({"internal_states": [{"avg_spec_accept_length": 0.0}]}, None),
        ({"internal_states": []}, None),
        ({}, None),
    ],
)
def test_sglangs_mean(info: dict[str, Any], length: float | None) -> None:
    found = from_server_info(info)
    assert (None if found is None else found.tokens_per_step) == length


def reply(text: str, status: str = "200 OK") -> Iterator[bytes]:
    yield f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


def test_the_nearest_place_is_taken_and_a_server_without_any_says_nothing() -> None:
    places: dict[str, Any] = {"drafts": 0, "accepted": 0, "info": {}, "metrics": "200 OK"}

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if body["path"] == "/metrics":
            lines = []
            for name in ("drafts", "accepted"):
                full = f"vllm:spec_decode_num_{name.replace('accepted', 'accepted_tokens')}"
                lines += [f"# TYPE {full}_total counter", f"{full}_total {places[name]}"]
            return reply("\n".join(lines) + "\n", places["metrics"])
        if body["path"] == "/get_server_info":
            return reply(json.dumps(places["info"]))
        return reply("no such path", "404 Not Found")

    with scripted_server(script) as server:
        watched = WatchedServer(server.address)
        assert watched.speculation(answers({})) is None
        places["info"] = {"internal_states": [{"avg_spec_accept_length": 3.0}]}
        found = watched.speculation(answers({}))
        assert found is not None and (found.tokens_per_step, found.source) == (3.0, "/server_info, since its start")
        places |= {"drafts": 4, "accepted": 2}
        found = watched.speculation(answers({}))
        assert found is not None and (found.tokens_per_step, found.source) == (1.5, "/metrics")
        found = watched.speculation(answers(OURS))
        assert found is not None and found.source == "answers"
        places |= {"metrics": "404 Not Found", "info": {}}
        assert WatchedServer(server.address).speculation(answers({})) is None
