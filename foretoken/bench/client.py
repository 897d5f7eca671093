"""A lean HTTP client for streamed completions.

It shares the machine's cores with the measured server. So while streams run it only records bytes
and arrival times; it parses HTTP and JSON after all streams have ended.
"""

from __future__ import annotations

import bisect
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.errors import ForetokenError

RECEIVE_BYTES = 65536


class StreamError(ForetokenError):
    """The server refused a request, broke a stream, or sent something other than completions."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of the REST API."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse ``http://host:port``. Raises ValueError for anything else."""
        scheme, _, rest = url.partition("://")
        host, _, port = rest.rstrip("/").rpartition(":")
        if scheme != "http" or not host or not port.isdecimal():
            raise ValueError(f"expected http://host:port, got {url!r}")
        return cls(host, int(port))


@dataclass(slots=True)
class Recording:
    """One raw response. ``ends[i]`` bytes had arrived by ``times[i]`` (perf_counter seconds)."""

    sent_at: float
    raw: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def arrival(self, num_bytes: int) -> float:
        """Return when the first ``num_bytes`` bytes had arrived."""
        return self.times[bisect.bisect_left(self.ends, num_bytes)]


# Called at each arrival with all responses so far. No stream is read until it returns.
OnArrival = Callable[[Sequence[Recording]], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event with text.

    ``num_tokens`` counts the output tokens up to and including it, or is None if unknown.
    """

    at: float
    text: str
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """One streamed completion. ``sent_at`` is in perf_counter seconds.

    ``token_ids`` is empty unless the request asked for it. ``speculation`` has the server's own
    figures, if it sends any.
    """

    sent_at: float
    chunks: tuple[Chunk, ...]
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    finish_reason: str
    speculation: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def first_at(self) -> float:
        return self.chunks[0].at

    @property
    def last_at(self) -> float:
        return self.chunks[-1].at


def complete(
    address: Address,
    bodies: Sequence[dict[str, Any]],
    timeout_s: float = 120.0,
    on_arrival: OnArrival = lambda recordings: None,
) -> list[Completion]:
    """POST all bodies to /v1/completions at once, each on its own connection, and read all streams.

    Raises:
        StreamError: a response is not a complete stream of one completion.
    """
    return [read_completion(recording) for recording in record(address, bodies, timeout_s, on_arrival)]


def record(
    address: Address,
    bodies: Sequence[dict[str, Any]],
    timeout_s: float,
    on_arrival: OnArrival = lambda recordings: None,
) -> list[Recording]:
    """Send all bodies at once and return the responses.

    Raises:
        StreamError: nothing arrived for ``timeout_s`` seconds.
    """
    requests = [request_bytes(address, body) for body in bodies]
    connections: list[socket.socket] = []
    try:
        for _ in requests:
            connection = socket.create_connection((address.host, address.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.append(connection)
        recordings = []
        for connection, request in zip(connections, requests, strict=True):
            recordings.append(Recording(time.perf_counter()))
            connection.sendall(request)
        _receive(connections, recordings, timeout_s, on_arrival)
        return recordings
    except OSError as error:
        raise StreamError(f"http://{address.host}:{address.port}: {error}") from error
    finally:
        for connection in connections:
            connection.close()


def get(address: Address, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Return status and body of a GET. Raises OSError if nothing answers."""
    recording = Recording(time.perf_counter())
    with socket.create_connection((address.host, address.port), timeout_s) as connection:
        connection.sendall(_head("GET", address, path))
        _receive([connection], [recording], timeout_s, lambda recordings: None)
    status, pieces = _take_apart(recording)
    return status, b"".join(piece for piece, _ in pieces)


def read_completion(recording: Recording) -> Completion:
    """Parse one recorded stream. Raises StreamError if it is incomplete."""
    status, pieces = _take_apart(recording)
    if status != 200:
        body = b"".join(piece for piece, _ in pieces).decode(errors="replace")
        raise StreamError(f"status {status}: {body[:500]}")
    chunks: list[Chunk] = []
    token_ids: list[int] = []
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] = {}
    finish_reason = ""
    done = False
    for payload, end in _events(pieces):
        if payload == b"[DONE]":
            done = True
            continue
        event = json.loads(payload)
        if "error" in event:
            raise StreamError(f"the stream broke: {event['error']}")
        usage = event.get("usage") or usage
        speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
        for choice in event["choices"]:
            finish_reason = choice.get("finish_reason") or finish_reason
            token_ids += choice.get("token_ids", ())
            if choice["text"]:
                so_far = (event.get("usage") or {}).get("completion_tokens")
                chunks.append(Chunk(recording.arrival(end), choice["text"], so_far))
    if not done or usage is None or not chunks:
        raise StreamError("the stream ended without text, usage or [DONE]")
    return Completion(
        recording.sent_at,
        tuple(chunks),
        tuple(token_ids),
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        usage["completion_tokens"],
        finish_reason,
        speculation,
    )


def _head(method: str, address: Address, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nConnection: close\r\n\r\n".encode()


def request_bytes(address: Address, body: dict[str, Any]) -> bytes:
    """Return a POST to /v1/completions. The server closes the connection after the answer."""
    payload = json.dumps(body).encode()
    entity = f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    return _head("POST", address, "/v1/completions")[:-2] + entity + payload


def _receive(
    connections: Sequence[socket.socket], recordings: Sequence[Recording], timeout_s: float, on_arrival: OnArrival
) -> None:
    """Read all connections until the server has closed each."""
    with selectors.DefaultSelector() as selector:
        for connection, recording in zip(connections, recordings, strict=True):
            selector.register(connection, selectors.EVENT_READ, (connection, recording))
        while selector.get_map():
            ready = selector.select(timeout_s)
            if not ready:
                raise StreamError(f"nothing came for {timeout_s:g} s")
            for key, _ in ready:
                connection, recording = key.data
                data = connection.recv(RECEIVE_BYTES)
                if not data:
                    selector.unregister(connection)
                    continue
                recording.times.append(time.perf_counter())
                recording.raw += data
                recording.ends.append(len(recording.raw))
                on_arrival(recordings)


def _take_apart(recording: Recording) -> tuple[int, list[tuple[bytes, int]]]:
    """Return the status and the body's pieces, each with its end in the raw response."""
    raw = bytes(recording.raw)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.split(b"\r\n")
    parts = status_line.split()
    if not separator or len(parts) < 2 or not parts[1].isdigit():
        raise StreamError(f"no HTTP response: {raw[:200]!r}")
    headers = dict(line.lower().split(b":", 1) for line in lines)
    body_at = len(head) + len(separator)
    if headers.get(b"transfer-encoding", b"").strip() != b"chunked":
        return int(parts[1]), [(raw[body_at:], len(raw))]
    return int(parts[1]), _dechunk(raw, body_at)


def _dechunk(raw: bytes, at: int) -> list[tuple[bytes, int]]:
    """Return the chunks of the chunked body at ``at``. Raises StreamError if it is cut off."""
    pieces: list[tuple[bytes, int]] = []
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            raise StreamError("the response was cut off")
        size = int(raw[at:line_end].split(b";")[0], 16)
        if size == 0:
            return pieces
        start = line_end + 2
        if start + size > len(raw):
            raise StreamError("the response was cut off")
        pieces.append((raw[start : start + size], start + size))
        at = start + size + 2


def _events(pieces: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Yield the data of each server-sent event, with the raw offset of the piece that completed it.

    Comments are left out.
    """
    events = []
    pending = b""
    for piece, end in pieces:
        pending += piece
        while b"\n\n" in pending:
            event, _, pending = pending.partition(b"\n\n")
            if event.startswith(b"data:"):
                events.append((event[5:].strip(), end))
    return events
