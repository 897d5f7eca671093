"""Bodies and gRPC messages are admitted before they are read: a byte budget and bounded waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken.errors import QueueFullError
from foretoken.limits import MAX_BODY_BYTES
from gateway import http
from gateway.bodies import BodyBudget
from gateway.config import GatewaySettings
from gateway.grpc import bodies as grpc_bodies
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import Player, steps
from tests.support.memory import rss_bytes
from tests.support.tcp_clients import chunk, chunked_post, raw_post

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
MIB = 1 << 20
GENERATE = "/foretoken.gateway.v1.GatewayService/Generate"
# Set in the process that only measures memory.
ALONE = "FORETOKEN_TEST_ALONE"


@pytest.fixture
def settings(settings: GatewaySettings, request: pytest.FixtureRequest) -> GatewaySettings:
    return settings.model_copy(update=getattr(request, "param", {"max_body_bytes_in_flight": MAX_BODY_BYTES}))


@contextlib.asynccontextmanager
async def sent(stack: Stack, *parts: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Open a connection and write ``parts``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.writelines(parts)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def until_held(stack: Stack, num_bytes: int) -> None:
    while stack.gateway.core.bodies.num_bytes != num_bytes:
        await stack.http.get("/health")


def test_a_hold_takes_and_gives_back() -> None:
    budget = BodyBudget(10)
    with budget.hold() as first, budget.hold() as second:
        first.resize(6)
        with pytest.raises(QueueFullError):
            second.resize(5)
        assert (second.num_bytes, budget.num_bytes) == (0, 6)
        second.resize(4)
        first.resize(1)
        first.release()
        assert budget.num_bytes == 4
    assert budget.num_bytes == 0


def test_workers_share_the_budget(settings: GatewaySettings) -> None:
    assert settings.max_body_bytes_per_process == MAX_BODY_BYTES
    shared = settings.model_copy(update={"max_body_bytes_in_flight": 4 * MAX_BODY_BYTES, "gateway_workers": 2})
    assert shared.max_body_bytes_per_process == 2 * MAX_BODY_BYTES


# REST.


async def test_an_announced_body_is_refused_before_it_is_read(stack: Stack) -> None:
    """The second one announces a byte too many, and is answered although it has sent none."""
    stack.verifier.script = steps([65])
    async with sent(stack, raw_post(URL, b"", f"content-length: {MAX_BODY_BYTES - 100}")):
        await until_held(stack, MAX_BODY_BYTES - 100)
        async with sent(stack, raw_post(URL, b"", "content-length: 101")) as reader:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 429 ") and b"retry-after: 1\r\n" in head
        # A request without a body, and a body that fits, are served.
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert (await stack.http.get(path)).status_code == 200
        assert (await stack.http.post(URL, json={"prompt": "a"})).status_code == 200
        assert await stack.metric("foretoken_admission_rejections_total", reason="resource_exhausted") == 1.0
    await until_held(stack, 0)


async def test_a_chunked_body_takes_what_has_arrived_and_may_arrive(stack: Stack) -> None:
    ahead = http.READ_AHEAD_BYTES
    async with sent(stack, chunked_post(URL), chunk(b" " * 1000)) as first:
        await until_held(stack, ahead + 1000)
        # Room for another body that has sent nothing, but not for its first bytes.
        left = MAX_BODY_BYTES - 2 * ahead - 1000
        async with sent(stack, raw_post(URL, b"", f"content-length: {left}")):
            await until_held(stack, MAX_BODY_BYTES - ahead)
            async with sent(stack, chunked_post(URL)) as second:
                await until_held(stack, MAX_BODY_BYTES)
                async with sent(stack, chunked_post(URL)) as reader:
                    assert b" 429 " in await reader.readline()
                assert not second.at_eof()
            await until_held(stack, MAX_BODY_BYTES - ahead)
            async with sent(stack, chunked_post(URL), chunk(b" ")) as reader:
                assert b" 429 " in await reader.readline()
        assert not first.at_eof()
    await until_held(stack, 0)


async def test_a_request_that_runs_holds_nothing(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens([65])
        await player.aborted.wait()

    stack.verifier.script = play
    async with stack.http.stream("POST", URL, json={"prompt": "a", "stream": True}) as answer:
        assert answer.status_code == 200
        assert stack.gateway.core.bodies.num_bytes == 0


async def test_a_body_that_stalls_gets_408(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the whole body is far off."""
    monkeypatch.setattr(http, "BODY_STALL_S", 0.2)
    for request in (raw_post(URL, b"{", "content-length: 100"), chunked_post(URL) + chunk(b"{")):
        async with sent(stack, request) as reader:
            head, body = (await reader.read()).split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
            assert b"nothing of the body arrived for 0.2 s" in body
    assert stack.gateway.core.bodies.num_bytes == 0


async def test_a_body_that_goes_on_is_waited_for(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pauses together are longer than the bound on one pause."""
    monkeypatch.setattr(http, "BODY_STALL_S", 2.0)
    stack.verifier.script = steps([65])
    body = b'{"prompt": "a"}'
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(URL, b"", f"content-length: {len(body)}"))
    for byte in body:
        await asyncio.sleep(0.2)
        writer.write(bytes([byte]))
    assert b" 200 " in await reader.readline()
    writer.close()


@pytest.mark.slow
def test_unfinished_bodies_take_little_memory() -> None:
    """In a process of its own: in this one, malloc keeps and splits what other tests have freed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "unfinished_bodies_alone",
        __file__,
    ]
    measured = subprocess.run(command, env=os.environ | {ALONE: "1"}, capture_output=True, text=True, check=False)
    assert measured.returncode == 0 and "2 passed" in measured.stdout, measured.stdout


@pytest.mark.skipif(ALONE not in os.environ, reason="test_unfinished_bodies_take_little_memory runs it")
@pytest.mark.parametrize("settings", [{}], indirect=True)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_unfinished_bodies_alone(stack: Stack, is_chunked: bool) -> None:
    """200 clients send a body without its last byte; without a budget that takes 1.6 GB here."""
    loop = asyncio.get_running_loop()
    part = memoryview(bytes(8_000_000 - 1))
    head = chunked_post(URL) + b"7a1200\r\n" if is_chunked else raw_post(URL, b"", "content-length: 8000000")
    await stack.http.get("/ready")
    before = rss_bytes()

    async def send(connection: socket.socket) -> None:
        # Refused ones may be cut.
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(connection, head)
            await loop.sock_sendall(connection, part)

    connections = [socket.create_connection(("127.0.0.1", stack.settings.port)) for _ in range(200)]
    for connection in connections:
        connection.setblocking(False)
    try:
        await asyncio.gather(*(send(connection) for connection in connections))
        assert stack.gateway.core.bodies.num_bytes > MAX_BODY_BYTES
        assert rss_bytes() - before < 100 * MIB
        assert (await stack.http.get("/health")).status_code == 200
    finally:
        for connection in connections:
            connection.close()
    await until_held(stack, 0)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 400),
        ("Application/JSON; charset=utf-8", 400),
        ("application/vnd.api+json", 400),
        ("text/plain", 415),
        ("text/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        (None, 415),
    ],
)
async def test_only_json_is_read(stack: Stack, content_type: str | None, status: int) -> None:
    """The last type is a web page's default, sent unasked like a form. 400: it was read."""
    header = [] if content_type is None else [f"content-type: {content_type}"]
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
        lines = [f"POST {path} HTTP/1.1", "host: localhost", *header, "content-length: 2", "", "[]"]
        async with sent(stack, "\r\n".join(lines).encode()) as reader:
            assert b" %d " % status in await reader.readline(), path


# gRPC.


async def unfinished(stack: Stack, method: str, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin a call on its own connection; send only its message's announcement."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.grpc_port)
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    # HPACK: literals that are not indexed.
    block = b"".join(b"\x00%c%s%c%s" % (len(name), name, len(value), value) for name, value in fields)
    message = b"\x00" + length.to_bytes(4, "big")
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    writer.write(frame(1, 4, 1, block) + frame(0, 0, 1, message))
    await writer.drain()
    return reader, writer


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def test_grpc_messages_count_in_the_budget(stack: Stack) -> None:
    stack.verifier.script = steps([65])
    request = gateway_pb2.GenerateRequest(text="a")
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        async with sent(stack, raw_post(URL, b"", "content-length: 1000")):
            await until_held(stack, 1000)
            for call in (stub.GetModel(gateway_pb2.GetModelRequest()), stub.Generate(request).read()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # Health is asked as before.
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING
            assert await stack.metric("foretoken_admission_rejections_total", reason="resource_exhausted") == 2.0
        await until_held(stack, 0)
        assert [response async for response in stub.Generate(request)][-1].HasField("complete")
    assert stack.gateway.core.bodies.num_bytes == 0


async def test_a_grpc_message_that_does_not_come_ends_the_call(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it holds the largest size, and the next call waits."""
    monkeypatch.setattr(grpc_bodies, "MESSAGE_TIMEOUT_S", 1.0)
    reader, writer = await unfinished(stack, GENERATE, 1_000_000)
    await until_held(stack, MAX_BODY_BYTES)
    stack.verifier.script = steps([65])
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        # Its own second begins later.
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.GetModel(gateway_pb2.GetModelRequest())
        await until_held(stack, 0)
        assert (await stub.GetModel(gateway_pb2.GetModelRequest())).model == "tiny"
    assert b"did not arrive within 1 s" in await reader.readuntil(b"within 1 s")
    writer.close()


async def test_a_grpc_caller_that_leaves_in_its_message_holds_nothing(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await unfinished(stack, GENERATE, 1_000_000)
    await until_held(stack, MAX_BODY_BYTES)
    writer.transport.abort()
    await until_held(stack, 0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_more_grpc_calls_than_may_wait_are_refused(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is read and two wait; all others are refused at once."""
    monkeypatch.setattr(stack.gateway.body_interceptor.reader, "max_waiting", 2)
    calls = [await unfinished(stack, GENERATE, 1_000_000) for _ in range(4)]
    waits = [asyncio.ensure_future(reader.readuntil(b"already wait to be read")) for reader, _ in calls]
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    for wait in waits:
        wait.cancel()
    for _, writer in calls:
        writer.transport.abort()


async def test_many_grpc_calls_at_once_are_all_read(stack: Stack) -> None:
    """Only one of them fits the budget before its size is known."""
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        models = await asyncio.gather(*(stub.GetModel(gateway_pb2.GetModelRequest()) for _ in range(100)))
    assert {model.model for model in models} == {"tiny"}
    assert stack.gateway.core.bodies.num_bytes == 0
