"""A lean HTTP client for streamed completions. Each request has a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import uvloop

from foretoken.bench.completion import (
    Recording,
    StreamedCompletion,
    StreamError,
    error_text,
    read_completion,
    take_apart,
)
from foretoken.hosts import bracketed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PORTS = {"http": 80, "https": 443}
# The last bytes of a chunked body. JSON has no raw line ends, so no event contains them.
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
# How often a run looks for streams on which nothing comes.
_LOOKS_A_TIMEOUT = 10

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a REST API. ``prefix`` comes before /v1; ``key`` is the API key, or empty.

    ``key_from`` says where the user sets the key, for messages; empty: nowhere.
    """

    host: str
    port: int
    is_encrypted: bool = False
    prefix: str = ""
    key: str = field(default="", repr=False)
    key_from: str = ""

    @classmethod
    def parse(cls, url: str, key: str = "") -> Address:
        """Parse ``http[s]://host[:port][/prefix]``. Raises ValueError for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError(f"expected http://host:port, got {url!r}") from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError(f"expected http://host:port, got {url!r}")
        port = _PORTS[parts.scheme] if port is None else port
        return cls(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"), key)

    def __str__(self) -> str:
        return f"{'https' if self.is_encrypted else 'http'}://{bracketed(self.host)}:{self.port}{self.prefix}"

    def refusal(self, status: int, body: bytes) -> str:
        """Return one line about an answer with an error status.

        Where a key is missing, it says what to set.
        """
        if not self.key_from or status not in (401, 403):
            return f"status {status}: {error_text(body)}"
        if self.key:
            return f"status {status}: {error_text(body)} (the key comes from {self.key_from})"
        return f"status {status}: the server wants an API key: set {self.key_from}"

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return an HTTP request. The server closes the connection after the answer."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        payload = b""
        if body is not None:
            payload = json.dumps(body).encode()
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        return "\r\n".join([*lines, "", ""]).encode() + payload


# Called at each arrival with all responses so far. No stream is read until it returns.
OnArrival = Callable[[Sequence[Recording]], None]


class RecordedExchange(asyncio.Protocol):
    """One connection: a request, and the recording of its response."""

    def __init__(self, on_arrival: Callable[[], None] = lambda: None) -> None:
        self.recording = Recording(0.0)
        self._on_arrival = on_arrival
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self._closed = asyncio.get_running_loop().create_future()
        self._failure = ""
        # The length of the whole response, once its head has said so.
        self._length: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not of asyncio's class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        recording = self.recording
        recording.times.append(time.perf_counter())
        recording.raw += data
        recording.ends.append(len(recording.raw))
        if self._length is None:
            self._length = _length(recording.raw)
        # Not every server closes the connection, though it was asked to.
        if len(recording.raw) >= (self._length or math.inf) or recording.raw.endswith(_END_OF_CHUNKS):
            self._end()
        self._on_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._failure = self._failure or str(exc)
        self._end()
        self._closed.set_result(None)

    def send(self, request: bytes) -> None:
        """Send the request; the recording begins now."""
        assert self._transport is not None
        self.recording.sent_at = time.perf_counter()
        self._transport.write(request)

    def end_if_silent(self, timeout_s: float) -> None:
        """Break the connection if nothing has come for ``timeout_s`` seconds."""
        last_at = self.recording.times[-1] if self.recording.times else self.recording.sent_at
        if last_at and not self._ended.done() and time.perf_counter() - last_at > timeout_s:
            self._failure = f"nothing came for {timeout_s:g} s"
            self._end()

    async def response(self) -> Recording:
        """Return the whole response. Raises StreamError if the connection broke."""
        await self._ended
        if self._failure:
            raise StreamError(self._failure)
        return self.recording

    async def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.abort()
        await self._closed

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def _length(raw: bytearray) -> int | None:
    """Return the length of a response with its head.

    It is 0 if the head gives none, and None before the head's end.
    """
    at = raw.find(b"\r\n\r\n")
    if at < 0:
        return None
    for line in bytes(raw[:at]).lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length" and value.strip().isdigit():
            return at + 4 + int(value)
    return 0


class Connector:
    """Opens connections to one server, and breaks those on which nothing comes."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._context = ssl.create_default_context() if address.is_encrypted else None
        self._open: set[RecordedExchange] = set()

    @contextlib.asynccontextmanager
    async def connected(self, on_arrival: Callable[[], None] = lambda: None) -> AsyncIterator[RecordedExchange]:
        """Open a connection and yield its RecordedExchange.

        Raises StreamError if the server does not answer.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, exchange = await loop.create_connection(
                    lambda: RecordedExchange(on_arrival), self._address.host, self._address.port, ssl=self._context
                )
        except OSError as error:
            raise StreamError(f"{self._address}: {error or type(error).__name__}") from error
        self._open.add(exchange)
        try:
            yield exchange
        finally:
            self._open.discard(exchange)
            await exchange.close()

    async def watch(self) -> None:
        """Break silent connections until cancelled."""
        while True:
            await asyncio.sleep(self._timeout_s / _LOOKS_A_TIMEOUT)
            for exchange in list(self._open):
                exchange.end_if_silent(self._timeout_s)


def complete(
    address: Address,
    bodies: Sequence[dict[str, Any]],
    timeout_s: float = 120.0,
    on_arrival: OnArrival = lambda recordings: None,
) -> list[StreamedCompletion]:
    """Post all bodies to /v1/completions at once, each on its own connection, and read all streams.

    Raises:
        StreamError: a response is not a complete stream of one completion, or nothing came on a
            connection for ``timeout_s`` seconds.
    """
    requests = [address.request("POST", COMPLETIONS, body) for body in bodies]
    return [read_completion(recording) for recording in run_loop(_record(address, requests, timeout_s, on_arrival))]


def get(address: Address, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Return status and body of a GET. Raises StreamError if nothing answers."""
    return _answer(address, address.request("GET", path), timeout_s)


def post(address: Address, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> tuple[int, bytes]:
    """Return status and body of a POST. Raises StreamError if nothing answers."""
    return _answer(address, address.request("POST", path, body), timeout_s)


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` in an event loop of its own, in this thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _answer(address: Address, request: bytes, timeout_s: float) -> tuple[int, bytes]:
    (recording,) = run_loop(_record(address, [request], timeout_s, lambda recordings: None))
    status, pieces = take_apart(recording)
    return status, b"".join(piece for piece, _ in pieces)


async def _record(
    address: Address, requests: Sequence[bytes], timeout_s: float, on_arrival: OnArrival
) -> list[Recording]:
    """Open all connections, send all requests at once, and return the responses."""
    connector = Connector(address, timeout_s)
    exchanges: list[RecordedExchange] = []

    def note_arrival() -> None:
        on_arrival([exchange.recording for exchange in exchanges])

    async with contextlib.AsyncExitStack() as stack:
        for _ in requests:
            exchanges.append(await stack.enter_async_context(connector.connected(note_arrival)))
        for exchange, request in zip(exchanges, requests, strict=True):
            exchange.send(request)
        watch = asyncio.create_task(connector.watch())
        try:
            return [await exchange.response() for exchange in exchanges]
        except StreamError as error:
            raise StreamError(f"{address}: {error.message}") from error
        finally:
            watch.cancel()
