"""Join several sources of verifiers into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from gateway.discovery.source import VerifierSource

# A source's number and its verifiers, or the fault that ended it.
_News = tuple[int, frozenset[str]] | Exception


class AllSources:
    """Implements VerifierSource for the verifiers of several sources."""

    def __init__(self, sources: Sequence[VerifierSource]) -> None:
        self._sources = sources

    @property
    def reason(self) -> str:
        return "; ".join(filter(None, (source.reason for source in self._sources)))

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield the union after each change. A source that knows nothing yet holds up no other."""
        news: asyncio.Queue[_News] = asyncio.Queue()
        tasks = [asyncio.create_task(self._watch(index, news)) for index in range(len(self._sources))]
        known = [frozenset[str]()] * len(self._sources)
        sent: frozenset[str] | None = None
        try:
            while True:
                match await news.get():
                    case Exception() as fault:
                        raise fault
                    case index, addresses:
                        known[index] = addresses
                if (union := frozenset().union(*known)) != sent:
                    sent = union
                    yield union
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, index: int, news: asyncio.Queue[_News]) -> None:
        try:
            async for addresses in self._sources[index].changes():
                news.put_nowait((index, addresses))
        except Exception as fault:
            news.put_nowait(fault)
