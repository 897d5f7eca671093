"""How long the gateway waits for a gRPC caller that takes nothing of what is sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import TimerHandle
from typing import Any

import grpc

logger = logging.getLogger(__name__)


class Patience:
    """``with patience: yield message``: ends the call with ABORTED if the caller does not make room for it in time.

    gRPC hands control back when flow control has let the message through, so that a caller who reads late only waits
    longer. Made in the call's own task, which is cancelled.
    """

    # Any: gRPC's context is generic in the messages of one method.
    def __init__(self, context: Any, timeout_s: float, partings: set[asyncio.Task[None]]) -> None:
        """``partings`` holds the tasks of calls that were ended, while their status waits to be read."""
        self._context = context
        self._partings = partings
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
        parting = self._loop.create_task(self._part())
        self._partings.add(parting)
        parting.add_done_callback(self._partings.discard)
        self._task.cancel()

    async def _part(self) -> None:
        """The status reaches the caller behind the one message that it has left unread, if it ever reads on."""
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self._context.abort(grpc.StatusCode.ABORTED, f"nothing was read for {self._timeout_s:g} s")
