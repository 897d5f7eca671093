"""Bind a gateway's ports, or hold them so that only its workers can bind them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from foretoken.errors import ConfigError

BACKLOG = 2048


@contextlib.contextmanager
def listen(host: str, port: int, *, reuse_port: bool = False) -> Iterator[socket.socket]:
    """Open a listening socket; ``reuse_port`` shares the port among this user's processes.

    Raises ConfigError that says what to do.
    """
    with _bound(host, port, "--port", reuse_port=reuse_port) as listener:
        listener.listen(BACKLOG)
        yield listener


@contextlib.contextmanager
def hold(host: str, port: int, flag: str) -> Iterator[None]:
    """Reserve a port for this user's sockets with SO_REUSEPORT; no other socket can bind it.

    It is first bound without that option, which proves that it is free. It never listens, so
    connections reach only the other sockets. Raises ConfigError that names ``flag``.
    """
    with _bound(host, port, flag) as guard:
        # Without this, a socket with SO_REUSEADDR might take the port while nobody listens.
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield


@contextlib.contextmanager
def _bound(host: str, port: int, flag: str, *, reuse_port: bool = False) -> Iterator[socket.socket]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}; choose another with {flag}"
            ) from error
        yield bound
