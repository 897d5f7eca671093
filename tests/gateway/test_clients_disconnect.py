"""A client leaves at any phase of a request: its sequences end, its place is free, one log line."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import STOP, Player, steps
from tests.support.tcp_clients import raw_post, relay, reset

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
LONG_TEXT = "hello " * 1000


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
async def watched(stack: Stack, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Stack]:
    """Run a stack that a test must leave as before: no request, no task, one log line a request."""
    # The first request creates everything that stays.
    await stack.http.post(URL, json={"prompt": "a"})
    stack.verifier.submitted.clear()
    caplog.set_level(logging.INFO)
    num_tasks = len(asyncio.all_tasks())
    yield stack
    submitted = [(item.request_id, item.choice_index) for item in stack.verifier.submitted]
    await stack.verifier.until(lambda: len(stack.verifier.aborts) == len(submitted))
    assert [(item.request_id, item.choice_index) for item in stack.verifier.aborts] == submitted
    await until(lambda: stack.gateway.core.admission.num_requests == 0)
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
    records = caplog.get_records("call") + caplog.get_records("teardown")
    lines = [record for record in records if record.name == "gateway.core"]
    assert [record.__dict__["outcome"] for record in lines] == ["cancelled"]
    # uvicorn and grpc have logged no complaint.
    assert [record for record in records if record.levelno >= logging.WARNING] == []
    # The next one is served.
    stack.verifier.script = steps([65], reason=STOP)
    assert (await stack.http.post(URL, json={"prompt": "a"})).status_code == 200


async def never(player: Player) -> None:
    await player.aborted.wait()


async def one_token(player: Player) -> None:
    player.tokens([65])
    await player.aborted.wait()


async def all_but_the_end(player: Player) -> None:
    player.tokens([65])
    player.tokens([66], sources=[0])
    await player.aborted.wait()


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "reset":
        reset(writer)
    else:
        writer.close()


class SlowEncoding:
    """The gateway's tokenizer, held up in the thread that encodes long texts."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = stack.gateway.core.tokenizer
        encode = tokenizer.encode
        self.began, self.go_on = threading.Event(), threading.Event()

        def held(text: str, **options: Any) -> list[int]:
            self.began.set()
            self.go_on.wait()
            return encode(text, **options)

        monkeypatch.setattr(tokenizer, "encode", held)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_while_the_body_is_sent(watched: Stack, how: str, caplog: pytest.LogCaptureFixture) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", watched.settings.port)
    writer.write(raw_post(URL, b'{"prompt": ', "content-length: 1000"))
    await writer.drain()
    await until(lambda: any("run_asgi" in repr(task) for task in asyncio.all_tasks()))
    leave(writer, how)
    await until(lambda: any(record.name == "gateway.core" for record in caplog.records))
    assert not watched.verifier.submitted


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_while_the_prompt_is_encoded(watched: Stack, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.verifier.script = never
    watched.verifier.info.max_model_len = 10_000
    await watched.http.get("/ready")
    with monkeypatch.context() as patches:
        encoding = SlowEncoding(watched, patches)
        _, writer = await asyncio.open_connection("127.0.0.1", watched.settings.port)
        writer.write(raw_post(URL, {"prompt": LONG_TEXT, "stream": True}))
        await asyncio.to_thread(encoding.began.wait)
        leave(writer, how)
        encoding.go_on.set()
        await watched.verifier.until(lambda: bool(watched.verifier.aborts))


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [never, one_token, all_but_the_end])
async def test_while_the_verifier_works(watched: Stack, script: Any, stream: bool, how: str) -> None:
    watched.verifier.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", watched.settings.port)
    body = {"prompt": ["a", "b"], "n": 2, "stream": stream, "max_tokens": 2}
    writer.write(raw_post(URL, body))
    await watched.verifier.until(lambda: len(watched.verifier.submitted) == 4)
    if stream and script is not never:
        await reader.readuntil(b"data: ")
    leave(writer, how)


async def test_between_a_stop_string_and_the_verifiers_answer(watched: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """The text is complete, but its figures are not."""

    async def play(player: Player) -> None:
        player.tokens(watched.ids("hello stop"))
        await player.aborted.wait()

    watched.verifier.script = play
    reader, writer = await asyncio.open_connection("127.0.0.1", watched.settings.port)
    writer.write(raw_post(URL, {"prompt": "a", "stop": "stop", "stream": True, "max_tokens": 50}))
    await reader.readuntil(b"hello")
    await watched.verifier.until(lambda: len(watched.verifier.aborts) == 1)
    writer.close()
    await until(lambda: any(record.name == "gateway.core" for record in caplog.records))
    # One abort for the stop string, one for the departure.
    await watched.verifier.until(lambda: len(watched.verifier.aborts) == 2)
    watched.verifier.aborts.pop()


@pytest.mark.parametrize("how", ["cancel", "reset"])
@pytest.mark.parametrize("phase", ["encoding", "queued", "streaming", "last"])
async def test_grpc(
    watched: Stack, phase: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.verifier.script = {"streaming": one_token, "last": all_but_the_end}.get(phase, never)
    watched.verifier.info.max_model_len = 10_000
    await watched.http.get("/ready")
    request = gateway_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(max_tokens=2))
    async with relay(watched.settings.grpc_port) as between:
        with monkeypatch.context() as patches:
            encoding = SlowEncoding(watched, patches) if phase == "encoding" else None
            if encoding is not None:
                request.text = LONG_TEXT
            options = [("grpc.enable_retries", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{between.port}", options=options) as channel:
                call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
                if encoding is not None:
                    await asyncio.to_thread(encoding.began.wait)
                else:
                    await watched.verifier.until(lambda: len(watched.verifier.submitted) == 1)
                if phase in ("streaming", "last"):
                    await call.read()
                if how == "cancel":
                    call.cancel()
                else:
                    between.reset()
                await until(lambda: any(record.name == "gateway.core" for record in caplog.records))
            if encoding is not None:
                encoding.go_on.set()
                assert not watched.verifier.submitted
