"""Give an application the HTTP requests of Ray Serve, and nothing else that it brings."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Ray Serve adds it to every answer.
_OF_RAY = b"x-request-id"


class HttpOnly:
    """Wrap an ASGI application that handles only HTTP requests.

    It has no lifespan and no websockets.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests on, agree to start and shutdown, and refuse WebSockets."""

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0].lower() != _OF_RAY]
                message = {**message, "headers": headers}
            await send(message)

        if scope["type"] == "http":
            await self._app(scope, receive, send_without_id)
        elif scope["type"] == "lifespan":
            for _ in ("startup", "shutdown"):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
        else:
            await receive()
            await send({"type": "websocket.close"})
