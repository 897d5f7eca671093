"""The seeds that the gateway draws: in the answers, exact, and one for each prompt of a list."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Stack, events

pytestmark = pytest.mark.anyio
COMPLETION, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {COMPLETION: {"prompt": "hello"}, CHAT: HELLO, GENERATE: {"text": "hello"}}


@pytest.mark.parametrize("url", BODIES)
async def test_the_drawn_seed_comes_back_and_is_exact_in_javascript(stack: Stack, url: str) -> None:
    for stream in (False, True):
        answer = await stack.http.post(url, json={**BODIES[url], "stream": stream})
        bodies = events(answer.text) if stream else [answer.json()]
        seeds = [body["meta_info"] if url == GENERATE else body for body in bodies]
        (seed,) = {body["seed"] for body in seeds if "seed" in body}
        assert seed == stack.verifier.submitted[-1].sampling.seed and 0 <= seed < 2**53
    given = {"sampling_params": {"sampling_seed": -5}} if url == GENERATE else {"seed": -5}
    body = (await stack.http.post(url, json={**BODIES[url], **given})).json()
    assert (body["meta_info"] if url == GENERATE else body)["seed"] == -5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", [COMPLETION, GENERATE])
async def test_each_prompt_of_a_list_has_a_drawn_seed_of_its_own(stack: Stack, url: str, stream: bool) -> None:
    async def seeds(**more: Any) -> list[int]:
        """Return the seeds that the answer names, prompt by prompt; they must be those in force."""
        body: dict[str, Any] = {"prompt": ["x"] * 3, "n": 2, **more}
        if url == GENERATE:
            body = {"text": body["prompt"], "sampling_params": {"n": 2}}
            body["sampling_params"] |= {"sampling_seed": more["seed"]} if "seed" in more else {}
        stack.verifier.submitted.clear()
        answer = await stack.http.post(url, json={**body, "stream": stream})
        named: dict[int, int] = {}
        for part in events(answer.text) if stream else [answer.json()]:
            if url == GENERATE:
                items = part if isinstance(part, list) else [part]
                for place, item in enumerate(items):
                    if "seed" in item["meta_info"]:
                        named[item.get("index", place)] = item["meta_info"]["seed"]
            elif stream:
                named |= {choice["index"]: part["seed"] for choice in part["choices"] if "seed" in part}
            else:
                named |= {choice["index"]: choice["seed"] for choice in part["choices"]}
                assert part["seed"] == named[0]
        found = [named[index] for index in range(6)]
        in_force = sorted((each.request_id, each.choice_index, each.sampling.seed) for each in stack.verifier.submitted)
        assert [seed for _, _, seed in in_force] == found
        assert [index for _, index, _ in in_force] == [0, 1] * 3
        return found

    drawn = await seeds()
    assert drawn[::2] == drawn[1::2] and len(set(drawn)) == 3 and all(0 <= seed < 2**53 for seed in drawn)
    assert not set(drawn) & set(await seeds(seed=None))
    assert await seeds(seed=7) == [7] * 6


@pytest.mark.parametrize(
    ("url", "body", "member"),
    [(RESPONSES, {"input": "hello"}, "response"), (MESSAGES, {**HELLO, "max_tokens": 5}, "message")],
)
async def test_responses_and_messages_have_the_seed(stack: Stack, url: str, body: dict[str, Any], member: str) -> None:
    whole = (await stack.http.post(url, json=body)).json()
    assert whole["seed"] == stack.verifier.submitted[-1].sampling.seed and 0 <= whole["seed"] < 2**53
    answer = await stack.http.post(url, json={**body, "stream": True, "seed": 7})
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    seeds = {event[member]["seed"] for event in map(json.loads, lines) if member in event}
    assert seeds == {7}
