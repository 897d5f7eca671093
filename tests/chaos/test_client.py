"""The client records what servers of all kinds do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import orjson
import pytest

from foretoken import rpc
from foretoken.errors import UnavailableError
from foretoken.free_ports import free_ports
from protos import gateway_pb2, gateway_pb2_grpc
from tests.chaos.client import Client, Manner
from tests.chaos.requests import Request

pytestmark = pytest.mark.anyio
STREAMED = Request(1, "completions", True, {"prompt": "a"})
WHOLE = Request(2, "completions", False, {"prompt": "a"})
GRPC = Request(3, "grpc", True, {"text": "a", "request_id": "r"})
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"
CHOICE: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None}
CHUNK = b": here\n\ndata: " + orjson.dumps({"choices": [CHOICE]}) + b"\n\n"
Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(script: Script) -> AsyncIterator[Client]:
    """Run a client of a server that reads a request and then follows ``script``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        # Unread bytes turn a connection's end into a reset.
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        with contextlib.suppress(ConnectionError):
            await script(writer)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(f"http://127.0.0.1:{port}", "127.0.0.1:1")
    try:
        yield client
    finally:
        await client.close()
        server.close()


def says(*parts: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return script


async def test_a_stream_with_comments_to_its_end() -> None:
    async with served(says(HEAD, CHUNK, CHUNK, b"data: [DONE]\n\n")) as client:
        record = await client.send(STREAMED)
    assert (record.outcome, record.status, record.answer.choices[0].text) == ("done", 200, "xx")
    assert record.answer.ended and record.answer.violations == []
    assert record.ticks and {index for _, index in record.ticks} == {0}
    assert record.sent_at <= record.ticks[0][0] <= record.ended_at


async def test_a_stream_without_its_end_is_not_ended() -> None:
    async with served(says(HEAD, CHUNK)) as client:
        record = await client.send(STREAMED)
    assert (record.outcome, record.answer.ended) == ("done", False)


async def test_a_whole_answer() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = orjson.dumps({"choices": [CHOICE | {"finish_reason": "stop", "stop_reason": None}], "usage": usage})
    async with served(says(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body)) as client:
        record = await client.send(WHOLE)
    assert (record.outcome, record.answer.usage, record.answer.ended) == ("done", usage, True)


@pytest.mark.parametrize("request_", [STREAMED, WHOLE])
async def test_a_status_is_the_servers_word(request_: Request) -> None:
    async with served(says(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")) as client:
        record = await client.send(request_)
    assert (record.outcome, record.status, record.error) == ("failed", 503, "status 503: busy")


async def test_an_error_event_is_the_servers_word() -> None:
    async with served(says(HEAD, CHUNK, b'data: {"error": {"message": "lost"}}\n\n')) as client:
        record = await client.send(STREAMED)
    assert record.outcome == "failed" and "lost" in record.error
    assert record.answer.choices[0].text == "x"


@pytest.mark.parametrize("parts", [(), (b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n", CHUNK)])
async def test_a_connection_that_ends_is_broken(parts: tuple[bytes, ...]) -> None:
    async with served(says(*parts)) as client:
        assert (await client.send(STREAMED)).outcome == "broken"


async def test_nobody_there_is_broken() -> None:
    client = Client(f"http://127.0.0.1:{free_ports(1)[0]}", "127.0.0.1:1")
    assert (await client.send(STREAMED)).outcome == "broken"
    await client.close()


async def test_a_client_that_goes_away_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def for_ever(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        try:
            while True:
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async with served(for_ever) as client:
        record = await client.send(STREAMED, Manner(drop_after_s=0.2))
        assert record.outcome == "dropped"
        await gone.wait()


class Servicer(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        chunk = gateway_pb2.Chunk(token_ids=[5], text="x", sources=[0], num_output_tokens=1)
        yield gateway_pb2.GenerateResponse(chunk=chunk)
        if self.error is not None:
            raise self.error
        yield gateway_pb2.GenerateResponse(complete=gateway_pb2.Complete(request_id="r"))


@contextlib.asynccontextmanager
async def grpc_served(error: Exception | None) -> AsyncIterator[tuple[Client, grpc.aio.Server]]:
    server = rpc.async_server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Servicer(error), server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    client = Client("http://127.0.0.1:1", f"127.0.0.1:{port}")
    try:
        yield client, server
    finally:
        await client.close()
        await server.stop(None)


async def test_a_grpc_stream_to_its_end() -> None:
    async with grpc_served(None) as (client, _):
        record = await client.send(GRPC)
    assert (record.outcome, record.answer.ended, record.answer.violations) == ("done", True, [])
    assert (record.answer.choices[0].token_ids, record.answer.choices[0].num_finishes) == ([5], 1)


async def test_a_grpc_server_that_says_unavailable_is_no_broken_connection() -> None:
    async with grpc_served(UnavailableError("the verifier is gone")) as (client, _):
        record = await client.send(GRPC)
    assert (record.outcome, record.error) == ("failed", "UNAVAILABLE: the verifier is gone")
