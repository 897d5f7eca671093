"""Refuse REST calls without a key, before reading their bodies."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.errors import ForetokenError
from gateway import error_shapes
from gateway.access import caller as callers
from gateway.access.policy import Credentials, Policy
from gateway.access.routes import who_may_call
from gateway.http_protocol import direct_connection


class AccessMiddleware:
    """Lets the policy decide about each call, and says who makes it."""

    def __init__(self, app: ASGIApp, policy: Policy, reject: Callable[[Request, ForetokenError], None]) -> None:
        """``reject`` counts and logs a refusal."""
        self._app = app
        self._policy = policy
        self._reject = reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._policy.admit(who_may_call(scope["method"], scope["path"]), _credentials(scope))
        except ForetokenError as error:
            self._reject(Request(scope), error)
            await error_shapes.error_response(scope["path"], error)(scope, receive, send)
            return
        token = callers.enter(caller)
        try:
            await self._app(scope, receive, send)
        finally:
            callers.leave(token)


def _credentials(scope: Scope) -> Credentials:
    shown = Credentials()
    for name, value in scope["headers"]:
        if name == b"authorization":
            shown.authorization = value
        elif name == b"x-api-key":
            shown.api_key = value
    connection = direct_connection(scope)
    shown.has_certificate = connection is not None and connection.has_peer_certificate
    return shown
