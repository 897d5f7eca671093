"""Warn about the fields of a request that the server does not know and ignores."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADER = b"x-foretoken-ignored-fields"
# Bounds of the header; names come from the client.
MAX_NAMES = 16
MAX_NAME_CHARS = 64
# Names that the log warns of once; later ones are logged only for debugging.
_MAX_WARNED = 256
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class IgnoredFields:
    """The ignored fields of one request; ``is_strict``: an unknown field is refused instead."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._names: dict[str, None] = {}
        self._num_more = 0

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            name = _UNSAFE.sub("?", name[:MAX_NAME_CHARS])
            if name in self._names:
                continue
            if len(self._names) < MAX_NAMES:
                self._names[name] = None
                _log(name)
            else:
                self._num_more += 1

    @property
    def header_value(self) -> str:
        """The names, separated by commas; empty if nothing was ignored."""
        more = [f"and {self._num_more} more"] if self._num_more else []
        return ", ".join([*self._names, *more])


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)
_warned: set[str] = set()


def ignored_fields() -> IgnoredFields:
    """Return the present request's ignored fields; outside of a request nobody reads them."""
    return _current.get() or IgnoredFields()


class IgnoredFieldsMiddleware:
    """Sends the names of ignored fields in a header of the answer."""

    def __init__(self, app: ASGIApp, *, is_strict: bool) -> None:
        self._app = app
        self._is_strict = is_strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = IgnoredFields(is_strict=self._is_strict)

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and (value := ignored.header_value):
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, value.encode())]}
            await send(message)

        token = _current.set(ignored)
        try:
            await self._app(scope, receive, send_with_header)
        finally:
            _current.reset(token)


def _log(name: str) -> None:
    is_new = name not in _warned and len(_warned) < _MAX_WARNED
    if is_new:
        _warned.add(name)
    logger.log(logging.WARNING if is_new else logging.DEBUG, "ignored an unknown field", extra={"field": name})
