"""Answer HEAD as GET, where no key is needed: uptime monitors send it.

FastAPI's routes know only the methods that they name, and HEAD for each
would double the OpenAPI document.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.routes import Who, who_may_call


def answers_head(path: str) -> bool:
    """Return whether HEAD on a path is answered as GET: everybody may get it."""
    return who_may_call("GET", path) is Who.PUBLIC


class HeadMiddleware:
    """Runs a HEAD request as GET.

    The server, which knows what the client sent, leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" and answers_head(scope["path"]):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
