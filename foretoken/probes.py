"""Ask whether a service is ready or alive, over gRPC health, HTTP or a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import liveness, rpc
from foretoken.links import NO_CREDENTIALS, LinkCredentials

PROBE_TIMEOUT_S = 1.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class GrpcProbe:
    """A ``foretoken.supervisor.Probe`` over grpc.health.v1.

    It keeps its channel while it gets answers.
    """

    def __init__(self, address: str, service: str, credentials: LinkCredentials = NO_CREDENTIALS) -> None:
        """``service``: the name whose status is readiness; the empty name's status is liveness."""
        self._address = address
        self._service = service
        self._credentials = credentials
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
            self._channel = rpc.async_channel(self._address, self._credentials)
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
        # By the last answer: drafters that are not attached, and why.
        self.unattached: dict[str, str] = {}

    async def is_ready(self) -> bool:
        answer = await http_answer(self._host, self._port, "/ready")
        if answer is None or answer[0] != 200:
            return False
        drafters = [drafter for verifier in json.loads(answer[1])["verifiers"] for drafter in verifier["drafters"]]
        self.unattached = {drafter["name"]: drafter["reason"] for drafter in drafters if drafter["state"] != "attached"}
        return True

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self.liveness_socket, PROBE_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: no connection stays open between probes."""


async def http_ok(host: str, port: int, path: str) -> bool:
    """Return whether ``GET path`` is answered with status 200."""
    answer = await http_answer(host, port, path)
    return answer is not None and answer[0] == 200


async def http_answer(host: str, port: int, path: str) -> tuple[int, bytes] | None:
    """Return the status and body of the answer to ``GET path``; None if there is none in time."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await _get(reachable(host), port, path)
    except (OSError, TimeoutError, ValueError):
        return None


def reachable(host: str) -> str:
    """Return the address to connect to for an address to listen on."""
    return _WILDCARDS.get(host, host)


async def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return the status and body of one request. Raises ValueError if the answer is not HTTP."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    protocol, _, rest = answer.partition(b" ")
    if not protocol.startswith(b"HTTP/"):
        raise ValueError("not an HTTP answer")
    return int(rest[:3]), answer.partition(b"\r\n\r\n")[2]
