"""How long the gateway waits for a gRPC caller that takes nothing of what is sent to it."""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle

logger = logging.getLogger(__name__)


class Patience:
    """``with patience: yield message``: cancels the call if the caller does not make room for it in time.

    gRPC hands control back when flow control has let the message through, so that a caller who reads late only waits
    longer. Made in the call's own task.
    """

    def __init__(self, timeout_s: float) -> None:
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
        self._task.cancel()
