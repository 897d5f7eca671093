"""Look for verifiers again and again: in a file, or in DNS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from foretoken.errors import UnavailableError

logger = logging.getLogger(__name__)

# Finds the present addresses. Raises UnavailableError if it cannot look.
LookUp = Callable[[], Awaitable[frozenset[str]]]


class LookedUp:
    """Implements VerifierSource by a function that is called every ``interval_s`` seconds."""

    def __init__(self, location: str, look_up: LookUp, interval_s: float) -> None:
        """``location``: the name of what is looked up, for messages."""
        self.reason = f"{location}: not looked up yet"
        self._location = location
        self._look_up = look_up
        self._interval_s = interval_s

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield what is found, when it differs from what was found before."""
        known: frozenset[str] = frozenset()
        while True:
            found = await self._found()
            if found and found != known:
                known = found
                yield found
            await asyncio.sleep(self._interval_s)

    async def _found(self) -> frozenset[str]:
        """Return the addresses; none if they are unknown now, for the reason in ``reason``."""
        reason = ""
        try:
            found = await self._look_up()
            if not found:
                # A file that is being written is empty for a moment, and so is the
                # answer of a name server that has just started. A verifier that is
                # really gone has ended its session.
                reason = f"{self._location}: names no verifier"
        except UnavailableError as error:
            found = frozenset()
            reason = f"{self._location}: {error.message}"
        if reason and reason != self.reason:
            logger.warning("no verifier was found", extra={"reason": reason})
        self.reason = reason
        return found
