"""Tool calls of the demo model through the whole stack: forced calls always fit their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.tool_calls import CHOICES, DEMO, DRAFTERS, MODELS, TOOLS, check, flags_of
from tests.integration.stack import Stack, running, wait_until

pytestmark = pytest.mark.slow
NUM_REQUESTS = 24
ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Write a note."}],
    "tools": TOOLS,
    "seed": 3,
    "temperature": 0.8,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    log = tmp_path_factory.mktemp("tool_calls") / "log"
    with running(DEMO / "target", log, "--served-model-name", "demo", *flags_of([*DRAFTERS])) as stack:
        wait_until(lambda: _num_attached(stack) == len(DRAFTERS), stack)
        yield stack


def _num_attached(stack: Stack) -> int:
    (verifier,) = httpx.get(f"{stack.url}/version", timeout=None, trust_env=False).json()["verifiers"]
    return sum(drafter["state"] == "attached" for drafter in verifier["drafters"])


@pytest.fixture
def chats(stack: Stack) -> Iterator[Any]:
    """Return the SDK's chat completions. Any: its types have no room for fields of a dictionary."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=None) as client:
        yield client.chat.completions


def test_forced_calls_fit_and_are_those_of_plain_decode(stack: Stack) -> None:
    outcomes = check(stack.url, NUM_REQUESTS, CHOICES)
    assert {choice: outcome.faults for choice, outcome in outcomes.items()} == {choice: {} for choice in outcomes}
    assert outcomes["ngram"].num_accepted and outcomes["eagle3"].num_accepted


def test_the_openai_sdk_streams_the_calls_that_it_gets_whole(chats: Any) -> None:
    whole = chats.create(**ASK, tool_choice="required").choices[0]
    with chats.stream(**ASK, tool_choice="required") as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    for choice in (whole, streamed):
        assert choice.message.tool_calls and not choice.message.content
    names = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert names == [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
    for name, arguments in names:
        MODELS[name].model_validate_json(arguments)
    assert "tool_calls.function.arguments.delta" in events


def test_a_strict_function_leaves_the_text_free_and_its_format_does_not(chats: Any) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    free = chats.create(**{**ASK, "tools": strict}, max_tokens=60).choices[0]
    plain = chats.create(**ASK, max_tokens=60).choices[0]
    assert free.message.content == plain.message.content and free.message.content
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    answer = chats.create(
        **ASK,
        max_tokens=1000,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema},
        },
    ).choices[0]
    if answer.message.tool_calls:
        assert all(json.loads(call.function.arguments) is not None for call in answer.message.tool_calls)
    else:
        assert set(json.loads(answer.message.content or "")) == {"n"}


def test_a_cut_forced_call_has_no_content(chats: Any) -> None:
    for max_tokens in range(1, 48):
        answer = chats.create(**ASK | {"temperature": 0}, tool_choice="required", max_tokens=max_tokens)
        assert not answer.choices[0].message.content, max_tokens
        assert answer.choices[0].finish_reason in ("length", "tool_calls")


def test_a_bad_schema_is_named_with_its_tool(chats: Any) -> None:
    for name, fault, reason in (("type", "foo", "Invalid type: foo"), ("pattern", "(", "unclosed group")):
        schema = {"type": "object", "properties": {"x": {"type": "string", name: fault}}, "required": ["x"]}
        bad = {"type": "function", "function": {"name": "odd", "parameters": schema}}
        with pytest.raises(openai.BadRequestError) as caught:
            chats.create(**ASK | {"tools": [*TOOLS, bad]}, tool_choice="required", max_tokens=9)
        assert caught.value.param == "tools"
        assert caught.value.body["message"] == f"the JSON schema of the tool 'odd' cannot be used: {reason}"


def test_calls_and_results_go_back_to_the_model(chats: Any) -> None:
    named = {"type": "function", "function": {"name": "add_note"}}
    message = chats.create(**ASK, tool_choice=named).choices[0].message
    assert message.tool_calls and [call.function.name for call in message.tool_calls] == ["add_note"]
    messages = [
        *ASK["messages"],
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"},
    ]
    answer = chats.create(**{**ASK, "messages": messages}, max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length")
    longer = answer.usage.prompt_tokens if answer.usage else 0
    shorter = chats.create(**ASK, max_tokens=1).usage
    assert shorter is not None and longer > shorter.prompt_tokens + 10
