"""Read gRPC messages under the byte budget of bodies.

When a server asks for a message, gRPC reads it whole, up to its size limit; until then a call holds
at most its flow-control window, ``WINDOW_BYTES``. So a call with one request is served like a
stream of requests: the server asks for its message when the budget has room for the largest one;
from then on the message holds its own size. Few messages are read at once and the others wait: an
arrived message takes less than a millisecond.

Health checks have a separate budget, so that they are answered when the other one is spent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from foretoken import rpc
from foretoken.errors import DeadlineError, ForetokenError, InvalidRequestError, QueueFullError
from foretoken.limits import MAX_BODY_BYTES
from gateway.bodies import BodyBudget, BodyHold

# From the call to the end of its message: gRPC does not report a message's progress.
MESSAGE_TIMEOUT_S = 10.0
WINDOW_BYTES = 16 * 1024
# By default gRPC widens the window of a fast sender's call, up to megabytes.
SERVER_OPTIONS = (("grpc.http2.lookahead_bytes", WINDOW_BYTES), ("grpc.http2.bdp_probe", 0))
# Health checks read at once.
MAX_HEALTH_READS = 2
_HEALTH = "/grpc.health."


class BodyInterceptor(grpc.aio.ServerInterceptor):
    """Reads each call's messages under a budget, and refuses undecodable ones."""

    def __init__(self, budget: BodyBudget, max_waiting: int, reject: Callable[[Any, ForetokenError], None]) -> None:
        """At most ``max_waiting`` calls wait to be read; one more is refused.

        ``reject`` counts and logs a refusal, given the call's context.
        """
        # Messages of unknown size take at most half of the budget.
        self.reader = _Reader(budget, max(1, budget.limit // (2 * MAX_BODY_BYTES)), max_waiting)
        self._health_reader = _Reader(BodyBudget(MAX_HEALTH_READS * MAX_BODY_BYTES), MAX_HEALTH_READS, max_waiting)
        self._reject = reject

    # Any: synchronous and asyncio handlers share grpc's handler type.
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        reader = self._health_reader if handler_call_details.method.startswith(_HEALTH) else self.reader
        serializer = handler.response_serializer
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler, reader), None, serializer)
        if handler.request_streaming:
            call = self._conversation(handler, reader)
        elif inspect.isasyncgenfunction(handler.unary_stream):
            call = self._stream(handler, reader)
        else:
            # The handler writes its answers itself and returns none.
            call = self._unary(handler, reader)
        return grpc.stream_stream_rpc_method_handler(call, None, serializer)

    def _unary(self, handler: Any, reader: _Reader) -> Any:
        behaviour = handler.unary_stream or handler.unary_unary

        async def call(requests: object, context: Any) -> Any:
            with reader.budget.hold() as hold:
                request = await self._receive(handler, reader, context, hold)
                hold.release()
                return await behaviour(request, context)

        return call

    def _stream(self, handler: Any, reader: _Reader) -> Any:
        async def call(requests: object, context: Any) -> AsyncIterator[Any]:
            with reader.budget.hold() as hold:
                request = await self._receive(handler, reader, context, hold)
                async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        # It runs: from now on the limit of requests counts it.
                        hold.release()
                        yield response

        return call

    def _conversation(self, handler: Any, reader: _Reader) -> Any:
        async def requests_of(context: Any) -> AsyncIterator[Any]:
            while True:
                with reader.budget.hold() as hold:
                    try:
                        data = await reader.read(context, hold)
                    except DeadlineError:
                        # The client may start another stream.
                        return
                    if data is None:
                        return
                    yield rpc.decode(handler.request_deserializer, data)

        async def call(requests: object, context: Any) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(handler.stream_stream(requests_of(context), context)) as responses:
                    async for response in responses:
                        yield response
            except ForetokenError as error:
                self._reject(context, error)
                await rpc.abort(context, error)

        return call

    async def _receive(self, handler: Any, reader: _Reader, context: Any, hold: BodyHold) -> Any:
        """Return the call's one message. Ends the call if there is none."""
        try:
            data = await reader.read(context, hold)
            if data is None:
                raise InvalidRequestError("the call has no message")
            return rpc.decode(handler.request_deserializer, data)
        except ForetokenError as error:
            self._reject(context, error)
            await rpc.abort(context, error)


class _Reader:
    """Reads messages, only a few at once."""

    def __init__(self, budget: BodyBudget, num_places: int, max_waiting: int) -> None:
        self.budget = budget
        self._places = asyncio.Semaphore(num_places)
        self.max_waiting = max_waiting
        self._num_waiting = 0
        self._reads: set[asyncio.Future[Any]] = set()

    async def read(self, context: Any, hold: BodyHold) -> bytes | None:
        """Return the next message, None at the end.

        Raises QueueFullError, or DeadlineError if late.
        """
        if self._num_waiting >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} messages already wait to be read; try again later")
        deadline = asyncio.get_running_loop().time() + MESSAGE_TIMEOUT_S
        await self._wait_for_place(deadline)
        try:
            hold.resize(MAX_BODY_BYTES)
            # Never cancel it: gRPC would keep writing into freed memory. It ends with the call.
            read = asyncio.ensure_future(context.read())
            self._reads.add(read)
            read.add_done_callback(self._ended)
            await asyncio.wait({read}, timeout=deadline - asyncio.get_running_loop().time())
            if not read.done():
                raise DeadlineError(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s")
            data: bytes | None = None if read.result() is grpc.aio.EOF else read.result()
            hold.resize(len(data or b""))
            return data
        finally:
            self._places.release()

    async def _wait_for_place(self, deadline: float) -> None:
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError:
            raise QueueFullError("too many messages are being read; try again later") from None
        finally:
            self._num_waiting -= 1

    def _ended(self, read: asyncio.Future[Any]) -> None:
        self._reads.discard(read)
        # A read that outlives its call fails; nobody needs its error.
        if not read.cancelled():
            read.exception()
