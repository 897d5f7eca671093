"""Is a service ready, is it alive? Questions over gRPC health, HTTP or a Unix socket, answered within a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import liveness, rpc

PROBE_TIMEOUT_S = 1.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class GrpcProbe:
    """A ``foretoken.supervisor.Probe`` over grpc.health.v1. Keeps its channel for as long as it gets answers."""

    def __init__(self, address: str, service: str) -> None:
        """``service``: the name whose status is readiness; that of the empty name is liveness."""
        self._address = address
        self._service = service
        self._channel: grpc.aio.Channel | None = None

    async def is_ready(self) -> bool:
        return await self._serving(self._service)

    async def last_turn(self) -> float | None:
        # Its event loop is what answers.
        return time.monotonic() if await self._serving("") else None

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _serving(self, service: str) -> bool:
        if self._channel is None:
            self._channel = rpc.async_channel(self._address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            # A new one connects at once; this one would wait out its backoff while the service is back already.
            await self.close()
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


class GatewayProbe:
    """A ``foretoken.supervisor.Probe`` over ``GET /ready`` and the gateway's liveness socket."""

    def __init__(self, host: str, port: int, liveness_socket: Path) -> None:
        """``host``: as it listens, wildcards included."""
        self._host = host
        self._port = port
        self.liveness_socket = liveness_socket

    async def is_ready(self) -> bool:
        return await http_ok(self._host, self._port, "/ready")

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self.liveness_socket, PROBE_TIMEOUT_S)

    async def close(self) -> None:
        """Nothing stays open between two questions."""


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
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
        status_line = await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    protocol, _, rest = status_line.partition(b" ")
    if not protocol.startswith(b"HTTP/"):
        raise ValueError("not an HTTP answer")
    return int(rest[:3])
