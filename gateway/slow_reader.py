"""End the call of a gRPC client that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import TimerHandle
from typing import Any

import grpc

logger = logging.getLogger(__name__)


class SlowReaderTimeout:
    """Ends a call with ABORTED if the client does not read a message in time.

    Use it as ``with timeout: yield message``. gRPC returns control when flow control has let the
    message through, so a client that reads late is only sent the next message later. Make it in
    the call's own task: the timeout cancels that task.
    """

    # Any: gRPC's context is generic in the messages of one method.
    def __init__(self, context: Any, timeout_s: float, ending_calls: set[asyncio.Task[None]]) -> None:
        """``ending_calls`` holds a task for each ended call until the client reads its status."""
        self._context = context
        self._ending_calls = ending_calls
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._timer: TimerHandle | None = None

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s, self._expire)

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()

    def _expire(self) -> None:
        logger.info("client cut", extra={"reason": "it reads nothing"})
        ending = self._loop.create_task(self._end_call())
        self._ending_calls.add(ending)
        ending.add_done_callback(self._ending_calls.discard)
        self._task.cancel()

    async def _end_call(self) -> None:
        """Send the status; the client gets it after its unread message, if it ever reads on."""
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self._context.abort(grpc.StatusCode.ABORTED, f"nothing was read for {self._timeout_s:g} s")
