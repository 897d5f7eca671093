"""Clients withhold headers, bodies or reading: they harm nobody, and are cut in the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from foretoken.limits import MAX_BODY_BYTES
from gateway import http, http_protocol
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import LONG_TOKEN, Stack, events, run_stack
from tests.gateway.scripted_verifier import LENGTH, Player
from tests.support.memory import rss_bytes
from tests.support.tcp_clients import connect_slow, raw_post, read_until_cut

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
# More than all buffers on the way hold.
NUM_TOKENS = 10_000


@pytest.fixture
def settings(settings: GatewaySettings, request: pytest.FixtureRequest) -> GatewaySettings:
    return settings.model_copy(update=getattr(request, "param", {}))


@pytest.fixture
async def stack(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Stack]:
    async for running in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        running.verifier.info.max_model_len = 1_000_000
        await running.http.get("/ready")
        (long_token,) = running.ids(LONG_TOKEN)

        async def play(player: Player, long_token: int = long_token) -> None:
            if len(player.sequence.prompt_token_ids) == 1:
                for _ in range(NUM_TOKENS):
                    player.tokens([long_token])
            player.finish(LENGTH)

        running.verifier.script = play
        yield running


async def until(stack: Stack, condition: Any) -> None:
    while not condition():
        await stack.http.get("/health")


def outcomes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["outcome"] for record in caplog.records if record.name == "gateway.core"]


# Reading.


@pytest.mark.parametrize("settings", [{"client_timeout_s": 0.4}], indirect=True)
@pytest.mark.parametrize("ended", [True, False])
async def test_a_client_that_reads_nothing_is_cut(stack: Stack, ended: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the verifier is done or not, its place is free and nothing waits for it."""
    caplog.set_level(logging.INFO)

    async def endless(player: Player) -> None:
        player.tokens(stack.ids(LONG_TOKEN) * NUM_TOKENS)
        await player.aborted.wait()

    if not ended:
        stack.verifier.script = endless
    with await connect_slow(stack.settings.port) as silent:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(silent, raw_post(URL, {"prompt": [5], "stream": True, "max_tokens": NUM_TOKENS}))
        await until(stack, lambda: outcomes(caplog) == ["cancelled"])
        await until(stack, lambda: stack.gateway.core.admission.num_requests == 0)
        if not ended:
            await stack.verifier.until(lambda: len(stack.verifier.aborts) == 1)
        is_through = (await read_until_cut(silent)).endswith(b"0\r\n\r\n")
        assert not is_through


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"client_timeout_s": 0.4}], indirect=True)
async def test_a_client_that_reads_slowly_is_not_cut(stack: Stack) -> None:
    """It takes several timeouts to read one merged write, and reads something in each of them."""
    is_whole = stood_still = False
    # If this process stood still for most of a timeout, a cut proves nothing.
    while not is_whole:
        data, stood_still = await read_slowly(stack)
        is_whole = data.endswith(b"0\r\n\r\n")
        assert is_whole or stood_still
    lines = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    chunks = events("".join(line + "\n\n" for line in lines))
    # Not compared in the assertion: pytest's report of so large a difference would take minutes.
    is_whole = "".join(chunk["choices"][0]["text"] for chunk in chunks) == LONG_TOKEN * NUM_TOKENS
    assert is_whole


async def read_slowly(stack: Stack) -> tuple[bytearray, bool]:
    """Read a long answer slowly for four timeouts; return it, and whether we stood still."""
    loop, timeout_s = asyncio.get_running_loop(), stack.settings.client_timeout_s
    with await connect_slow(stack.settings.port) as slow:
        await loop.sock_sendall(slow, raw_post(URL, {"prompt": [5], "stream": True, "max_tokens": NUM_TOKENS}))
        data, part = bytearray(), await loop.sock_recv(slow, 1 << 15)
        began = last = loop.time()
        longest_s = 0.0
        with contextlib.suppress(ConnectionResetError):
            while part and not data.endswith(b"0\r\n\r\n"):
                data += part
                now = loop.time()
                longest_s, last = max(longest_s, now - last), now
                if now - began < 4 * timeout_s:
                    await asyncio.sleep(timeout_s / 20)
                    part = await loop.sock_recv(slow, 1 << 15)
                else:
                    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
                    part = await loop.sock_recv(slow, 1 << 20)
    return data, longest_s > timeout_s / 2


@pytest.mark.parametrize("settings", [{"client_timeout_s": 0.4}], indirect=True)
async def test_a_grpc_caller_that_reads_nothing_is_cut(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    num_tasks = len(asyncio.all_tasks())
    request = gateway_pb2.GenerateRequest(
        token_ids=gateway_pb2.TokenIds(ids=[5]), sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS)
    )
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.Generate(request)
        await call.read()
        await until(stack, lambda: outcomes(caplog) == ["cancelled"])
        assert stack.gateway.core.admission.num_requests == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        # Its connection lives: it serves another call.
        other = gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=[5, 6]))
        assert [response async for response in stub.Generate(other)][-1].HasField("complete")
    await until(stack, lambda: len(asyncio.all_tasks()) <= num_tasks)


async def test_a_grpc_caller_that_cancels_while_it_reads_nothing(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = gateway_pb2.GenerateRequest(
        token_ids=gateway_pb2.TokenIds(ids=[5]), sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS)
    )
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
        await call.read()
        # The verifier is done: only the reader delays the rest.
        await until(stack, lambda: all(player.finished.is_set() for player in stack.verifier.players.values()))
        call.cancel()
        await until(stack, lambda: outcomes(caplog) == ["cancelled"])
        assert stack.gateway.core.admission.num_requests == 0


# Headers and connections.


async def test_headers_that_trickle_are_cut(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.3)
    for before in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
        writer.write(before)
        if before:
            await reader.readuntil(b'"ok"}')
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        # Not to its end, which is a reset if one more header was on its way.
        answer = asyncio.create_task(reader.readline())
        number = 0
        while not answer.done():
            number += 1
            writer.write(b"x-%d: 1\r\n" % number)
            await asyncio.wait({answer}, timeout=0.02)
        assert answer.result().startswith(b"HTTP/1.1 408 "), answer.result()
        writer.close()


async def test_connections_that_say_nothing_are_closed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.3)
    silent, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    assert await silent.read() == b""
    writer.close()
    # Line ends between requests are no request, and stop the wait for one at most once.
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b'"ok"}')
    closed = asyncio.create_task(reader.read())
    while not closed.done():
        writer.write(b"\r\n")
        await asyncio.wait({closed}, timeout=0.02)
    # A reset, if one more line end was on its way.
    assert isinstance(closed.exception(), ConnectionError | None) and (closed.exception() or closed.result() == b"")
    writer.close()


async def test_headers_are_in_time_while_an_answer_takes_long(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer covers only headers: a complete request may run for longer, and so may a body."""
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.1)
    timers_passed = asyncio.Event()

    async def play(player: Player) -> None:
        await timers_passed.wait()
        player.finish(LENGTH)

    stack.verifier.script = play
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(URL, {"prompt": [5]}))
    asyncio.get_running_loop().call_later(3 * http_protocol.HEADER_TIMEOUT_S, timers_passed.set)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_peers_that_vanish_are_probed_for(stack: Stack) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    connections = stack.gateway.connections
    await until(stack, lambda: len(connections) == 2)
    for connection in connections:
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option, value in http_protocol.KEEP_ALIVE_PROBES.items():
            assert accepted.getsockopt(socket.IPPROTO_TCP, option) == value
        # Not before the reader's own timeout: a silent reader may come back until then.
        bound_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert 1e3 * stack.settings.client_timeout_s < bound_ms <= 2e3 * stack.settings.client_timeout_s
    writer.close()


async def test_more_connections_than_allowed_are_refused(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await stack.http.get("/health")
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 2)
    _, kept = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    refused, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    answer = await refused.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
    # Open connections go on, and a free place goes to another.
    assert (await stack.http.get("/health")).status_code == 200
    kept.close()
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        status = await reader.readline()
        writer.close()
        if status.startswith(b"HTTP/1.1 200 "):
            break


# Bodies.


async def test_a_body_that_trickles_gets_408_and_holds_no_place(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(URL, b"", "content-length: 100000"))
    # Not to its end, which is a reset if one more byte was on its way.
    answer = asyncio.create_task(reader.readuntil(b"within 0.3 s"))
    while not answer.done():
        assert stack.gateway.core.admission.num_requests == 0
        writer.write(b" ")
        await asyncio.wait({answer}, timeout=0.02)
    head = answer.result().lower()
    assert head.startswith(b"http/1.1 408 ") and b"connection: close" in head
    writer.close()


async def test_an_announced_body_takes_no_memory_before_it_comes(stack: Stack) -> None:
    """Send as many bodies as the budget has room for."""
    await stack.http.get("/health")
    before, bodies = rss_bytes(), stack.gateway.core.bodies
    writers = []
    for _ in range(bodies.limit // MAX_BODY_BYTES):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
        writer.write(raw_post(URL, b'{"prompt"', f"content-length: {MAX_BODY_BYTES}"))
        writers.append(writer)
    await until(stack, lambda: bodies.num_bytes == bodies.limit)
    assert rss_bytes() - before < bodies.limit // 4
    for writer in writers:
        writer.close()
