"""Answer one request over HTTP, whole or as server-sent events, in any API's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from foretoken.errors import ForetokenError
from gateway.bodies import hold_of
from gateway.core import GatewayCore
from gateway.generation import ClientGoneError, Generation
from gateway.generation_request import GenerationRequest
from gateway.http_protocol import direct_connection
from gateway.output import Delta
from gateway.reply_format import ReplyFormat, for_any_reader


class Exchange(Response):
    """Runs a generation and sends it as ``reply`` writes it.

    When the client disconnects, the generation is dropped at once. An error before the first byte
    is raised and becomes an HTTP status; a later error becomes an event.
    """

    def __init__(
        self,
        core: GatewayCore,
        request: GenerationRequest,
        reply: ReplyFormat,
        *,
        stream: bool,
        api: str,
        client_id: str,
    ) -> None:
        super().__init__()
        self._core = core
        self._request = request
        self._reply = reply
        self._stream = stream
        self._api = api
        self._client_id = client_id
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request ends within its timeout; a client that needs twice that time to read is gone.
        try:
            async with (
                asyncio.timeout(2 * self._core.settings.request_timeout_s),
                self._core.generate(self._request, api=self._api, client_id=self._client_id) as generation,
                _watch(generation, receive),
            ):
                # It runs: from now on the limit of requests counts it.
                hold_of(scope).release()
                if self._stream:
                    await self._send_events(generation, scope, send)
                else:
                    await self._send_whole(generation, send)
        except (ClientGoneError, TimeoutError):
            return
        except ForetokenError:
            if not self._started:
                raise

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        body = self._reply.whole(generation, await generation.run())
        await self._start(send, b"application/json", content_length=len(body))
        await self._send(send, body, more=False)

    async def _send_events(self, generation: Generation, scope: Scope, send: Send) -> None:
        while not (deltas := await generation.wait()):
            pass
        await self._start(send, b"text/event-stream; charset=utf-8")
        parts = [self._reply.first(generation)]
        reader = _StepWriter(generation, self._reply, scope)
        try:
            while True:
                parts += [self._reply.chunk(generation, delta) for delta in deltas]
                events = b"".join(parts)
                if events:
                    await self._send(send, for_any_reader(events))
                if generation.done:
                    break
                deltas = await generation.wait(reader)
                parts = [] if deltas else [self._reply.keep_alive]
            await self._send(send, for_any_reader(self._reply.last(generation)), more=False)
            generation.check_client()
        except ClientGoneError:
            raise
        except Exception as error:
            known = error if isinstance(error, ForetokenError) else ForetokenError("internal error")
            await self._send(send, for_any_reader(self._reply.failed(generation, known)), more=False)
            raise

    async def _start(self, send: Send, content_type: bytes, content_length: int | None = None) -> None:
        name = (self._client_id or self._request.id).encode()
        headers = [(b"content-type", content_type), (self._reply.request_id_header, name)]
        if content_length is None:
            # Proxies must not buffer events.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(content_length).encode()))
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Send, and return when the client has read most of it."""
        await send({"type": "http.response.body", "body": body, "more_body": more})


class _StepWriter:
    """Writes the events of one step to a client that reads, from within the event loop's callback.

    Waking the answer's task for each step would cost more than all the rest of a chunk.
    """

    def __init__(self, generation: Generation, reply: ReplyFormat, scope: Scope) -> None:
        self._generation = generation
        self._reply = reply
        self._connection = direct_connection(scope)

    @property
    def keeps_up(self) -> bool:
        return self._connection is not None and self._connection.is_writable

    def take(self, deltas: list[Delta]) -> None:
        events = b"".join([self._reply.chunk(self._generation, delta) for delta in deltas])
        if events:
            assert self._connection is not None
            self._connection.write_part(for_any_reader(events))


@contextlib.asynccontextmanager
async def _watch(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Disconnect the generation when its client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.disconnect()

    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
