"""POST /v1/messages over real HTTP, and the real anthropic client against it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import grpc
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.gateway.conftest import MODEL, Stack
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps

pytestmark = pytest.mark.anyio
URL = "/v1/messages"
HI = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def client(stack: Stack) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0)


def events(text: str) -> list[dict[str, Any]]:
    """Return a stream's events without pings, each valid in
    Anthropic's types and named by its type.
    """
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] != "ping":
            if value["type"] != "error":
                EVENT.validate_python(value)
            found.append(value)
    return found


async def test_a_text_gets_a_whole_message(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), reason=STOP)
    answer = await stack.http.post(URL, json={**HI, "system": "be brief", "seed": 3})
    message = answer.json()
    Message.model_validate(message)
    prompt = stack.ids("<|user|>system: be brief\n<|user|>user: hi\nassistant: ")
    assert list(stack.verifier.submitted[0].prompt_token_ids) == prompt
    assert stack.verifier.submitted[0].sampling.max_tokens == 20
    assert message.pop("id").startswith("msg_") and message.pop("metrics")["speculative_decoding"]
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
        "seed": 3,
    }


async def test_a_stream_has_anthropics_events_in_order(stack: Stack) -> None:
    async def play(player: Player) -> None:
        for word in ("hello", " world"):
            player.tokens(stack.ids(word))
            await player.taken()
        player.finish(STOP, num_cached_tokens=2)

    stack.verifier.script = play
    found = events((await stack.http.post(URL, json={**HI, "stream": True})).text)
    assert [event["type"] for event in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["delta"]["text"] for event in found[2:4]] == ["hello", " world"]
    prompt_tokens = len(stack.verifier.submitted[0].prompt_token_ids)
    assert found[0]["message"]["usage"]["input_tokens"] == prompt_tokens
    assert found[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[5]["usage"] == {
        "input_tokens": prompt_tokens - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(stack.ids("hello world")),
        "output_tokens_details": {"thinking_tokens": 0},
    }


async def test_a_stop_sequence_and_the_token_limit_are_told_apart(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello stop here"), reason=LENGTH)
    stopped = (await stack.http.post(URL, json={**HI, "stop_sequences": ["stop"]})).json()
    cut = (await stack.http.post(URL, json=HI)).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "stop")
    assert stopped["content"] == [{"type": "text", "text": "hello "}]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


async def test_turns_become_messages(stack: Stack) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    system = [{"type": "text", "text": "g", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "h"}]
    answer = await stack.http.post(URL, json={"max_tokens": 5, "system": system, "messages": messages})
    assert answer.status_code == 200, answer.text
    # The last message is the assistant's, so the model continues it.
    prompt = "<|user|>system: g\nh\n<|user|>user: a\nb\nc\n<|user|>assistant: d\n<|user|>user: e\n<|user|>assistant: f"
    assert list(stack.verifier.submitted[0].prompt_token_ids) == stack.ids(prompt)


HARMLESS: list[dict[str, Any]] = [
    {"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}},
    {"thinking": {"type": "disabled"}, "context_management": {"edits": []}, "tools": []},
    {"top_k": 5, "top_p": 0.5, "temperature": 0.1, "seed": 4, "speculative": {"enabled": False}},
]


@pytest.mark.parametrize("extra", HARMLESS)
async def test_harmless_fields_are_taken(stack: Stack, extra: dict[str, Any]) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    answer = await stack.http.post(f"{URL}?beta=true", json={**HI, **extra}, headers=headers)
    assert answer.status_code == 200, answer.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
    ({"messages": [{"role": "user", "content": "word " * 200}]}, "prompt is too long: "),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"stop_sequences": ["a" * 300]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
]


@pytest.mark.parametrize(("extra", "shown"), REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(stack: Stack, extra: dict[str, Any], shown: str) -> None:
    answer = await stack.http.post(URL, json={**HI, **extra})
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert shown in error["error"]["message"]
    assert not stack.verifier.submitted


async def test_count_tokens_counts_the_prompt(stack: Stack) -> None:
    body = {"messages": HI["messages"], "system": "be brief"}
    counted = (await stack.http.post(f"{URL}/count_tokens", json=body)).json()
    message = (await stack.http.post(URL, json={**body, "max_tokens": 1})).json()
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}
    long = {"messages": [{"role": "user", "content": "word " * 200}]}
    assert (await stack.http.post(f"{URL}/count_tokens", json=long)).json()["input_tokens"] > 128


async def test_errors_of_every_kind_have_anthropics_shape(stack: Stack) -> None:
    answers = [
        await stack.http.post(URL, json={**HI, "model": "other"}),
        await stack.http.get(URL),
        await stack.http.post(f"{URL}/batches", json={}),
        await stack.http.post(URL, content=b"{", headers={"content-type": "application/json"}),
        await stack.http.post(URL, content=b"{}", headers={"content-type": "text/plain"}),
        await stack.http.post(URL, content=b" " * (9 << 20)),
        await stack.http.post(URL, json=HI, headers={"origin": "http://evil"}),
        await stack.http.post(URL, json=HI, headers={"host": "evil"}),
    ]
    assert [(answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) for answer in answers] == [
        (404, "error", "not_found_error"),
        (405, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
        (400, "error", "invalid_request_error"),
        (415, "error", "invalid_request_error"),
        (413, "error", "request_too_large"),
        (403, "error", "permission_error"),
        (421, "error", "invalid_request_error"),
    ]


@pytest.mark.parametrize(
    ("code", "kind", "error_type"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, anthropic.RateLimitError, "rate_limit_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, anthropic.APIStatusError, "timeout_error"),
        (grpc.StatusCode.INTERNAL, anthropic.InternalServerError, "api_error"),
    ],
)
async def test_the_client_reads_errors_before_and_in_a_stream(
    stack: Stack, code: grpc.StatusCode, kind: type[Exception], error_type: str
) -> None:
    answered = asyncio.Event()

    async def play(player: Player) -> None:
        if len(stack.verifier.submitted) == 2:
            player.tokens(stack.ids("hello"))
            await answered.wait()
        player.error(code, "broken")

    stack.verifier.script = play
    texts: list[str] = []
    async with client(stack) as api:
        with pytest.raises(kind) as before:
            await api.messages.create(model=MODEL, stream=True, **HI)  # type: ignore[call-overload]
        with pytest.raises(anthropic.APIStatusError) as within:
            async with api.messages.stream(model=MODEL, **HI) as stream:  # type: ignore[arg-type]
                async for text in stream.text_stream:
                    texts.append(text)
                    answered.set()
    assert texts == ["hello"]
    for caught in (before, within):
        assert caught.value.body["error"]["type"] == error_type  # type: ignore[attr-defined]


async def test_a_draining_gateway_is_overloaded(stack: Stack) -> None:
    stack.gateway.core.admission.draining = True
    async with client(stack) as api:
        with pytest.raises(anthropic.OverloadedError) as caught:
            await api.messages.create(model=MODEL, **HI)  # type: ignore[call-overload]
    assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")


async def test_the_anthropic_client_creates_streams_parses_and_counts(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" world"), reason=STOP)
    turn: Any = HI["messages"]
    async with client(stack) as api:
        message = await api.messages.create(model=MODEL, max_tokens=9, messages=turn)
        assert message.content[0].type == "text" and message.content[0].text == "hello world"
        assert message._request_id == message.id
        async with api.messages.stream(model=MODEL, max_tokens=9, messages=turn) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert texts == ["hello", " world"] and final.usage == message.usage
        assert final.stop_reason == "end_turn"
        count = await api.messages.count_tokens(model=MODEL, messages=turn)
        assert count.input_tokens == message.usage.input_tokens
        answer: Any = {"role": "assistant", "content": message.content}
        again = await api.messages.create(model=MODEL, max_tokens=9, messages=[*turn, answer, *turn])
        assert again.stop_reason == "end_turn"


async def test_the_synchronous_client_creates_and_streams(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), reason=STOP)
    turn: Any = HI["messages"]

    def ask() -> tuple[str, str]:
        with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as api:
            message = api.messages.create(model=MODEL, max_tokens=9, messages=turn)
            assert message.content[0].type == "text"
            with api.messages.stream(model=MODEL, max_tokens=9, messages=turn) as stream:
                return message.content[0].text, stream.get_final_text()

    assert await asyncio.to_thread(ask) == ("hello", "hello")
