"""Verifiers that the settings name one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable


class FixedList:
    """Implements VerifierSource for addresses that stay."""

    reason = ""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield the addresses once."""
        yield self._addresses
