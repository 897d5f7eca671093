"""Limit the bytes of REST bodies and gRPC messages that a gateway process reads at once.

A body takes its bytes from the budget before they are read, and returns them when its request runs
or is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.errors import QueueFullError
from gateway.turns import LoopTurns

_SCOPE_KEY = "foretoken.body"


class BodyBudget:
    """Counts the bytes of all bodies that are read or wait to run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self.turns = LoopTurns()

    @contextlib.contextmanager
    def hold(self) -> Iterator[BodyHold]:
        """Yield an empty hold; at the end of the block it returns its bytes."""
        hold = BodyHold(self)
        try:
            yield hold
        finally:
            hold.release()


class BodyHold:
    """The part of the budget that one body uses."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Take more bytes, or return some. Raises QueueFullError if the budget has too few left."""
        growth = num_bytes - self.num_bytes
        if growth > self._budget.limit - self._budget.num_bytes:
            raise QueueFullError(
                f"the gateway is reading all {self._budget.limit} bytes of requests that it may; try again later"
            )
        self._budget.num_bytes += growth
        self.num_bytes = num_bytes

    async def turn(self) -> None:
        """Wait for a turn of the event loop in which no other body is parsed.

        gRPC messages need none: they are read one at a time.
        """
        await self._budget.turns.take()

    def release(self) -> None:
        """Return all bytes. Safe to call more than once."""
        self.resize(0)


class BodyMiddleware:
    """Gives each HTTP request a hold, which is released at the latest when the request ends."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._budget.hold() as hold:
            scope[_SCOPE_KEY] = hold
            await self._app(scope, receive, send)


def hold_of(scope: Scope) -> BodyHold:
    """Return the hold of a request."""
    hold: BodyHold = scope[_SCOPE_KEY]
    return hold
