"""Ask whether a service is ready or alive, over gRPC health, HTTP or a Unix socket."""

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
    """A ``foretoken.supervisor.Probe`` over grpc.health.v1.

    It keeps its channel while it gets answers.
    """

    def __init__(self, address: str, service: str) -> None:
        """``service``: the name whose status is readiness; the empty name's status is liveness."""
        self._address = address
        self._service = service
        self._channel: grpc.aio.Channel | None = None

    async def is_ready(self) -> bool:
        return await self._serving(self._service)

    async def last_turn(self) -> float | None:
        # The event loop itself answers.
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
            # A new channel connects at once; this one would wait out its backoff.
            await self.close()
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


class GatewayProbe:
    """A ``foretoken.supervisor.Probe`` over ``GET /ready`` and the gateway's liveness socket."""

    def __init__(self, host: str, port: int, liveness_socket: Path) -> None:
        """``host``: the address that the gateway listens on; may be a wildcard."""
        self._host = host
        self._port = port
        self.liveness_socket = liveness_socket

    async def is_ready(self) -> bool:
        return await http_ok(self._host, self._port, "/ready")

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self.liveness_socket, PROBE_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: no connection stays open between probes."""


async def http_ok(host: str, port: int, path: str) -> bool:
    """Return whether ``GET path`` is answered with status 200."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await _http_status(reachable(host), port, path) == 200
    except (OSError, TimeoutError, ValueError):
        return False


def reachable(host: str) -> str:
    """Return the address to connect to for an address to listen on."""
    return _WILDCARDS.get(host, host)


async def _http_status(host: str, port: int, path: str) -> int:
    """Return the status of one request. Raises ValueError if the answer is not HTTP."""
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
