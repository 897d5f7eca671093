"""Collect which outputs have something new, for the reader of their generation."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.output import Delta, Output


class DirectReader(Protocol):
    """Takes the deltas of a step at once, so that no task has to wake up for them."""

    @property
    def keeps_up(self) -> bool:
        """Return whether it can take deltas now; otherwise they are merged until ``Generation.wait``."""
        ...

    def take(self, deltas: list[Delta]) -> None: ...


class News:
    """Collects outputs that have something new, until the reader of their generation takes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: dict[int, Output] = {}
        # Takes deltas while its task waits.
        self._reader: DirectReader | None = None
        self._fault: Exception | None = None
        self._wake = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._changed)

    def add(self, output: Output) -> None:
        """Note that an output has something new."""
        if not self._changed:
            # After the whole message of the verifier, which may change several outputs.
            self._loop.call_soon(self._announce)
        self._changed[output.index] = output

    def wake(self) -> None:
        """End the present ``wait``."""
        self._wake.set()

    def clear(self) -> None:
        """Leave what is new with the outputs; the next news is announced again."""
        self._changed.clear()

    def take(self) -> list[Delta]:
        """Return what is new, in the order of the outputs."""
        changed, self._changed = self._changed, {}
        return [changed[index].take() for index in sorted(changed) if changed[index].error is None]

    async def wait(self, reader: DirectReader | None = None) -> None:
        """Return after ``wake``, or with news that ``reader`` did not take. Raise its fault.

        The reader takes the deltas of outputs that go on, as long as it keeps up.
        """
        self._wake.clear()
        self._reader = reader
        try:
            await self._wake.wait()
        finally:
            self._reader = None
        if self._fault is not None:
            raise self._fault

    def _announce(self) -> None:
        """Let the direct reader take what one message brought, or wake the task that waits."""
        reader = self._reader
        if reader is None or not reader.keeps_up or self._fault is not None or self._has_ends():
            self._wake.set()
            return
        try:
            reader.take(self.take())
        except Exception as error:
            self._fault = error
            self._wake.set()

    def _has_ends(self) -> bool:
        """Return whether an output with news has ended or failed: then the task has more to do."""
        return any(output.finished is not None or output.error is not None for output in self._changed.values())
