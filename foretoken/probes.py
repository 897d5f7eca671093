"""Ask whether a service is ready, alive or there, over gRPC health, HTTP or a socket."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import liveness, rpc
from foretoken.hosts import bracketed, reachable
from foretoken.links import NO_CREDENTIALS, LinkCredentials

PROBE_TIMEOUT_S = 1.0
# For a reaction to a connection's first bytes.
SILENCE_S = 0.2
# RFC 9113: what a client sends first, with empty settings.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class GrpcProbe:
    """A ``foretoken.service.Probe`` over grpc.health.v1.

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
    """A ``foretoken.service.Probe`` over ``GET /ready`` and the gateway's liveness socket."""

    def __init__(
        self, host: str, port: int, liveness_socket: Path, *, is_encrypted: bool = False, key: str = ""
    ) -> None:
        """``host``: the address that the gateway listens on; may be a wildcard.

        ``key``: shows the details of ``/ready``, if the gateway asks for one.
        """
        self._host = host
        self._port = port
        self._is_encrypted = is_encrypted
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.liveness_socket = liveness_socket
        # By the last answer: drafters that are not attached, and why.
        self.unattached: dict[str, str] = {}

    async def is_ready(self) -> bool:
        answer = await http_answer(
            self._host, self._port, "/ready", headers=self._headers, is_encrypted=self._is_encrypted
        )
        if answer is None or answer[0] != 200:
            return False
        drafters = [drafter for verifier in json.loads(answer[1])["verifiers"] for drafter in verifier["drafters"]]
        self.unattached = {drafter["name"]: drafter["reason"] for drafter in drafters if drafter["state"] != "attached"}
        return True

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self.liveness_socket, PROBE_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: no connection stays open between probes."""


class FileProbe:
    """A ``foretoken.service.Probe`` of a process that writes a file and has a liveness socket.

    It is ready when the file is there, which it removes before it serves the socket.
    """

    def __init__(self, file: Path, liveness_socket: Path) -> None:
        self._file = file
        self._liveness_socket = liveness_socket

    async def is_ready(self) -> bool:
        return self._file.exists() and await self.last_turn() is not None

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self._liveness_socket, PROBE_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: nothing stays open between probes."""


async def http_answer(
    host: str, port: int, path: str, *, headers: Mapping[str, str] | None = None, is_encrypted: bool = False
) -> tuple[int, bytes] | None:
    """Return the status and body of the answer to ``GET path``; None if there is none in time."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await _get(reachable(host), port, path, headers or {}, _own_server() if is_encrypted else None)
    except (OSError, TimeoutError, ValueError):
        return None


class Listener(enum.Enum):
    """What is found at an address that a gRPC call could not use."""

    NONE = enum.auto()  # nothing listens
    # It takes connections and does not read them: a service listens before it loads its model.
    SILENT = enum.auto()
    # It reacts to gRPC's first bytes, be it by closing: the two may not agree on TLS, for example.
    ANSWERS = enum.auto()


async def listener_at(address: str) -> Listener:
    """Look what listens at ``unix:/path`` or host:port.

    It takes SILENCE_S for one that does not answer.
    """
    path = rpc.unix_path(address)
    # gRPC admits dns:///host:port and [IPv6]:port.
    host, _, port = address.rpartition("/")[2].rpartition(":")
    opening = asyncio.open_connection(host.strip("[]"), port) if path is None else asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await opening
    except (OSError, TimeoutError):
        return Listener.NONE
    try:
        writer.write(_HTTP2_PREFACE)
        async with asyncio.timeout(SILENCE_S):
            await reader.read(1)
    except TimeoutError:
        return Listener.SILENT
    except OSError:
        return Listener.ANSWERS
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return Listener.ANSWERS


def _own_server() -> ssl.SSLContext:
    """Return a context for a server of this machine, whatever names its certificate has."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _get(
    host: str, port: int, path: str, headers: Mapping[str, str], context: ssl.SSLContext | None
) -> tuple[int, bytes]:
    """Return the status and body of one request. Raises ValueError if the answer is not HTTP."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {bracketed(host)}:{port}\r\nConnection: close\r\n{lines}\r\n".encode()
        )
        answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    protocol, _, rest = answer.partition(b" ")
    if not protocol.startswith(b"HTTP/"):
        raise ValueError("not an HTTP answer")
    return int(rest[:3]), answer.partition(b"\r\n\r\n")[2]
