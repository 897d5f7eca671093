"""Hold one open session of a gateway: its outbox, its spans, and the wait for events."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from foretoken import tracing
from foretoken.tracing import TraceContext, Tracer
from protos import verifier_pb2
from verifier_svc.engine import Engine
from verifier_svc.messages import Abort, Event, SequenceKey
from verifier_svc.outbox import Outbox
from verifier_svc.sequence_spans import SequenceSpans


class OpenSession:
    """One session with the engine. Only the event loop uses it."""

    def __init__(self, engine: Engine, tracer: Tracer | None) -> None:
        self._engine = engine
        # None: tracing is off.
        self.spans = SequenceSpans(tracer, self._trace_drafter) if tracer is not None else None
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self.outbox = Outbox(self._wake_from_engine)
        # Aborts to send after the submission, by sequence whose grammar is being compiled.
        self.waiting_aborts: dict[SequenceKey, list[Abort]] = {}
        self._compiling: set[asyncio.Task[None]] = set()
        self.id = 0

    async def __aenter__(self) -> OpenSession:
        self.id = self._engine.open_session(self.outbox)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._compiling:
            task.cancel()
        self._engine.close_session(self.id)
        if self.spans is not None:
            self.spans.close()

    def compile(self, key: SequenceKey, work: Coroutine[Any, Any, None]) -> None:
        """Start ``work``, which compiles a sequence's grammar and submits the sequence.

        The session's end cancels it.
        """
        self.waiting_aborts[key] = []
        task = asyncio.create_task(work)
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def trace(self, message: verifier_pb2.Sequence, key: SequenceKey) -> None:
        """Start a sequence's span if tracing is on."""
        if self.spans is not None:
            parent = tracing.trace_context(message.traceparent, message.tracestate)
            self.spans.start(key, message.attempt, parent)

    def _trace_drafter(self, name: str, batch_slot: int, generation: int, parent: TraceContext) -> None:
        self._engine.speculator.drafter(name).source.trace_sequence(batch_slot, generation, parent)

    def wake(self) -> None:
        """End the wait in ``events``."""
        self._ready.set()

    async def events(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait up to ``timeout_s`` seconds for some."""
        if not self._ready.is_set():
            handle = self._loop.call_later(timeout_s, self._ready.set)
            await self._ready.wait()
            handle.cancel()
        self._ready.clear()
        batch = self.outbox.take()
        if self.spans is not None:
            self.spans.end(batch)
        return batch

    def _wake_from_engine(self) -> None:
        self._loop.call_soon_threadsafe(self._ready.set)
