"""The cost of long texts and lists: encoding lets threads go on, too long a text is not encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway.fields
import gateway.tokenizer
from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.fields import parse_object
from gateway.tokenizer import SHORT_TEXT_CHARS, SHORT_TEXT_TOKENS, Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import LONG_TOKEN, Stack

# The scripted verifier's context.
CONTEXT = 128
NEVER_FITS = "a" * (CONTEXT * len(LONG_TOKEN))
EDGE = "a" * (CONTEXT * len(LONG_TOKEN) - len(LONG_TOKEN))


def turns_during(work: Callable[[], object]) -> int:
    """Return how often this thread wakes up while another one does ``work``."""
    begun, done = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        work()
        done.set()

    worker = threading.Thread(target=run)
    worker.start()
    begun.wait()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    worker.join()
    return turns


def test_other_threads_go_on_while_one_encodes_and_decodes(tokenizer: Tokenizer) -> None:
    """A call that holds the GIL lets this thread wake up once or twice, however long it takes."""
    text = "hello 🙂" * 60_000
    assert turns_during(lambda: tokenizer.encode(text)) > 20
    ids = tokenizer.encode(text)
    assert turns_during(lambda: [tokenizer.decode(ids) for _ in range(3)]) > 20


@given(
    text=st.lists(st.one_of(st.text(), st.sampled_from(["<|end|>", "é🙂", " <tool call> ", "a " * 9]))).map("".join),
    special=st.booleans(),
)
def test_long_texts_have_the_same_ids(tokenizer: Tokenizer, text: str, special: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=special)
    decoded = tokenizer.decode(ids, skip_special_tokens=special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.tokenizer, "SHORT_TEXT_CHARS", -1)
        patch.setattr(gateway.tokenizer, "SHORT_TEXT_TOKENS", -1)
        assert tokenizer.encode(text, add_special_tokens=special) == ids
        assert tokenizer.decode(ids, skip_special_tokens=special) == decoded


def test_too_many_tokens_are_seen_before_their_list_is_made(tokenizer: Tokenizer) -> None:
    counts: list[int] = []
    text = "hello " * SHORT_TEXT_CHARS
    assert len(tokenizer.encode(text, check=counts.append)) == counts[0]


def forbid_encoding(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(text: str, **_: object) -> list[int]:
        # The default of a missing prediction.
        assert not text, "encoded what can never fit"
        return []

    monkeypatch.setattr(stack.gateway.core.tokenizer, "encode", encode)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": NEVER_FITS}, "prompt"),
        ("/v1/completions", {"prompt": [NEVER_FITS] * 4}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": NEVER_FITS}]}, "messages"),
        ("/generate", {"text": NEVER_FITS}, "text"),
        ("/tokenize", {"prompt": NEVER_FITS}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": NEVER_FITS}]}, "messages"),
        ("/generate", {"input_ids": [1], "prediction": NEVER_FITS * 2}, "prediction"),
        (
            "/v1/completions",
            {"prompt": [1], "prediction": {"type": "content", "content": NEVER_FITS * 2}},
            "prediction",
        ),
    ],
)
async def test_what_can_never_fit_is_not_encoded(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str
) -> None:
    forbid_encoding(stack, monkeypatch)
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert "context" in answer.json()["error"]["message"] and "128 tokens" in answer.json()["error"]["message"]


async def refused(stack: Stack, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            async for _ in stub.Generate(gateway_pb2.GenerateRequest(**fields)):
                pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return caught.value


def field_of(error: grpc.aio.AioRpcError) -> str:
    return str(dict(error.trailing_metadata() or ())["foretoken-field"])


@pytest.mark.anyio
async def test_what_can_never_fit_is_not_encoded_for_grpc(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_encoding(stack, monkeypatch)
    assert field_of(await refused(stack, text=NEVER_FITS)) == "text"
    one = gateway_pb2.TokenIds(ids=[1])
    assert field_of(await refused(stack, token_ids=one, prediction_text=NEVER_FITS * 2)) == "prediction"


@pytest.mark.anyio
async def test_the_context_is_checked_by_the_count_before_the_next_prompt(stack: Stack) -> None:
    """A text that might fit is encoded and counted; after one too long, no other is encoded."""
    seen: list[int] = []
    encode = stack.gateway.core.tokenizer.encode

    def spy(text: str, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack.gateway.core.tokenizer, "encode", spy)
        answer = await stack.http.post("/v1/completions", json={"prompt": [EDGE] * 4})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" not in answer.json()["error"]["message"]
    assert seen == [len(EDGE)]


@pytest.mark.anyio
async def test_the_longest_text_that_may_fit_does(stack: Stack) -> None:
    answer = await stack.http.post("/v1/completions", json={"prompt": LONG_TOKEN * (CONTEXT - 1), "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == CONTEXT - 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/detokenize", {"tokens": [1] * (limits.MAX_TOKENIZED_IDS + 1)}, "tokens"),
        ("/detokenize", {"tokens": [5] * (limits.MAX_JSON_VALUES + 2)}, "tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
            "messages.0.content",
        ),
        # Its first message is at fault too: the count is checked before the messages.
        ("/v1/chat/completions", {"messages": [{"role": "nobody"}] * (limits.MAX_CHAT_MESSAGES + 1)}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "reasoning_content": "a" * 1_000_001}] * 2},
            "messages",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "prediction": {"type": "content", "content": [{"type": "text", "text": ""}] * 1025}},
            "prediction.content",
        ),
    ],
)
async def test_counts_are_bounded(stack: Stack, path: str, body: dict[str, Any], field: str) -> None:
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.anyio
async def test_counts_are_bounded_for_grpc_before_they_are_copied(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = gateway_pb2.TokenIds
    cases: list[tuple[str, dict[str, Any]]] = [
        ("token_ids", {"token_ids": ids(ids=[10**9] * 500)}),
        ("prediction", {"text": "a", "prediction_token_ids": ids(ids=[10**9] * 500)}),
        ("stop", {"text": "a", "stop": [""] * 500}),
        ("stop_token_ids", {"text": "a", "sampling": common_pb2.SamplingParams(stop_token_ids=[10**9] * 500)}),
        (
            "logit_bias",
            {"text": "a", "sampling": common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(2000), 1.0))},
        ),
    ]

    async def check(*_: object, **__: object) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(stack.gateway.core, "check", check)
    for field, fields in cases:
        assert field_of(await refused(stack, **fields)) == field


@pytest.mark.anyio
async def test_long_work_leaves_the_event_loop(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = stack.gateway.core.tokenizer, dict[str, set[int]]()

    def watch(name: str) -> None:
        method = getattr(tokenizer, name)

        def spy(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return method(*args, **options)

        monkeypatch.setattr(tokenizer, name, spy)

    for name in ("encode", "decode", "token_text", "render_chat"):
        watch(name)
    many = "é🙂" * (SHORT_TEXT_TOKENS + 1)
    answer = await stack.http.post("/tokenize", json={"prompt": many, "return_token_strs": True})
    assert len(answer.json()["token_strs"]) == answer.json()["count"] == SHORT_TEXT_TOKENS + 1
    tokens = answer.json()["tokens"]
    assert (await stack.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": many}
    messages = [{"role": "user", "content": ""}] * limits.MAX_CHAT_MESSAGES
    assert (await stack.http.post("/tokenize", json={"messages": messages})).status_code == 200
    assert set(threads) == {"encode", "decode", "token_text", "render_chat"}
    assert all(threading.get_ident() not in idents for idents in threads.values())


def body_of(*values: Sequence[bytes]) -> bytes:
    """Return a JSON object with a list of ``values`` in its field "many"."""
    (items,) = values
    return b'{"model": "tiny","many":[' + b",".join(items) + b"]}"


TOO_MUCH = {
    "numbers": body_of([b"5"] * (limits.MAX_JSON_VALUES + 2)),
    "strings": body_of([b'"a"'] * (limits.MAX_JSON_STRINGS + 1)),
    "lists": body_of([b"[]"] * (limits.MAX_JSON_CONTAINERS + 1)),
    "objects": body_of([b"{}"] * (limits.MAX_JSON_CONTAINERS + 1)),
    "fields": b"{" + b",".join(b'"%x":1' % i for i in range(limits.MAX_JSON_FIELDS + 1)) + b"}",
    "after escapes": b'{"a":"\\\\\\"",' + body_of([b"[]"] * (limits.MAX_JSON_CONTAINERS + 1))[1:],
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_body_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert orjson.loads(TOO_MUCH[kind]), "valid JSON"

    def loads(_: bytes) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr(gateway.fields.orjson, "loads", loads)
    with pytest.raises(InvalidRequestError, match="too much to read") as caught:
        parse_object(TOO_MUCH[kind])
    named = {"numbers", "lists", "objects", "after escapes"}
    assert caught.value.field == ("many" if kind in named else "")


@pytest.mark.parametrize("mark", [",", ":", "[", "{", '"', '\\"', "\\", '\\",[{:'])
def test_text_costs_nothing_of_that(mark: str) -> None:
    value = {"prompt": mark * (limits.MAX_JSON_VALUES + 10), "stop": [mark, 'a"']}
    assert parse_object(orjson.dumps(value)) == value
