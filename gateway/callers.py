"""Refuse calls from foreign web pages: a page open on this machine must not use a server on it.

``Origin`` reveals a page of another site. A page whose name resolves to this machine (DNS
rebinding) has a matching ``Origin``, but its ``Host`` is not ours. Both checks apply to every path
and method. ``Sec-Fetch-Site`` would add only GETs without an ``Origin``: they change nothing, and
no other site's page can read their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.errors import ForetokenError
from foretoken.hosts import bracketed
from gateway import error_shapes
from gateway.config import ANY, is_loopback
from gateway.http import ForeignHostError, ForeignOriginError, HostHeaderError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class CallerCheck:
    """Refuses requests by their ``Host`` and ``Origin``."""

    def __init__(self, listens_at: str, allowed_hosts: Collection[str], allowed_origins: Collection[str]) -> None:
        """Check hosts if ``listens_at`` is on loopback or ``allowed_hosts`` has any.

        Loopback names are always allowed: no page from another machine can have one.
        """
        own = bracketed(listens_at.lower())
        self._hosts = LOOPBACK_NAMES | {own} | {_name_of(host) for host in allowed_hosts}
        self._origins = frozenset(allowed_origins)
        self._checks_host = ANY not in self._hosts and (bool(allowed_hosts) or is_loopback(listens_at))

    def __call__(self, headers: Headers) -> None:
        """Raise HostHeaderError, ForeignHostError or ForeignOriginError for a request to refuse."""
        hosts = [value.strip().lower() for value in headers.getlist("host")]
        if len(hosts) > 1:
            raise HostHeaderError("the request has several Host headers")
        host = hosts[0] if hosts else ""
        if self._checks_host:
            if not host:
                raise HostHeaderError("the request has no Host header")
            if _name_of(host) not in self._hosts:
                raise ForeignHostError("this Host is not a name of this server; --allowed-hosts adds names")
        for origin in headers.getlist("origin"):
            if not self._is_allowed(origin.strip().lower(), host):
                raise ForeignOriginError(
                    "web pages of this Origin may not call this server; --allowed-origins adds origins"
                )

    def _is_allowed(self, origin: str, host: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        _, scheme_end, authority = origin.partition("://")
        return bool(scheme_end and host) and authority == host


class CallerMiddleware:
    """Answers requests that ``check`` refuses, before reading their bodies."""

    def __init__(self, app: ASGIApp, check: CallerCheck, reject: Callable[[Request, ForetokenError], None]) -> None:
        """``reject`` counts and logs a refusal."""
        self._app = app
        self._check = check
        self._reject = reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            self._check(request.headers)
        except ForetokenError as error:
            self._reject(request, error)
            await error_shapes.error_response(request.url.path, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Return a Host without its port and without the final dot of a full DNS name."""
    name, colon, port = host.rpartition(":")
    return (name if colon and not port.endswith("]") else host).removesuffix(".")
