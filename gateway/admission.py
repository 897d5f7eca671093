"""Admit requests up to a limit, and none while the gateway drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from foretoken.errors import QueueFullError, UnavailableError


class Admission:
    """Counts the gateway's requests, over all protocols."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_requests = 0
        self.draining = False

    def check(self) -> None:
        """Raise UnavailableError while draining, and QueueFullError at the limit."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self.num_requests >= self._limit:
            raise QueueFullError(f"{self._limit} requests are already running or waiting; try again later")

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Count one request while the block runs. Raises as ``check`` does."""
        self.check()
        self.num_requests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._empty.set()

    async def drain(self, timeout_s: float) -> bool:
        """Admit no more requests, and wait for the running ones; False after ``timeout_s``."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
