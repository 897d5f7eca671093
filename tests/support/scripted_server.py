"""An HTTP server on a real socket that answers each
request with scripted pieces, one send a piece.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from foretoken.bench.client import Address
from tests.support.certificates import Issued

# From a request's body to the answer's pieces. Between two pieces the script may wait.
Script = Callable[[dict[str, Any]], Iterator[bytes]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class ScriptedServer:
    """The server's address, and what it got, in order of arrival: bodies, paths, and keys."""

    address: Address
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@contextlib.contextmanager
def scripted_server(script: Script, certificate: Issued | None = None) -> Iterator[ScriptedServer]:
    """Serve until the block is left; a connection has a thread and closes after the answer.

    ``script`` also answers GETs, which have no body: their path is the body's ``path``. With a
    ``certificate``, the server speaks TLS.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                self.answer()

        def answer(self) -> None:
            length = 0
            if not (line := self.rfile.readline()):
                return
            method, path, *_ = line.decode().split()
            served.paths.append(path)
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
                if name.lower() == b"authorization":
                    served.keys.append(value.strip().decode())
            body = json.loads(self.rfile.read(length)) if length else {"path": path} if method == "GET" else {}
            if method == "POST":
                served.bodies.append(body)
            for piece in script(body):
                self.wfile.write(piece)
                self.wfile.flush()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, peer = super().get_request()
            if certificate is None:
                return connection, peer
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.chain, certificate.key)
            # The handshake happens at the first read, in the connection's thread.
            return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), peer

    with Server(("127.0.0.1", 0), Handler) as server:
        served = ScriptedServer(Address("127.0.0.1", server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body; the empty one ends it."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text_event(text: str, total: int | None = None, finish: str | None = None, **fields: object) -> dict[str, Any]:
    """Return a completion chunk. ``total``: output tokens so far, if a client asked for them."""
    usage = None if total is None else {"prompt_tokens": 3, "completion_tokens": total}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **fields}], "usage": usage}


def usage_event(num_tokens: int, *, drafted: int = 0, cached: int = 0, prompt: int = 3) -> dict[str, Any]:
    """Return the last chunk, with totals and figures of speculation."""
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "metrics": {"speculative_decoding": {"num_draft_tokens": drafted, "mean_tokens_per_step": 1.0 + drafted / 4}},
    }
