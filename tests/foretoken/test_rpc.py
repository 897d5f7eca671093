"""Channel and server options fit each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import rpc
from foretoken.errors import UnavailableError
from protos import gateway_pb2, gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc

pytestmark = pytest.mark.anyio
METHOD = "/test.Silent/Wait"
# gRPC sends no two pings within a second.
FASTER = 10
PINGS = 5


def hurried(options: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """Return the options with pings and their limits closer together by a factor."""
    return [
        (name, value // FASTER if name.endswith(("keepalive_time_ms", "without_data_ms")) else value)
        for name, value in options
    ]


async def test_a_call_may_be_silent_for_as_long_as_it_likes() -> None:
    """A server that gets too many keep-alive pings ends the connection, and every call on it."""

    async def wait(request: bytes, context: object) -> bytes:
        # This silence is tested.
        await asyncio.sleep(PINGS * rpc.KEEPALIVE_TIME_MS / FASTER / 1e3)
        return b"still here"

    server = grpc.aio.server(options=hurried(rpc.SERVER_OPTIONS))
    handler = grpc.unary_unary_rpc_method_handler(wait)
    _, service, name = METHOD.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=hurried(rpc.CHANNEL_OPTIONS)) as channel:
            assert await channel.unary_unary(METHOD)(b"") == b"still here"
    finally:
        await server.stop(None)


async def test_grpcs_leftovers_of_another_loop_are_no_failure_of_this_one() -> None:
    """The tests' own loops: a call that is open when its loop ends finishes later."""
    server = rpc.async_server()
    await rpc.HealthService(server, ["a.Service"]).mark(True)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    request = health_pb2.HealthCheckRequest(service="")

    async def leave() -> None:
        stub: Any = health_pb2_grpc.HealthStub(rpc.async_channel(f"127.0.0.1:{port}"))
        await stub.Watch(request).read()

    for _ in range(5):
        await asyncio.to_thread(asyncio.run, leave())
        async with rpc.async_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(request)
    await server.stop(None)


@pytest.mark.parametrize("is_there", [False, True])
async def test_an_unreachable_peer_is_reported_in_few_words(is_there: bool, tmp_path: Path) -> None:
    """Nothing is at its path, or a socket without a listener."""
    path = tmp_path / "s"
    if is_there:
        with socket.socket(socket.AF_UNIX) as unheard:
            unheard.bind(str(path))
    with rpc.sync_channel(f"unix:{path}") as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    error = rpc.error_from_rpc(caught.value)
    reason = "Connection refused" if is_there else "No such file or directory"
    assert isinstance(error, UnavailableError)
    assert reason in str(error) and "it cannot be reached" in str(error) and str(path) not in str(error)


class Echo(gateway_pb2_grpc.GatewayServiceServicer):
    """A service with a unary call and a call that streams its answer."""

    async def GetModel(self, request: Any, context: Any) -> Any:
        return gateway_pb2.GetModelResponse(model="echo")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield gateway_pb2.GenerateResponse()


class Session(verifier_pb2_grpc.VerifierServiceServicer):
    """A service with a call that streams its requests."""

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield verifier_pb2.SessionResponse()


@pytest.mark.parametrize(
    "method",
    [
        "/foretoken.gateway.v1.GatewayService/GetModel",
        "/foretoken.gateway.v1.GatewayService/Generate",
        "/foretoken.verifier.v1.VerifierService/Session",
    ],
)
async def test_bytes_that_are_no_message_are_the_callers_mistake(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """This holds for every service and each form of call; the server goes on."""
    server = rpc.async_server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Echo(), server)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Session(), server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with rpc.async_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(method)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(iter([b"\x0c"])).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call(iter([b""])).read() is not grpc.aio.EOF
    finally:
        await server.stop(None)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
