"""Is a service ready? One question over gRPC health or HTTP, answered within a second by yes or no."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import rpc

PROBE_TIMEOUT_S = 1.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


async def grpc_serving(address: str, service: str) -> bool:
    """Whether grpc.health.v1 at ``address`` calls ``service`` SERVING."""
    async with rpc.async_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def http_ok(host: str, port: int, path: str) -> bool:
    """Whether ``GET path`` is answered with status 200."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await _http_status(reachable(host), port, path) == 200
    except (OSError, TimeoutError, ValueError):
        return False


def reachable(host: str) -> str:
    """An address to connect to for one to listen on."""
    return _WILDCARDS.get(host, host)


async def _http_status(host: str, port: int, path: str) -> int:
    """The status of one request. Raises ValueError if what answers does not speak HTTP."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        status_line = await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    protocol, _, rest = status_line.partition(b" ")
    if not protocol.startswith(b"HTTP/"):
        raise ValueError("not an HTTP answer")
    return int(rest[:3])
