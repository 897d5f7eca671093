"""Serve the verifier's gRPC API.

The service checks requests against the limits table even if the gateway did so before. A sequence's
error is an event of its session, with the code and field of a gRPC status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from typing import Any

from foretoken import limits, rpc
from foretoken.corpora import CorpusInfo, token_ids_from
from foretoken.errors import (
    PreconditionError,
    UnavailableError,
    error_from_code,
)
from foretoken.tracing import Tracer
from protos import verifier_pb2, verifier_pb2_grpc
from verifier_svc import events
from verifier_svc.drafters.awaited import AwaitedDrafters
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.registry import DrafterRegistry
from verifier_svc.engine import Engine
from verifier_svc.info import VerifierConstants, drafter_state, load
from verifier_svc.messages import ErrorEvent, FinishedEvent, FlushCache, TokensEvent
from verifier_svc.open_session import OpenSession
from verifier_svc.sampling.grammar_compiler import GrammarCompiler
from verifier_svc.submissions import Submissions

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Serve sessions, single sequences, corpora, drafter changes and GetInfo over one engine."""

    def __init__(
        self,
        engine: Engine,
        info: VerifierConstants,
        tracer: Tracer | None = None,
        corpora: DrafterCorpora | None = None,
        grammars: GrammarCompiler | None = None,
        drafters: DrafterRegistry | None = None,
        awaited: AwaitedDrafters | None = None,
    ) -> None:
        """
        Args:
            tracer: None: tracing is off.
            grammars: None: refuse sequences with a grammar.
            drafters: None: refuse changes of drafters.
            awaited: the drafters that readiness waits for; None: it waits for none.
        """
        self._engine = engine
        self._info = info
        self._tracer = tracer
        self._corpora = corpora or DrafterCorpora(())
        self._drafters = drafters
        self._awaited = awaited or AwaitedDrafters()
        self._submissions = Submissions(engine, info, grammars)
        self._draining = False
        self._closed = False
        self._sessions: set[OpenSession] = set()

    def drain(self) -> None:
        """Refuse new sequences from now on and notify every session; running sequences go on."""
        self._draining = True
        self._engine.drain()
        self._wake_sessions()

    def close(self) -> None:
        """End every session after it has sent the events that the engine has published so far."""
        self._closed = True
        self._wake_sessions()

    def _wake_sessions(self) -> None:
        for session in self._sessions:
            session.wake()

    async def Session(
        self, request_iterator: AsyncIterator[verifier_pb2.SessionRequest], context: Any
    ) -> AsyncGenerator[verifier_pb2.SessionResponse, None]:
        """Read submissions and aborts, and send one message for each step that has events.

        Ends when the caller closes its side, or after ``close``.
        """
        async with OpenSession(self._engine, self._tracer) as session:
            reader = asyncio.create_task(self._submissions.read(session, request_iterator))
            self._sessions.add(session)
            try:
                told_draining = self._draining
                yield verifier_pb2.SessionResponse(
                    started=verifier_pb2.SessionStarted(
                        epoch=self._info.epoch, model_fingerprint=self._info.model_fingerprint
                    ),
                    heartbeat=self._heartbeat(),
                    draining=told_draining,
                    queue_room=self._engine.queue_room,
                    load=load(self._engine),
                )
                beat_at = time.monotonic() + HEARTBEAT_S
                while not reader.done():
                    closed = self._closed
                    batch = await session.events(0.0 if closed else max(beat_at - time.monotonic(), 0.0))
                    response = events.to_session_response(batch)
                    if time.monotonic() >= beat_at:
                        self._check_alive()
                        response.heartbeat.CopyFrom(self._heartbeat())
                        beat_at = time.monotonic() + HEARTBEAT_S
                    elif not batch and told_draining == self._draining:
                        if closed:
                            return
                        continue
                    response.draining = told_draining = self._draining
                    response.queue_room = self._engine.queue_room
                    response.load.CopyFrom(load(self._engine))
                    yield response
                await reader
            finally:
                self._sessions.discard(session)
                reader.cancel()

    async def Generate(
        self, request: verifier_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[verifier_pb2.GenerateResponse, None]:
        """Run one sequence and stream its events. Its error becomes the call's status."""
        async with OpenSession(self._engine, self._tracer) as session:
            _take_trace_context(request.sequence, context)
            submit = self._submissions.admit(session, request.sequence)
            self._engine.send(
                submit if submit.sampling.grammar is None else await self._submissions.with_matcher(submit)
            )
            while True:
                for event in await session.events(HEARTBEAT_S):
                    match event:
                        case TokensEvent():
                            yield verifier_pb2.GenerateResponse(tokens=events.tokens_to_proto(event))
                        case FinishedEvent():
                            yield verifier_pb2.GenerateResponse(finished=events.finished_to_proto(event))
                            return
                        case ErrorEvent():
                            raise error_from_code(event.code, event.message, event.field)
                self._check_alive()

    async def AddCorpus(self, request: verifier_pb2.AddCorpusRequest, context: Any) -> verifier_pb2.AddCorpusResponse:
        limits.check_name("name", request.name)
        token_ids = token_ids_from(request.token_ids, self._info.limits.vocab_size)
        drafter, info = await self._corpora.add(request.drafter, request.name, token_ids, append=request.append)
        return verifier_pb2.AddCorpusResponse(corpus=_corpus_to_proto(drafter, info))

    async def RemoveCorpus(
        self, request: verifier_pb2.RemoveCorpusRequest, context: Any
    ) -> verifier_pb2.RemoveCorpusResponse:
        await self._corpora.remove(request.drafter, request.name)
        return verifier_pb2.RemoveCorpusResponse()

    async def ListCorpora(
        self, request: verifier_pb2.ListCorporaRequest, context: Any
    ) -> verifier_pb2.ListCorporaResponse:
        found = await self._corpora.list(request.drafter)
        return verifier_pb2.ListCorporaResponse(corpora=[_corpus_to_proto(drafter, info) for drafter, info in found])

    async def AttachDrafter(
        self, request: verifier_pb2.AttachDrafterRequest, context: Any
    ) -> verifier_pb2.AttachDrafterResponse:
        drafter = await self._registry.attach(request.name, request.address, request.transport)
        return verifier_pb2.AttachDrafterResponse(drafter=drafter_state(drafter))

    async def DetachDrafter(
        self, request: verifier_pb2.DetachDrafterRequest, context: Any
    ) -> verifier_pb2.DetachDrafterResponse:
        await self._registry.detach(request.name)
        return verifier_pb2.DetachDrafterResponse()

    async def FlushCache(
        self, request: verifier_pb2.FlushCacheRequest, context: Any
    ) -> verifier_pb2.FlushCacheResponse:
        self._check_alive()
        done: Future[int] = Future()
        self._engine.send(FlushCache(done))
        num_blocks = await asyncio.wrap_future(done)
        return verifier_pb2.FlushCacheResponse(num_blocks=num_blocks)

    @property
    def _registry(self) -> DrafterRegistry:
        self._check_alive()
        if self._drafters is None:
            raise PreconditionError("the drafters of this verifier do not change")
        return self._drafters

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Any) -> verifier_pb2.GetInfoResponse:
        """Return this verifier's constants and current figures."""
        self._check_alive()
        return self._info.response(self._engine)

    def _heartbeat(self) -> verifier_pb2.Heartbeat:
        return verifier_pb2.Heartbeat(
            step_id=self._engine.counters.num_steps,
            awaits_drafters=self._awaited.is_waiting() or not self._engine.is_prepared,
        )

    def _check_alive(self) -> None:
        if not self._engine.is_alive():
            raise UnavailableError("the engine is down")


def _corpus_to_proto(drafter: str, info: CorpusInfo) -> verifier_pb2.Corpus:
    return verifier_pb2.Corpus(name=info.name, num_tokens=info.num_tokens, drafter=drafter)


def _take_trace_context(message: verifier_pb2.Sequence, context: Any) -> None:
    """Copy the trace context of the call's metadata into a sequence that has none."""
    if not message.HasField("traceparent") and (trace := rpc.trace_context(context)) is not None:
        message.traceparent, message.tracestate = trace.traceparent, trace.tracestate or ""
