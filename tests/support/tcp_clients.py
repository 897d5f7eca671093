"""Clients below HTTP and gRPC: raw requests, resets, and a relay whose client side can vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator

# For httpx, which sends no content type with a body given as bytes.
JSON_TYPE = {"content-type": "application/json"}


def raw_post(path: str, body: dict[str, object] | bytes, *headers: str) -> bytes:
    """Return the bytes of one request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    if not any(header.startswith("content-length") for header in headers):
        lines.append(f"content-length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def chunked_post(path: str) -> bytes:
    """Return the head of a request whose body comes in chunks."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "transfer-encoding: chunked"]
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection by RST, as a host that lost its process does."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def connect_slow(port: int) -> socket.socket:
    """Open a connection with a small receive buffer: it takes little that nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def read_until_cut(connection: socket.socket) -> bytes:
    """Read a connection until the server ends it."""
    loop, data = asyncio.get_running_loop(), bytearray()
    # Bytes on their way at the cut may be lost: that shows as a reset.
    with contextlib.suppress(ConnectionResetError):
        while part := await loop.sock_recv(connection, 1 << 20):
            data += part
    return bytes(data)


class Relay:
    """Passes one server's connections on, until ``reset`` ends them all by RST."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    def reset(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            # One side may have closed its connection by itself.
            if writer.get_extra_info("socket").fileno() >= 0:
                reset(writer)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, server_writer]
        pairs = ((reader, server_writer), (server_reader, writer))
        self._tasks += [asyncio.create_task(_copy(source, sink)) for source, sink in pairs]

    async def close(self) -> None:
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def relay(port: int) -> AsyncIterator[Relay]:
    """Run a relay in front of ``127.0.0.1:port``."""
    running = Relay(port)
    server = await asyncio.start_server(running.accept, "127.0.0.1", 0)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
        await running.close()
