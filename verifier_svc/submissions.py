"""Turn a client's message into a submission: check it, admit it, compile its grammar."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import AsyncIterator

from foretoken import limits
from foretoken.errors import ForetokenError, InvalidRequestError, PreconditionError, QueueFullError
from foretoken.limits import ModelLimits
from foretoken.sampling import SpeculationOptions
from foretoken.wire import sampling_from_proto, speculation_from_proto
from protos import verifier_pb2
from verifier_svc.engine import Engine
from verifier_svc.info import VerifierConstants
from verifier_svc.messages import Abort, ErrorEvent, SequenceKey, Submit
from verifier_svc.open_session import OpenSession
from verifier_svc.sampling.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)


class Submissions:
    """Handle the submissions and aborts of sessions. Only the event loop uses it."""

    def __init__(self, engine: Engine, info: VerifierConstants, grammars: GrammarCompiler | None) -> None:
        """Without ``grammars``, refuse sequences that have a grammar."""
        self._engine, self._info, self._grammars = engine, info, grammars
        # Sequences whose grammar is being compiled. The engine does not know them yet.
        self._num_compiling = 0

    async def read(self, session: OpenSession, requests: AsyncIterator[verifier_pb2.SessionRequest]) -> None:
        """Handle the requests of a session until they end.

        Raises InvalidRequestError for one without an event.
        """
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

    def _submit(self, session: OpenSession, message: verifier_pb2.Sequence) -> None:
        try:
            if session.outbox.is_full:
                raise QueueFullError("this session does not read its results")
            submit = self.admit(session, message)
            if submit.sampling.grammar is None:
                self._engine.send(submit)
            else:
                session.compile(submit.key, self._compile(session, submit))
        except ForetokenError as error:
            # A hostile message may have a huge id: shorten it in the answer.
            key = SequenceKey(session.id, message.request_id[: limits.MAX_REQUEST_ID_CHARS], message.choice_index)
            session.outbox.put([ErrorEvent(key, message.attempt, error.code, error.message, error.field)])

    def admit(self, session: OpenSession, message: verifier_pb2.Sequence) -> Submit:
        """Check a sequence, start its span and return its submission.

        Raises:
            InvalidRequestError: a field is out of bounds; the error names it.
            PreconditionError: another model runs here.
            QueueFullError: the queue is full. The engine would refuse too, but only after its
                current step.
        """
        submit = self._check(session.id, message)
        # A resumed sequence was admitted before.
        if submit.attempt == 0 and self._engine.queue_room <= self._num_compiling:
            raise QueueFullError("the queue is full")
        session.trace(message, submit.key)
        return submit

    async def _compile(self, session: OpenSession, submit: Submit) -> None:
        """Compile a sequence's grammar, then send the sequence. Other messages do not wait."""
        try:
            self._engine.send(await self.with_matcher(submit))
        except Exception as error:
            known = error if isinstance(error, ForetokenError) else ForetokenError("the grammar could not be compiled")
            if known is not error:
                logger.exception("compiling a grammar failed")
            session.outbox.put([ErrorEvent(submit.key, submit.attempt, known.code, known.message, known.field)])
        finally:
            for abort in session.waiting_aborts.pop(submit.key, ()):
                self._engine.send(abort)

    async def with_matcher(self, submit: Submit) -> Submit:
        """Return the submission with its grammar compiled.

        Raises InvalidRequestError without a grammar compiler, and the errors of
        GrammarCompiler.matcher.
        """
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

    def _abort(self, session: OpenSession, abort: Abort) -> None:
        """Abort a sequence, but not before its submission was sent."""
        if (waiting := session.waiting_aborts.get(abort.key)) is not None:
            waiting.append(abort)
        else:
            self._engine.send(abort)

    def _limits(self, attempt: int, options: SpeculationOptions) -> ModelLimits:
        """Return the limits to check a request against.

        A request may still name a detached drafter. A resumed sequence may name a drafter that this
        verifier never had, because another verifier admitted it.
        """
        drafters = self._engine.speculator.drafters
        names = [drafter.name for drafter in drafters]
        if attempt:
            names += limits.named_drafters(options)
        detached = tuple(drafter.name for drafter in drafters if drafter.is_detached)
        return dataclasses.replace(self._info.limits, drafter_names=tuple(names), detached_drafters=detached)

    def _check(self, session_id: int, message: verifier_pb2.Sequence) -> Submit:
        """Return the checked submission.

        Raises InvalidRequestError naming the field, or PreconditionError if another model runs
        here.
        """
        limits.check_text("request_id", message.request_id, limits.MAX_REQUEST_ID_CHARS, min_chars=1)
        limits.check_number("choice_index", message.choice_index, limits.Range(0, limits.MAX_CHOICE_INDEX))
        limits.check_number("attempt", message.attempt, limits.Range(0, limits.MAX_ATTEMPTS))
        limits.check_text("cache_salt", message.cache_salt, limits.MAX_CACHE_SALT_CHARS)
        sampling = sampling_from_proto(message.sampling)
        speculation = speculation_from_proto(message.speculation)
        model = self._limits(message.attempt, speculation)
        limits.check_sampling(sampling, model)
        limits.check_speculation(speculation, model)
        if speculation.shape is not None and not message.attempt:
            self._engine.speculator.bounds.check(speculation.shape)
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
            priority=message.priority,
            returns_trees=message.return_trees,
        )
