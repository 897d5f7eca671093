"""What is sent to a server, and what is asked of it before a load."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken.bench.client import CHAT, COMPLETIONS, Address
from foretoken.bench.completion import StreamError
from foretoken.bench.prompts import LoadPrompt
from foretoken.bench.target import BenchTarget, RequestOptions, served_model, takes_ignore_eos, text_maker
from foretoken.errors import ConfigError, UnavailableError
from tests.support.scripted_server import scripted_server

NOWHERE = Address("127.0.0.1", 1)


def target(address: Address = NOWHERE, endpoint: Any = "completions", **options: Any) -> BenchTarget:
    return BenchTarget("first", address, "m", RequestOptions(endpoint, **options))


def reply(value: object, status: str = "200 OK") -> Iterator[bytes]:
    text = json.dumps(value)
    yield f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


def test_a_completion_and_a_chat() -> None:
    prompt = LoadPrompt.of_text("hi", output_len=7, group="g")
    stream = target().stream(prompt, 1.5)
    assert (stream.path, stream.group, stream.starts_after, stream.is_conversation) == (COMPLETIONS, "g", 1.5, False)
    common = {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert stream.bodies == (common | {"prompt": "hi"},)
    stream = target(endpoint="chat").stream(prompt)
    assert stream.path == CHAT and stream.bodies == (common | {"messages": [{"role": "user", "content": "hi"}]},)


def test_options_change_the_body_and_more_fields_win() -> None:
    prompt = LoadPrompt.of_text("hi", output_len=7)
    (body,) = target(output_len=9, temperature=0.5, ignore_eos=False).stream(prompt).bodies
    assert (body["max_tokens"], body["temperature"], "ignore_eos" in body) == (9, 0.5, False)
    (body,) = (
        target(extra={"temperature": 1, "speculative": {"enabled": False}}).stream(LoadPrompt.of_text("hi")).bodies
    )
    assert (body["max_tokens"], body["temperature"], body["speculative"]) == (128, 1, {"enabled": False})
    salted = target(salted=True)
    salts = {salted.stream(prompt).bodies[0]["cache_salt"] for _ in range(3)}
    assert len(salts) == 3


def test_several_turns_are_a_conversation_and_need_a_chat() -> None:
    prompt = LoadPrompt.of_text("a", "b")
    stream = target(endpoint="chat").stream(prompt)
    assert stream.is_conversation and [body["messages"][0]["content"] for body in stream.bodies] == ["a", "b"]
    with pytest.raises(ConfigError, match="give --endpoint chat"):
        target().stream(prompt)


def test_the_first_model_is_asked_for() -> None:
    with scripted_server(lambda body: reply({"data": [{"id": "one"}, {"id": "two"}]})) as server:
        assert served_model(replace(server.address, prefix="/p", key="secret")) == "one"
        assert server.paths == ["/p/v1/models"] and server.keys == ["Bearer secret"]
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:\d+: "):
        served_model(server.address)


@pytest.mark.parametrize(
    ("answer", "status", "error", "message"),
    [
        ({"hello": 1}, "200 OK", UnavailableError, "is not an OpenAI-compatible server"),
        ({"error": {"message": "no key"}}, "401 Unauthorized", StreamError, r"status 401: .*no key"),
    ],
)
def test_a_server_without_models_is_an_error(answer: Any, status: str, error: type[Exception], message: str) -> None:
    with scripted_server(lambda body: reply(answer, status)) as server, pytest.raises(error, match=message):
        served_model(server.address)


def test_a_server_may_refuse_ignore_eos() -> None:
    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if "ignore_eos" in body:
            return reply({"error": {"message": "Unrecognized request argument: ignore_eos"}}, "400 Bad Request")
        return reply({"usage": {"prompt_tokens": 1}})

    with scripted_server(script) as server:
        assert not takes_ignore_eos(target(server.address))
        assert takes_ignore_eos(target(server.address, ignore_eos=False))
    with (
        scripted_server(lambda body: reply({"error": "no such model"}, "404 Not Found")) as server,
        pytest.raises(StreamError, match=r"status 404: .*no such model"),
    ):
        takes_ignore_eos(target(server.address))


def test_trial_requests_show_how_long_words_are() -> None:
    def script(body: dict[str, Any]) -> Iterator[bytes]:
        assert body["max_tokens"] == 1 and not body["stream"] and "stream_options" not in body
        (message,) = body["messages"]
        # A template of 11 tokens, and 2 tokens a word.
        return reply({"usage": {"prompt_tokens": 11 + 2 * len(message["content"].split())}})

    with scripted_server(script) as server:
        make = text_maker(target(server.address, "chat"), None)
    assert len(make(random.Random(0), 200).split()) == 100
    # With a tokenizer nothing is asked.
    make = text_maker(target(), lambda text: len(text.split()))
    assert len(make(random.Random(0), 200).split()) == 200


def test_a_server_without_usage_cannot_show_it() -> None:
    with scripted_server(lambda body: reply({})) as server, pytest.raises(StreamError, match="has no usage"):
        text_maker(target(server.address), None)
