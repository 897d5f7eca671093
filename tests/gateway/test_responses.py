"""POST /v1/responses over real HTTP, and the real openai client against it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from protos import common_pb2
from tests.gateway.conftest import MODEL, Stack
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps

pytestmark = pytest.mark.anyio
URL = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def events(text: str) -> list[dict[str, Any]]:
    """Return a stream's events, each valid in OpenAI's types, named by its type and numbered."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}" and value["sequence_number"] == number
        EVENT.validate_python(value)
        found.append(value)
    return found


async def test_a_text_gets_a_whole_response(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), reason=STOP)
    body = {"input": "hi", "instructions": "be brief", "metadata": {"a": "b"}, "user": "me", "store": False}
    answer = (await stack.http.post(URL, json=body)).json()
    Response.model_validate(answer)
    prompt = stack.ids("<|user|>system: be brief\n<|user|>user: hi\nassistant: ")
    assert list(stack.verifier.submitted[0].prompt_token_ids) == prompt
    assert answer["id"].startswith("resp_") and answer["model"] == MODEL and answer["status"] == "completed"
    (item,) = answer["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert answer["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + 1,
    }
    assert (answer["metadata"], answer["user"], answer["store"]) == ({"a": "b"}, "me", False)
    assert answer["instructions"] == "be brief" and answer["metrics"]["speculative_decoding"]


async def test_a_stream_has_openais_events_in_order(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" world"), reason=STOP)
    found = events((await stack.http.post(URL, json={"input": "hi", "stream": True})).text)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 2,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in found[4:6]] == ["hello", " world"]
    response = found[-1]["response"]
    assert found[-2]["item"] == response["output"][0]
    assert response["output"][0]["content"][0]["text"] == found[6]["text"] == "hello world"
    assert response["usage"]["output_tokens"] == len(stack.ids("hello world"))
    assert {event["response"]["id"] for event in (found[0], found[1])} == {response["id"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_limit_makes_a_response_incomplete(stack: Stack, stream: bool) -> None:
    stack.verifier.script = steps(stack.ids("hello"), reason=LENGTH)
    answer = await stack.http.post(URL, json={"input": "hi", "max_output_tokens": 1, "stream": stream})
    if stream:
        last = events(answer.text)[-1]
        assert last["type"] == "response.incomplete"
    response = last["response"] if stream else answer.json()
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["max_output_tokens"] == stack.verifier.submitted[0].sampling.max_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_with_their_text(stack: Stack, stream: bool) -> None:
    """The first token's text waits for the second: half a character is never shown."""
    tokens = stack.ids("é")
    assert len(tokens) == 2

    async def play(player: Player) -> None:
        for number, token in enumerate(tokens):
            logprob = -0.5 - number
            entry = common_pb2.TokenLogprobs(
                token_id=token, logprob=logprob, rank=1, top_ids=[token, 65], top_logprobs=[logprob, -2]
            )
            player.tokens([token], logprobs=[entry])
            await player.taken()
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    answer = await stack.http.post(URL, json=body)
    parts = [answer.json()["output"][0]["content"][0]] if not stream else []
    if stream:
        found = events(answer.text)
        parts = [event for event in found if event["type"].startswith("response.output_text.")]
        parts.append(found[-1]["response"]["output"][0]["content"][0])
        assert len(parts) == 3
    for part in parts:
        assert [logprob["logprob"] for logprob in part["logprobs"]] == [-0.5, -1.5]
        assert b"".join(bytes(logprob["bytes"]) for logprob in part["logprobs"]).decode() == "é"
        assert [item["logprob"] for item in part["logprobs"][0]["top_logprobs"]] == [-0.5, -2.0]


async def test_items_become_messages(stack: Stack) -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "h"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "y"},
    ]
    answer = await stack.http.post(URL, json={"input": items, "instructions": "be brief"})
    assert answer.status_code == 200, answer.text
    prompt = "<|user|>system: be brief\n\nbe kind\n<|user|>user: h\n<|user|>assistant: x\n<|user|>user: y\nassistant: "
    assert list(stack.verifier.submitted[0].prompt_token_ids) == stack.ids(prompt)


HARMLESS: list[dict[str, Any]] = [
    {"store": False, "background": False, "previous_response_id": None, "tools": []},
    {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}},
    {"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "auto", "service_tier": "auto"},
    {"stream_options": {"include_obfuscation": False}, "prompt_cache_key": "a", "safety_identifier": "b"},
    {"reasoning": {"effort": None}, "metadata": None, "text": {"format": None}, "max_output_tokens": None},
    {"top_k": 5, "min_p": 0.1, "seed": 3, "cache_salt": "s", "speculative": {"enabled": False}, "stop": ["x"]},
]


@pytest.mark.parametrize("extra", HARMLESS)
async def test_harmless_fields_are_taken(stack: Stack, extra: dict[str, Any]) -> None:
    answer = await stack.http.post(URL, json={"input": "hi", **extra})
    assert answer.status_code == 200, answer.text


async def test_extensions_reach_the_verifier(stack: Stack) -> None:
    extra = {"top_k": 5, "seed": 3, "cache_salt": "s", "speculative": {"enabled": False}, "temperature": 0.5}
    answer = (await stack.http.post(URL, json={"input": "hi", **extra})).json()
    sequence = stack.verifier.submitted[0]
    assert (sequence.sampling.top_k, sequence.sampling.seed, sequence.cache_salt) == (5, 3, "s")
    assert not sequence.speculation.enabled and answer["temperature"] == sequence.sampling.temperature == 0.5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["a"]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "king", "content": "a"}]}, "input.0.role"),
    ({"input": "word " * 200}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "name": "a"}, {"type": "mcp"}]}, "tools.1.type"),
    ({"tool_choice": {"type": "code_interpreter"}}, "tool_choice.type"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": 3}, "temperature"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"speculative": {"enabled": True, "x": 1}}, "speculative.x"),
    ({"truncation": "middle"}, "truncation"),
]


@pytest.mark.parametrize(("extra", "field"), REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(stack: Stack, extra: dict[str, Any], field: str) -> None:
    answer = await stack.http.post(URL, json={"input": "hi", **extra})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert field.split(".")[0] in error["message"]
    assert not stack.verifier.submitted


async def test_another_model_and_stored_responses_are_not_found(stack: Stack) -> None:
    answers = [
        await stack.http.post(URL, json={"input": "hi", "model": "other"}),
        await stack.http.get(f"{URL}/resp_1"),
        await stack.http.delete(f"{URL}/resp_1"),
        await stack.http.post(f"{URL}/resp_1/cancel"),
        await stack.http.get(f"{URL}/resp_1/input_items"),
    ]
    assert [answer.status_code for answer in answers] == [404] * 5
    assert all("keeps no responses" in answer.json()["error"]["message"] for answer in answers[1:])


async def test_the_openai_client_creates_streams_and_parses(stack: Stack) -> None:
    class Answer(BaseModel):
        number: int

    stack.verifier.script = steps(stack.ids('{"number":'), stack.ids("5}"), reason=STOP)
    async with client(stack) as api:
        created = await api.responses.create(model=MODEL, input="hi")
        assert created.output_text == '{"number":5}'
        parsed = await api.responses.parse(model=MODEL, input="hi", text_format=Answer)
        assert parsed.output_parsed == Answer(number=5)
        async with api.responses.stream(model=MODEL, input="hi", text_format=Answer) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert final.output_parsed == Answer(number=5)
        again = await api.responses.create(model=MODEL, input=[*created.output, {"role": "user", "content": "more"}])  # type: ignore[list-item]
        assert again.status == "completed"
    schema = json.loads(stack.verifier.submitted[1].sampling.json_schema)
    assert schema["properties"] == {"number": {"title": "Number", "type": "integer"}}


async def test_an_error_before_the_stream_is_a_status_and_within_it_a_failed_response(stack: Stack) -> None:
    answered = asyncio.Event()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    async def play(player: Player) -> None:
        if len(stack.verifier.submitted) == 2:
            player.tokens(stack.ids("hello"))
            await answered.wait()
        player.error(code, "not now")

    stack.verifier.script = play
    answer = await stack.http.post(URL, json={"input": "hi", "stream": True})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "requests")
    async with stack.http.stream("POST", URL, json={"input": "hi", "stream": True}) as streamed:
        text = ""
        async for part in streamed.aiter_text():
            text += part
            answered.set()
    *_, item, last = events(text)
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "rate_limit_exceeded", "message": "not now"}
    assert last["response"]["output"] == [item["item"]]


async def test_a_grammar_that_the_verifier_refuses_names_the_apis_field(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.error(grpc.StatusCode.INVALID_ARGUMENT, "bad schema", field="json_schema")

    stack.verifier.script = play
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "thing"}}}
    answer = await stack.http.post(URL, json={"input": "hi", "text": text})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")


async def test_requests_are_counted_and_logged_under_their_api(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gateway.core"):
        await stack.http.post(URL, json={"input": "hi"}, headers={"x-request-id": "mine"})
        await stack.http.post(URL, json={"input": []})
    ended, refused = caplog.records
    assert (ended.message, ended.api, ended.client_request_id) == ("request", URL, "mine")  # type: ignore[attr-defined]
    assert (refused.message, refused.api, refused.field) == ("request refused", URL, "input")  # type: ignore[attr-defined]


async def test_truncation_drops_the_oldest_turns_that_leave_no_room(stack: Stack) -> None:
    """The scripted model's context is 128 tokens: a quarter of it stays for the answer."""
    turns = [
        {"role": role, "content": f"{number} hello world"} for number in range(9) for role in ("user", "assistant")
    ]
    items = [{"role": "developer", "content": "be brief"}, *turns, {"role": "user", "content": "last"}]

    async def kept(**fields: Any) -> str:
        answer = await stack.http.post(URL, json={"input": items, "truncation": "auto", **fields})
        assert answer.status_code == 200, answer.text
        ids = stack.verifier.submitted[-1].prompt_token_ids
        return stack.tokenizer.decode(ids, skip_special_tokens=False)

    assert (await stack.http.post(URL, json={"input": items})).status_code == 400
    longest, shorter = await kept(max_output_tokens=1), await kept()
    for prompt in (longest, shorter):
        first, _, rest = prompt.partition("\n")
        assert first == "<|user|>system: be brief"
        number = int(rest.removeprefix("<|user|>user: ")[0])
        texts = [f"<|user|>{turn['role']}: {turn['content']}\n" for turn in turns[2 * number :]]
        assert rest == "".join(texts) + "<|user|>user: last\nassistant: "
        # One more turn would have been too much.
        more = len(stack.ids(f"<|user|>user: {number} hello world\n<|user|>assistant: {number} hello world\n"))
        most = 127 if prompt is longest else 96
        assert len(stack.ids(prompt)) <= most < len(stack.ids(prompt)) + more
    assert len(shorter) < len(longest)
    # The last turn alone may use the room; a longer one is refused.
    items[1:] = [turns[0], {"role": "user", "content": "hello world " * 18}]
    assert "0 hello" not in await kept()
    items[1:] = [{"role": "user", "content": "word " * 200}]
    refused = await stack.http.post(URL, json={"input": items, "truncation": "auto"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
