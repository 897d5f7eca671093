"""Verifiers that the program reports: the hook for whatever places them, such as Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from foretoken.address import check_address


class PushedSet:
    """Implements VerifierSource for a set that ``set`` replaces. Use it on one event loop."""

    def __init__(self) -> None:
        self._addresses: frozenset[str] | None = None
        self._changed = asyncio.Event()

    @property
    def reason(self) -> str:
        return "no verifier was reported yet" if self._addresses is None else ""

    def set(self, addresses: Iterable[str]) -> None:
        """Replace the set; verifiers that it lacks are drained.

        Raises ValueError for a bad address.
        """
        self._addresses = frozenset(map(check_address, addresses))
        self._changed.set()

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield the set after each ``set``; for one reader."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            assert self._addresses is not None
            yield self._addresses
