"""Fields that cannot be obeyed are refused by name, unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway import ignored_fields
from gateway.anthropic import body as messages_body
from gateway.openai.request import UNSUPPORTED_IN_CHAT, UNSUPPORTED_IN_COMPLETION
from gateway.responses import body as responses_body
from gateway.sglang import generate
from gateway.unsupported_fields import UNSUPPORTED
from tests.gateway.conftest import Stack

pytestmark = pytest.mark.anyio
HEADER = ignored_fields.HEADER.decode()
COMPLETION, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "hello"},
    CHAT: HELLO,
    GENERATE: {"text": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {**HELLO, "max_tokens": 4},
}
TABLES: dict[str, Mapping[str, str]] = {
    COMPLETION: UNSUPPORTED_IN_COMPLETION,
    CHAT: UNSUPPORTED_IN_CHAT,
    GENERATE: generate.UNSUPPORTED_HERE,
    RESPONSES: responses_body.UNSUPPORTED_HERE,
    MESSAGES: messages_body.UNSUPPORTED_HERE,
}


def _refused(answer: dict[str, Any]) -> str:
    """Return the field that an error names; Anthropic's errors name it in their message alone."""
    error: dict[str, Any] = answer["error"]
    return str(error["param"]) if "param" in error else str(error["message"]).partition(" ")[0]


@pytest.mark.parametrize("url", BODIES)
async def test_what_cannot_be_obeyed_is_refused_by_name(stack: Stack, url: str) -> None:
    for field, reason in TABLES[url].items():
        for value in ("x", ["x"], {"a": 1}, True, 3):
            answer = await stack.http.post(url, json={**BODIES[url], field: value})
            assert (answer.status_code, _refused(answer.json())) == (400, field), answer.text
            assert reason in answer.json()["error"]["message"]
    assert not stack.verifier.submitted


@pytest.mark.parametrize("nothing", [None, False, 0, "", [], {}])
@pytest.mark.parametrize("url", BODIES)
async def test_fields_that_ask_for_nothing_are_fine(stack: Stack, url: str, nothing: Any) -> None:
    answer = await stack.http.post(url, json={**BODIES[url], **dict.fromkeys(TABLES[url], nothing)})
    assert answer.status_code == 200 and HEADER not in answer.headers


async def test_the_parameters_of_generate_are_refused_too(stack: Stack) -> None:
    for field in UNSUPPORTED:
        answer = await stack.http.post(GENERATE, json={"text": "hello", "sampling_params": {field: "x"}})
        assert (answer.status_code, _refused(answer.json())) == (400, field), answer.text


async def test_functions_that_ask_for_nothing_are_fine(stack: Stack) -> None:
    for value in ("none", "auto"):
        answer = await stack.http.post(CHAT, json={**HELLO, "functions": [], "function_call": value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("url", "field", "value"),
    [
        (COMPLETION, "best_of", 2),
        (COMPLETION, "truncate_prompt_tokens", 0),
        (COMPLETION, "truncate_prompt_tokens", 128),
        (COMPLETION, "truncate_prompt_tokens", -2),
        (COMPLETION, "allowed_token_ids", []),
        (COMPLETION, "allowed_token_ids", [10**6]),
        (COMPLETION, "allowed_token_ids", [1] * 8193),
        (COMPLETION, "bad_words", ["a"] * 257),
        (COMPLETION, "bad_words.0", [3]),
        (COMPLETION, "priority", -(2**31) - 1),
        (COMPLETION, "prompt_logprobs", 21),
        (COMPLETION, "stop", ["a"] * 65),
    ],
)
async def test_values_that_cannot_be_obeyed_are_refused_by_name(stack: Stack, url: str, field: str, value: Any) -> None:
    answer = await stack.http.post(url, json={**BODIES[url], field.partition(".")[0]: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not stack.verifier.submitted
