"""The ports of a gateway: bound for one process, or held so that its workers and nobody else may bind them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from foretoken.errors import ConfigError

BACKLOG = 2048


@contextlib.contextmanager
def listen(host: str, port: int, *, reuse_port: bool = False) -> Iterator[socket.socket]:
    """A listening socket; with ``reuse_port`` beside those of other processes of this user.

    Raises ConfigError that says what to do.
    """
    with _bound(host, port, "--port", reuse_port=reuse_port) as listener:
        listener.listen(BACKLOG)
        yield listener


@contextlib.contextmanager
def hold(host: str, port: int, flag: str) -> Iterator[None]:
    """Keep a port for this user's sockets with SO_REUSEPORT: they may bind it, and any other socket may not.

    It is bound without that option first, so that it is known to be free, and never listens: connections go to the
    others only. Raises ConfigError that names ``flag``.
    """
    with _bound(host, port, flag) as guard:
        # Without this, a socket with SO_REUSEADDR might take the port while nobody listens.
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield


def bracketed(host: str) -> str:
    """``host`` as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host


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
