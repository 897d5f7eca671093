"""The streams that a client process has yet to run."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from foretoken.bench.stream import UserStream

# A client sends it when it needs more streams, and gets a list of them: an
# empty one if there are no more.
MORE = "more"


class Pipe(Protocol):
    """One end of a pipe between two processes."""

    def send(self, obj: Any, /) -> None: ...

    def recv(self) -> Any: ...


class Supply:
    """Hands out streams in order of their starts. It asks for more before it has none."""

    def __init__(
        self, streams: Sequence[UserStream], prepare: Callable[[Sequence[UserStream]], None], pipe: Pipe | None
    ) -> None:
        """
        Args:
            prepare: is called with the streams, now and when more come.
            pipe: from which more streams come; None: there are no more.
        """
        prepare(streams)
        self._prepare = prepare
        self._waiting = collections.deque(sorted(streams, key=lambda stream: stream.starts_after))
        self._pipe = pipe
        self._least = len(streams) // 2
        self._arrival: asyncio.Task[None] | None = None

    async def next(self) -> UserStream | None:
        """Return the next stream; None if there are no more."""
        while True:
            if self._pipe is not None and self._arrival is None and len(self._waiting) <= self._least:
                self._arrival = asyncio.create_task(self._take_more(self._pipe))
            if self._waiting:
                return self._waiting.popleft()
            if self._arrival is None:
                return None
            await self._arrival

    async def close(self) -> None:
        """Wait for what was asked for: the next message to be read is then the next run's."""
        if self._arrival is not None:
            await self._arrival

    async def _take_more(self, pipe: Pipe) -> None:
        pipe.send(MORE)
        # In a thread, so that the event loop does not wait for it.
        streams: list[UserStream] = await asyncio.to_thread(pipe.recv)
        self._prepare(streams)
        self._waiting += streams
        if not streams:
            self._pipe = None
        self._arrival = None
