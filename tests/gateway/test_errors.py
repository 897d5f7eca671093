"""Bad input gets an error that names the field, and never reaches the engine."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foretoken.errors import InvalidRequestError
from foretoken.limits import MAX_BODY_BYTES
from gateway.fields import parse_object
from gateway.openai.request import GenerationOptions, parse_chat, parse_completion
from gateway.sampling_defaults import SamplingDefaults
from gateway.sglang.generate import GenerateFields
from tests.gateway.conftest import Stack, events
from tests.gateway.scripted_verifier import Player, steps
from tests.support.sampling_limits import NUMBERS
from tests.support.tcp_clients import chunk, chunked_post

pytestmark = pytest.mark.anyio
URL = "/v1/completions"

BAD_FIELDS: list[tuple[str, object]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", ["a", 5]),
    ("prompt", [1, "a"]),
    ("prompt", [1, True]),
    ("prompt", [-1]),
    ("prompt", [10**6]),
    ("prompt", ["a"] * 65),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 10**7),
    ("max_tokens", 2**70),
    ("max_completion_tokens", 0),
    ("min_tokens", 17),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 17),
    ("n", "2"),
    ("n", True),
    ("n", 2**63),
    ("seed", 2**63),
    ("seed", 0.5),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ""),
    ("stop", ["a"] * 65),
    ("stop", "x" * 257),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 65),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("cache_salt", "x" * 257),
    ("stream", "yes"),
    ("stream_options", 5),
    ("best_of", 2),
    ("suffix", "x"),
    ("echo", 1),
    ("speculative", 5),
    ("speculative", True),
    ("speculative.max_draft_tokens", {"max_draft_tokens": 256}),
    ("speculative.shape", {"shape": "3-1-4"}),
    ("speculative.shape.topk", {"shape": {"num_steps": 3, "num_draft_tokens": 4}}),
    ("speculative.shape.num_steps", {"shape": {"num_steps": 65, "topk": 1, "num_draft_tokens": 4}}),
    ("speculative.shape.wrong", {"shape": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "wrong": 1}}),
    ("speculative.drafter", {"drafter": "other"}),
    ("speculative.enabled", {"enabled": 1}),
    ("speculative.wrong", {"wrong": 1}),
]


async def test_bad_fields_are_named(stack: Stack) -> None:
    for field, value in BAD_FIELDS:
        top, _, _ = field.partition(".")
        answer = await stack.http.post(URL, content=json.dumps({"prompt": "a", top: value}))
        assert answer.status_code == 400, (field, value, answer.text)
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", None)
        assert error["param"].startswith(field) and top in error["message"], (field, value, error)
    assert not stack.verifier.submitted


# The field's name beside the prompt, by endpoint.
NUMBER_FIELDS: dict[str, tuple[str, str]] = {name: (URL, name) for name in NUMBERS if name != "prompt_logprobs"} | {
    "prompt_logprobs": ("/generate", "top_logprobs_num")
}


@pytest.mark.parametrize("field", NUMBERS)
async def test_numbers_are_taken_to_the_ends_of_their_ranges_and_not_beyond(stack: Stack, field: str) -> None:
    path, name = NUMBER_FIELDS[field]
    body: dict[str, object] = {"prompt": "a"}
    if path == "/generate":
        body = {"text": "a", "return_logprob": True, "logprob_start_len": 0}
    low, high, below, above = NUMBERS[field]
    for value in (below, above):
        answer = await stack.http.post(path, json={**body, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), (value, answer.text)
    assert not stack.verifier.submitted
    if field == "min_tokens":
        body["max_tokens"] = 1_000_000
    for value in (low, high):
        answer = await stack.http.post(path, json={**body, name: value})
        assert answer.status_code == 200, (value, answer.text)
        # The context of this model is 128 tokens, one of them the prompt's.
        taken = min(value, 127) if field in ("max_tokens", "min_tokens") else value
        assert getattr(stack.verifier.submitted[-1].sampling, field) == taken


async def test_unknown_drafter_lists_the_names(stack: Stack) -> None:
    answer = await stack.http.post(URL, json={"prompt": "a", "speculative": {"drafter": "typo"}})
    assert "auto, merge, ngram" in answer.json()["error"]["message"]


async def test_bodies_that_are_no_json_object(stack: Stack) -> None:
    bodies = [b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"{" + b'"a":[' * 5000, b"null"]
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
        for body in bodies:
            answer = await stack.http.post(path, content=body)
            assert answer.status_code == 400, (path, body[:20])
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_beyond_the_limit_is_refused_and_not_kept(stack: Stack) -> None:
    answer = await stack.http.post(URL, content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413

    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(chunked_post(URL))
    part = chunk(b" " * (1 << 16))
    sent = 0
    status = asyncio.ensure_future(reader.readline())
    while not status.done() and sent < 16 * MAX_BODY_BYTES:
        writer.write(part)
        sent += 1 << 16
        try:
            await writer.drain()
        except ConnectionError:
            break
        await asyncio.sleep(0)
    assert b" 413 " in await status
    # It still may send for a while, so that it reads the answer in the end.
    assert sent < 8 * MAX_BODY_BYTES
    writer.close()


async def test_endless_headers_end_the_connection(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(b"GET /health HTTP/1.1\r\n")
    for _ in range(40):
        writer.write(b"x-filler: " + b"a" * 4096 + b"\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_unknown_model_path_and_method(stack: Stack) -> None:
    answer = await stack.http.post(URL, json={"prompt": "a", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await stack.http.get("/v1/models/other")).status_code == 404
    answer = await stack.http.get("/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert (await stack.http.get(URL)).status_code == 405


STATUSES = [
    (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "requests"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    (grpc.StatusCode.FAILED_PRECONDITION, 409, "invalid_request_error"),
    (grpc.StatusCode.INTERNAL, 500, "server_error"),
    (grpc.StatusCode.DATA_LOSS, 500, "server_error"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_verifier_before_the_first_token(stack: Stack, stream: bool) -> None:
    for code, status, kind in STATUSES:

        async def play(player: Player, code: grpc.StatusCode = code) -> None:
            player.error(code, "words of the verifier", "temperature")

        stack.verifier.script = play
        answer = await stack.http.post(URL, json={"prompt": "a", "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (status, kind, "temperature")
        assert error["message"] == ("internal error" if code is grpc.StatusCode.INTERNAL else "words of the verifier")
        assert ("retry-after" in answer.headers) == (status == 429)
        assert (answer.headers.get("x-should-retry") == "false") == (
            code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DATA_LOSS)
        )
        # None of them is retried, on any verifier.
        assert len(stack.verifier.submitted) == STATUSES.index((code, status, kind)) + 1


async def test_error_after_the_first_token_is_one_event(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens(stack.ids("hello"))
        await answered.wait()
        player.error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

    answered = asyncio.Event()
    stack.verifier.script = play
    async with stack.http.stream("POST", URL, json={"prompt": "a", "stream": True}) as answer:
        assert answer.status_code == 200
        text = ""
        async for part in answer.aiter_text():
            text += part
            answered.set()
    *_, last = events(text)
    assert last["error"]["type"] == "timeout_error" and "choices" not in last


async def test_one_choice_that_fails_drops_the_others(stack: Stack) -> None:
    async def play(player: Player) -> None:
        if player.sequence.choice_index == 1:
            player.error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        else:
            await player.aborted.wait()

    stack.verifier.script = play
    answer = await stack.http.post(URL, json={"prompt": "a", "n": 3})
    assert answer.status_code == 429
    await stack.verifier.until(lambda: len(stack.verifier.aborts) == 2)
    assert sorted(abort.choice_index for abort in stack.verifier.aborts) == [0, 2]
    assert stack.gateway.verifiers.num_sequences == 0


async def test_refusals_are_counted(stack: Stack) -> None:
    await stack.http.post(URL, json={"prompt": ""})
    assert await stack.metric("foretoken_admission_rejections_total", reason="invalid_argument") == 1.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*GenerateFields.model_fields, *(field for field, _ in BAD_FIELDS), "messages", "user", "tools"]
)


@hypothesis_settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_no_value_of_any_field_is_a_fault(body: dict[str, object]) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            _, options = parse(dict(body), SamplingDefaults())
        except InvalidRequestError as error:
            assert error.message
        else:
            assert isinstance(options, GenerationOptions)


@given(st.binary(max_size=20))
def test_no_bytes_are_a_fault(body: bytes) -> None:
    try:
        assert isinstance(parse_object(body), dict)
    except InvalidRequestError as error:
        assert error.message


async def test_engine_is_untouched_by_a_hundred_random_requests(stack: Stack) -> None:
    stack.verifier.script = steps([1])
    values = [None, -1, 0, 1e308, 2**64, "", "x", [], {}, [[]], {"a": {}}, True]
    for number, (field, _) in enumerate(BAD_FIELDS):
        answer = await stack.http.post(URL, json={"prompt": "a", field: values[number % len(values)]})
        assert answer.status_code in (200, 400), (field, answer.text)


async def test_complaints_are_in_words_of_the_request(stack: Stack) -> None:
    for body, message in (
        ({"speculative": True}, "speculative must be an object"),
        ({"stream_options": True}, "stream_options must be an object"),
        ({"n": "2"}, "n must be a valid integer"),
        ({"n": 0}, "n must be an integer in [1, 16], got 0"),
    ):
        answer = await stack.http.post(URL, json={"prompt": "a"} | body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


async def test_only_an_assistant_may_say_nothing(stack: Stack) -> None:
    for role in ("user", "system", "developer"):
        for message in ({"role": role, "content": None}, {"role": role}):
            answer = await stack.http.post("/v1/chat/completions", json={"messages": [message]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.content"), message
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert (await stack.http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
