"""The byte budget of request bodies: one account for REST bodies and gRPC messages of a gateway process.

A body takes its bytes from the budget before they are read, and gives them back when its request runs or is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.errors import QueueFullError

_SCOPE_KEY = "foretoken.body"


class BodyBudget:
    """Counts the bytes of all bodies that are being read or wait to run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[BodyHold]:
        """An empty hold; whatever it has taken is given back when the block is left."""
        hold = BodyHold(self)
        try:
            yield hold
        finally:
            hold.release()


class BodyHold:
    """The part of the budget that one body has taken."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Take more of the budget, or give some back. Raises QueueFullError where that much is not left."""
        growth = num_bytes - self.num_bytes
        if growth > self._budget.limit - self._budget.num_bytes:
            raise QueueFullError(
                f"the gateway is reading as many bytes of requests as it may ({self._budget.limit}); try again later"
            )
        self._budget.num_bytes += growth
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give everything back. A second call has no effect."""
        self.resize(0)


class BodyMiddleware:
    """Gives each HTTP request a hold, which ends with the request at the latest."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._budget.hold() as hold:
            scope[_SCOPE_KEY] = hold
            await self._app(scope, receive, send)


def hold_of(scope: Scope) -> BodyHold:
    """The hold of the request that ``scope`` describes."""
    hold: BodyHold = scope[_SCOPE_KEY]
    return hold
