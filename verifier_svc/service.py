"""The verifier's rim: gRPC in, engine messages out. Protobuf types stop here.

Requests are checked against the limits table whatever the gateway did; an error of one sequence is an event of the
session, the same code and field that a status would carry.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from foretoken import limits, rpc, tracing
from foretoken.corpora import CorpusInfo, token_ids_from
from foretoken.errors import (
    ForetokenError,
    InvalidRequestError,
    PreconditionError,
    QueueFullError,
    UnavailableError,
    error_from_code,
)
from foretoken.limits import ModelLimits
from foretoken.sampling import SpeculationOptions
from foretoken.tracing import Tracer
from foretoken.wire import sampling_from_proto, speculation_from_proto
from protos import verifier_pb2, verifier_pb2_grpc
from verifier_svc import events
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.registry import DrafterRegistry
from verifier_svc.engine import Engine
from verifier_svc.info import VerifierInfo, drafter_state
from verifier_svc.messages import Abort, ErrorEvent, Event, FinishedEvent, SequenceKey, Submit, TokensEvent
from verifier_svc.outbox import Outbox
from verifier_svc.sampling.grammar_compiler import GrammarCompiler
from verifier_svc.sequence_spans import SequenceSpans

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Session, Generate and GetInfo over one engine."""

    def __init__(
        self,
        engine: Engine,
        info: VerifierInfo,
        tracer: Tracer | None = None,
        corpora: DrafterCorpora | None = None,
        grammars: GrammarCompiler | None = None,
        drafters: DrafterRegistry | None = None,
    ) -> None:
        """Without ``grammars``, sequences that have one are refused; without ``drafters``, changes of drafters are."""
        self._engine = engine
        self._info = info
        self._tracer = tracer
        self._corpora = corpora or DrafterCorpora(())
        self._grammars = grammars
        self._drafters = drafters
        # Sequences whose grammars are being compiled: the engine does not know of them yet.
        self._num_compiling = 0
        self._draining = False
        self._closed = False
        self._sessions: set[_OpenSession] = set()

    def drain(self) -> None:
        """Refuse new sequences from now on and tell every session so; running ones go on."""
        self._draining = True
        self._engine.drain()
        self._wake_sessions()

    def close(self) -> None:
        """End every session, once what the engine has put out so far is on its way."""
        self._closed = True
        self._wake_sessions()

    def _wake_sessions(self) -> None:
        for session in self._sessions:
            session.wake()

    async def Session(
        self, request_iterator: AsyncIterator[verifier_pb2.SessionRequest], context: Any
    ) -> AsyncGenerator[verifier_pb2.SessionResponse, None]:
        """Submissions and aborts up, one message a step down. Ends with the caller's half, or by ``close``."""
        async with _OpenSession(self._engine, self._tracer) as session:
            reader = asyncio.create_task(self._read(session, request_iterator))
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
                    yield response
                await reader
            finally:
                self._sessions.discard(session)
                reader.cancel()

    async def Generate(
        self, request: verifier_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[verifier_pb2.GenerateResponse, None]:
        """One sequence, one stream; its error is the call's status."""
        async with _OpenSession(self._engine, self._tracer) as session:
            _take_trace_context(request.sequence, context)
            submit = self._admit(session, request.sequence)
            self._engine.send(submit if submit.sampling.grammar is None else await self._with_matcher(submit))
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

    @property
    def _registry(self) -> DrafterRegistry:
        self._check_alive()
        if self._drafters is None:
            raise PreconditionError("the drafters of this verifier do not change")
        return self._drafters

    def _limits(self, attempt: int, options: SpeculationOptions) -> ModelLimits:
        """What requests are checked against now: drafters that were detached may be named still.

        A resumed sequence may name one that this verifier never had: it was admitted where there was one.
        """
        drafters = self._engine.speculator.drafters
        names = [drafter.name for drafter in drafters]
        if attempt:
            names += limits.named_drafters(options)
        detached = tuple(drafter.name for drafter in drafters if drafter.is_detached)
        return dataclasses.replace(self._info.limits, drafter_names=tuple(names), detached_drafters=detached)

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Any) -> verifier_pb2.GetInfoResponse:
        """What runs here and how it fares."""
        self._check_alive()
        return self._info.response(self._engine)

    def _heartbeat(self) -> verifier_pb2.Heartbeat:
        return verifier_pb2.Heartbeat(step_id=self._engine.counters.num_steps)

    def _check_alive(self) -> None:
        if not self._engine.is_alive():
            raise UnavailableError("the engine is down")

    async def _read(self, session: _OpenSession, requests: AsyncIterator[verifier_pb2.SessionRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("event"):
                case "submit":
                    self._submit(session, request.submit)
                case "abort":
                    key = SequenceKey(session.id, request.abort.request_id, request.abort.choice_index)
                    kept = request.abort.kept_tokens if request.abort.HasField("kept_tokens") else None
                    if kept is not None and session.spans is not None:
                        session.spans.satisfied(key)
                    self._abort(session, Abort(key, kept))
                case _:
                    raise InvalidRequestError("a session request without an event", field="event")
        session.wake()

    def _submit(self, session: _OpenSession, message: verifier_pb2.Sequence) -> None:
        try:
            if session.outbox.is_full:
                raise QueueFullError("this session does not read its results")
            submit = self._admit(session, message)
            if submit.sampling.grammar is None:
                self._engine.send(submit)
            else:
                session.compile(submit.key, self._compile(session, submit))
        except ForetokenError as error:
            # Bounded for the answer too: the identity of a hostile message need not be sane.
            key = SequenceKey(session.id, message.request_id[: limits.MAX_REQUEST_ID_CHARS], message.choice_index)
            session.outbox.put([ErrorEvent(key, message.attempt, error.code, error.message, error.field)])

    def _admit(self, session: _OpenSession, message: verifier_pb2.Sequence) -> Submit:
        """Raises as ``_check`` does, and QueueFullError now where the engine would say so after the step that runs."""
        submit = self._check(session.id, message)
        # A resumed sequence was admitted once.
        if submit.attempt == 0 and self._engine.queue_room <= self._num_compiling:
            raise QueueFullError("the queue is full")
        session.trace(message, submit.key)
        return submit

    async def _compile(self, session: _OpenSession, submit: Submit) -> None:
        """Send a sequence on as soon as its grammar is compiled; other messages are read meanwhile."""
        try:
            self._engine.send(await self._with_matcher(submit))
        except Exception as error:
            known = error if isinstance(error, ForetokenError) else ForetokenError("the grammar could not be compiled")
            if known is not error:
                logger.exception("compiling a grammar failed")
            session.outbox.put([ErrorEvent(submit.key, submit.attempt, known.code, known.message, known.field)])
        finally:
            for abort in session.waiting_aborts.pop(submit.key, ()):
                self._engine.send(abort)

    async def _with_matcher(self, submit: Submit) -> Submit:
        """The submission with its grammar compiled. Raises as GrammarCompiler.matcher does."""
        grammar = submit.sampling.grammar
        assert grammar is not None
        if self._grammars is None:
            raise InvalidRequestError("structured output is not served here", field=grammar.kind)
        self._num_compiling += 1
        try:
            matcher = await self._grammars.matcher(grammar, submit.output_ids)
        finally:
            self._num_compiling -= 1
        return dataclasses.replace(submit, matcher=matcher)

    def _abort(self, session: _OpenSession, abort: Abort) -> None:
        """Abort a sequence, behind its submission."""
        if (waiting := session.waiting_aborts.get(abort.key)) is not None:
            waiting.append(abort)
        else:
            self._engine.send(abort)

    def _check(self, session_id: int, message: verifier_pb2.Sequence) -> Submit:
        """The checked submission. Raises InvalidRequestError naming the field, or PreconditionError."""
        limits.check_text("request_id", message.request_id, limits.MAX_REQUEST_ID_CHARS, min_chars=1)
        limits.check_number("choice_index", message.choice_index, limits.Range(0, limits.MAX_CHOICE_INDEX))
        limits.check_number("attempt", message.attempt, limits.Range(0, limits.MAX_ATTEMPTS))
        limits.check_text("cache_salt", message.cache_salt, limits.MAX_CACHE_SALT_CHARS)
        sampling = sampling_from_proto(message.sampling)
        speculation = speculation_from_proto(message.speculation)
        model = self._limits(message.attempt, speculation)
        limits.check_sampling(sampling, model)
        limits.check_speculation(speculation, model)
        limits.check_prompt(message.prompt_token_ids, model)
        limits.check_token_ids("output_token_ids", message.output_token_ids, model.vocab_size)
        if len(message.prompt_token_ids) + len(message.output_token_ids) >= model.max_model_len:
            raise InvalidRequestError("prompt and output fill the context", field="output_token_ids")
        limits.check_prediction(message.prediction_token_ids, model, field="prediction_token_ids")
        if message.HasField("model_fingerprint") and message.model_fingerprint != self._info.model_fingerprint:
            raise PreconditionError("another model runs here", field="model_fingerprint")
        deadline = None
        if message.HasField("timeout_ms"):
            limits.check_number("timeout_ms", message.timeout_ms, limits.Range(1, limits.MAX_TIMEOUT_MS))
            deadline = time.monotonic() + message.timeout_ms / 1e3
        return Submit(
            key=SequenceKey(session_id, message.request_id, message.choice_index),
            attempt=message.attempt,
            prompt_ids=tuple(message.prompt_token_ids),
            output_ids=tuple(message.output_token_ids),
            sampling=sampling,
            speculation=speculation,
            cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
            deadline=deadline,
            prediction_ids=tuple(message.prediction_token_ids),
        )


class _OpenSession:
    """One session with the engine: its outbox, and the wait for what comes."""

    def __init__(self, engine: Engine, tracer: Tracer | None) -> None:
        self._engine = engine
        # None: nothing is traced.
        self.spans = SequenceSpans(tracer) if tracer is not None else None
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self.outbox = Outbox(self._wake_from_engine)
        # Sequences that wait for their grammars, and the aborts that wait behind them.
        self.waiting_aborts: dict[SequenceKey, list[Abort]] = {}
        self._compiling: set[asyncio.Task[None]] = set()
        self.id = 0

    async def __aenter__(self) -> _OpenSession:
        self.id = self._engine.open_session(self.outbox)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._compiling:
            task.cancel()
        self._engine.close_session(self.id)
        if self.spans is not None:
            self.spans.close()

    def compile(self, key: SequenceKey, work: Coroutine[Any, Any, None]) -> None:
        """Run what compiles a sequence's grammar and submits it, until the session ends."""
        self.waiting_aborts[key] = []
        task = asyncio.create_task(work)
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def trace(self, message: verifier_pb2.Sequence, key: SequenceKey) -> None:
        """Begin a sequence's span, if there is to be one."""
        if self.spans is not None:
            parent = tracing.trace_context(message.traceparent, message.tracestate)
            self.spans.start(key, message.attempt, parent)

    def wake(self) -> None:
        """End the wait in ``events``."""
        self._ready.set()

    async def events(self, timeout_s: float) -> list[Event]:
        """What the engine put since the last call; waits for it up to ``timeout_s``."""
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


def _corpus_to_proto(drafter: str, info: CorpusInfo) -> verifier_pb2.Corpus:
    return verifier_pb2.Corpus(name=info.name, num_tokens=info.num_tokens, drafter=drafter)


def _take_trace_context(message: verifier_pb2.Sequence, context: Any) -> None:
    """The call's metadata speak for a sequence that bears no trace context itself."""
    if not message.HasField("traceparent") and (trace := rpc.trace_context(context)) is not None:
        message.traceparent, message.tracestate = trace.traceparent, trace.tracestate or ""
