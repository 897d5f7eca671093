"""Serve one REST connection with uvicorn's protocol, and bound how long a client may stall it.

uvicorn waits for ever for headers and for a reader, collects headers without limit, and accepts any
number of connections. gateway/http.py bounds bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import resource
import socket
import sys
import termios
from asyncio import TimerHandle
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
# From a connection's start, or a later request's first byte, to the end of the headers.
HEADER_TIMEOUT_S = 20.0
# After an answer that came before the end of the request's body: the most seconds that the rest is
# read and dropped. A client that only sends would lose the answer if the connection closed earlier.
DRAIN_TIMEOUT_S = 30.0
# Proxies and clients keep idle connections for less time, so that they, not the server, close them.
KEEP_ALIVE_S = 75
MAX_CONNECTIONS = 4096
# A peer that vanished without closing is detected after the first plus the second times the third,
# in seconds.
KEEP_ALIVE_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
# A reader's progress is checked so many times in its timeout.
CHECKS_PER_TIMEOUT = 4


# The ASGI extension with which an application writes to its connection without a task.
_DIRECT = "foretoken.direct"


class HttpProtocol(HttpToolsProtocol):
    """A connection whose client must send headers and read answers in bounded time."""

    def __init__(self, *args: Any, client_timeout_s: float, **kwargs: Any) -> None:
        """``client_timeout_s``: seconds that the client may read nothing while data waits."""
        super().__init__(*args, **kwargs)
        self._client_timeout_s = client_timeout_s
        self._num_header_bytes = 0
        self._in_headers = self._in_body = False
        # Whether the connection closes when the body's end has arrived.
        self._is_draining = False
        self._header_timer: TimerHandle | None = None
        self._reader_timer: TimerHandle | None = None
        self._unread_bytes = 0
        self._progress_at = 0.0
        # Whether the client has shown a certificate. TLS lets none pass that is not good.
        self.has_peer_certificate = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _notice_vanished_peer(transport, self._client_timeout_s)
        self.has_peer_certificate = bool(transport.get_extra_info("peercert"))
        if len(self.connections) > max_connections():
            self._answer_and_close(503, "too many connections", b"retry-after: 1\r\n")
            return
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)
        # uvicorn resumes writing, which stops the reader's timer, only if writing was paused.
        self._stop_reader_timer()
        self._unset_keepalive_if_required()

    # Headers.

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            seconds = DRAIN_TIMEOUT_S if self._in_body else HEADER_TIMEOUT_S
            self._header_timer = self.loop.call_later(seconds, self._headers_overdue)
        super().data_received(data)
        if self._in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("headers too large")

    def on_message_begin(self) -> None:
        self._num_header_bytes, self._in_headers = 0, True
        super().on_message_begin()
        self.scope["extensions"] = {_DIRECT: {"connection": self}}

    def on_headers_complete(self) -> None:
        self._in_headers, self._in_body = False, True
        self._stop_header_timer()
        super().on_headers_complete()
        # The application has not started yet.
        self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        if self.cycle.response_complete:
            # The rest of a refused body was read and dropped.
            self._stop_header_timer()
        if self._is_draining:
            self.transport.close()

    def on_response_complete(self) -> None:
        # Free the received part of a refused body; the connection would keep it.
        if self.cycle.response_complete:
            self.cycle.body = bytearray()
        super().on_response_complete()

    def _headers_overdue(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._answer_and_close(408, f"the headers did not arrive within {HEADER_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _answer_and_close(self, status: int, text: str, headers: bytes = b"") -> None:
        """Write an answer outside any request, and close the connection."""
        phrase = {408: b"Request Timeout", 503: b"Service Unavailable"}[status]
        lines = b"HTTP/1.1 %d %s\r\n%scontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
        self.transport.write(lines % (status, phrase, headers, len(text), text.encode()))
        self.transport.close()

    def close_after_body(self) -> None:
        """Close the connection.

        If the client still sends its body, end only our side before that.
        """
        if not self._in_body or self.transport.is_closing():
            self.transport.close()
            return
        self._is_draining = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._header_timer = self.loop.call_later(DRAIN_TIMEOUT_S, self._headers_overdue)

    # Writing.

    @property
    def is_writable(self) -> bool:
        """Return whether the client reads what it was sent. If not, ASGI's ``send`` waits for it."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_part(self, data: bytes) -> None:
        """Write a part of the streamed answer that ``send`` began and will end."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # Reading.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_bytes = _unread_bytes(self.transport)
        self._progress_at = self.loop.time()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._reader_timer = self.loop.call_later(self._client_timeout_s / CHECKS_PER_TIMEOUT, self._check_reader)

    def _check_reader(self) -> None:
        self._reader_timer = None
        unread_bytes, now = _unread_bytes(self.transport), self.loop.time()
        if unread_bytes != self._unread_bytes:
            self._unread_bytes, self._progress_at = unread_bytes, now
        if now - self._progress_at < self._client_timeout_s:
            self._watch_reader()
            return
        logger.info("client cut", extra={"reason": "it reads nothing", "unread_bytes": unread_bytes})
        self.transport.abort()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


class _AnswerTransport:
    """A connection's transport as its answers see it."""

    def __init__(self, connection: HttpProtocol) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_after_body()


def direct_connection(scope: Scope) -> HttpProtocol | None:
    """Return the connection of a request; None if another server than ours runs it."""
    connection: HttpProtocol | None = scope.get("extensions", {}).get(_DIRECT, {}).get("connection")
    return connection


def max_connections() -> int:
    """Return the most connections open at once: at most half of this process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def _unread_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes not received by the peer: in the transport's buffer and the kernel."""
    connection = transport.get_extra_info("socket")
    queued = bytearray(4)
    # The socket may be closed already; then the kernel holds nothing.
    with contextlib.suppress(OSError):
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def _notice_vanished_peer(transport: asyncio.Transport, timeout_s: float) -> None:
    """Probe an idle peer, and bound how long sent data may stay unacknowledged."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # The peer may have gone already; then connection_lost comes next.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE_PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # It also ends a reader whose window stays closed, so it must exceed the client's timeout.
        milliseconds = round(2e3 * timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
