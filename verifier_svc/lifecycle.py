"""Admit sequences, commit their tokens and end them, and emit the events of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple, TypeVar

from foretoken.errors import (
    DeadlineError,
    ForetokenError,
    ModelOutputError,
    PreconditionError,
    QueueFullError,
    UnavailableError,
)
from foretoken.results import FallbackReason, FinishReason, VerifiedTree
from verifier_svc.drafters.changes import AttachDrafter, DetachDrafter
from verifier_svc.engine_counters import EngineCounters
from verifier_svc.inbox import InboxMessage
from verifier_svc.messages import (
    Abort,
    CloseSession,
    ErrorEvent,
    FinishedEvent,
    FlushCache,
    SequenceKey,
    Submit,
    TokensEvent,
)
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import DecodeStep, Sequence
from verifier_svc.sessions import Sessions
from verifier_svc.speculation.speculator import Speculator

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Argument = TypeVar("Argument")


class SequenceBounds(NamedTuple):
    """The model's limits for every sequence.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        eos_ids: ids of the tokens that end an output.
        token_limit: ids from this one up are padding of the output head and are never sampled.
    """

    max_model_len: int
    eos_ids: frozenset[int]
    token_limit: int


class Lifecycle:
    """Own an engine's sequences. Only the engine thread uses it, except for ``sessions.open``."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculator: Speculator,
        counters: EngineCounters,
        bounds: SequenceBounds,
        model_name: str,
    ) -> None:
        self._scheduler, self._speculator = scheduler, speculator
        self.counters, self._bounds = counters, bounds
        self._model_name = model_name
        self.blocks = scheduler.blocks
        self.sessions = Sessions()
        self.is_draining = False
        self._sequences: dict[SequenceKey, Sequence] = {}

    # Messages and deadlines.

    def handle(self, message: InboxMessage, now: float) -> None:
        """Handle a message from the service. ``now``: seconds of time.monotonic()."""
        match message:
            case Submit():
                self._submit(message, now)
            case Abort():
                sequence = self._sequences.get(message.key)
                if sequence is not None:
                    self._finish(sequence, FinishReason.ABORT, kept_tokens=message.kept_tokens)
            case CloseSession():
                self._close(message.session_id)
            case AttachDrafter():
                _answer(message.done, self._speculator.add_source, message.source)
            case DetachDrafter():
                _answer(message.done, self._speculator.remove_source, message.name)
            case FlushCache():
                _answer(message.done, _flush_cache, self._scheduler)

    def end_overdue(self, now: float) -> None:
        """Fail every sequence whose deadline has passed."""
        for sequence in self._overdue(now):
            self.fail(sequence, DeadlineError("the request's deadline has passed"))

    def _overdue(self, now: float) -> list[Sequence]:
        return [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]

    def _submit(self, message: Submit, now: float) -> None:
        error = self._refusal(message)
        if error is not None:
            self.sessions.emit(ErrorEvent(message.key, message.attempt, error.code, error.message, error.field))
            return
        sequence = Sequence(message, now=now, **self._bounds._asdict())
        self._sequences[message.key] = sequence
        self._scheduler.add(sequence)

    def _refusal(self, message: Submit) -> ForetokenError | None:
        """Return the error that refuses a submission; None if the engine accepts it."""
        if message.key in self._sequences:
            return PreconditionError("a sequence of this request id and choice is running", field="request_id")
        if self.is_draining:
            return UnavailableError("the verifier is draining")
        if self._scheduler.is_full and not message.attempt:
            # A resumed sequence was admitted before, so its client expects the rest.
            return QueueFullError("the queue is full")
        if len(message.output_ids) >= message.sampling.max_tokens:
            return PreconditionError("the output emitted so far is complete", field="output_token_ids")
        return None

    def _close(self, session_id: int) -> None:
        for sequence in [s for s in self._sequences.values() if s.key.session_id == session_id]:
            self._remove(sequence)
        self.sessions.close(session_id)

    # Tokens.

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Count ``num_tokens`` as computed, and make the blocks that are now full shareable."""
        sequence.num_computed += num_tokens
        table = sequence.table
        assert table is not None
        if sequence.num_computed >= (table.num_hashed + 1) * self.blocks.block_size:
            self.blocks.hash_full_blocks(table, sequence.tokens, sequence.num_computed)

    def commit_decode(
        self,
        sequence: Sequence,
        result: WalkResult,
        shares: tuple[DrafterShare, ...],
        why_none: Callable[[Sequence], FallbackReason],
        tree: VerifiedTree | None = None,
    ) -> None:
        """Append the tokens that a decode step's walk emitted; end the sequence if it is done.

        Args:
            shares: each drafter's share of the walked tree; empty if there was no tree.
            why_none: says why a sequence that wanted a draft had none.
            tree: the walked tree, for a request that wants to see it.
        """
        fallback = None if shares or not self._speculator.wants_drafts(sequence) else why_none(sequence)
        sequence.steps.append(_decode_step(result.num_walked_tokens, shares, fallback))
        if fallback is not None:
            self.counters.count_fallback(fallback)
        self.append(sequence, 1, result, tree)

    def append(
        self, sequence: Sequence, num_computed: int, result: WalkResult, tree: VerifiedTree | None = None
    ) -> None:
        """Append the tokens of a walk and emit their event; end the sequence if it is done.

        ``num_computed``: tokens of the pass before the walk, without tree nodes after the root.
        """
        tokens = result.tokens
        offset = sequence.num_output_tokens
        sequence.tokens.extend(tokens)
        self.advance(sequence, num_computed + len(result.accepted_nodes))
        is_first = sequence.times.first_token_at is None
        if is_first:
            sequence.times.first_token_at = time.monotonic()
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_generated_tokens += len(tokens)
        prompt_logprobs = sequence.prompt_logprobs.unsent
        if tokens or prompt_logprobs:
            event = TokensEvent(
                sequence.key,
                sequence.submission.attempt,
                offset,
                tuple(tokens),
                tuple(result.sources),
                tuple(result.logprobs),
                prompt_logprobs,
                sequence.num_cached_tokens if is_first else None,
                tree,
            )
            sequence.prompt_logprobs.are_sent = True
            self.sessions.emit(event)
        if result.finish is not None:
            self._finish(sequence, result.finish, stop_token_id=result.stop_token_id)
        elif result.error is not None:
            self.fail(sequence, result.error)

    def count_overlapped_step(self, seconds: float) -> None:
        """Count a finished overlapped step. ``seconds``: since the previous one was read."""
        self.counters.num_steps += 1
        self.counters.num_overlapped_steps += 1
        for phase in ("resident", "step"):
            self.counters.add_time(phase, seconds)

    def publish(self) -> None:
        """Hand the step's events to the sessions, and the prefix cache's to their publisher."""
        self.sessions.publish()
        if self.blocks.events is not None:
            self.blocks.events.publish()

    # Ends.

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        queue_ms, prefill_ms, decode_ms = sequence.times.phases_ms(time.monotonic())
        names = tuple(drafter.name for drafter in self._speculator.drafters)
        self.sessions.emit(
            FinishedEvent(
                key=sequence.key,
                attempt=sequence.submission.attempt,
                reason=reason,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens or 0,
                num_output_tokens=sequence.num_output_tokens,
                speculation=sequence.stats(names, kept_tokens),
                stop_token_id=stop_token_id,
                queue_ms=queue_ms,
                prefill_ms=prefill_ms,
                decode_ms=decode_ms,
                batch_slot=sequence.batch_slot,
                generation=sequence.generation,
            )
        )
        self._remove(sequence)

    def fail(self, sequence: Sequence, error: ForetokenError) -> None:
        """End a sequence with an error."""
        message = error.message
        if isinstance(error, ModelOutputError):
            message = f"{self._model_name}: {message}"
            logger.error("request %s: %s", sequence.key.request_id, message)
            if sequence.table is not None:
                # Its KV entries may be NaN: no other request may reuse them.
                self.blocks.forget(sequence.table)
        self.sessions.emit(ErrorEvent(sequence.key, sequence.submission.attempt, error.code, message, error.field))
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._speculator.finish(sequence)
        self._scheduler.remove(sequence)


@lru_cache(maxsize=4096)
def _decode_step(num_emitted: int, shares: tuple[DrafterShare, ...], fallback: FallbackReason | None) -> DecodeStep:
    """Return the same object for the same figures: a sequence keeps one for each of its steps."""
    return DecodeStep(num_emitted, shares, fallback)


def _flush_cache(scheduler: Scheduler) -> int:
    """Empty the prefix cache and return how many blocks it had. Raises PreconditionError."""
    if scheduler.has_work:
        raise PreconditionError("the prefix cache is not flushed while requests run or wait")
    return scheduler.blocks.flush()


def _answer(done: Future[Answer], call: Callable[[Argument], Answer], argument: Argument) -> None:
    """Set ``done`` to the outcome of ``call(argument)``; skip the call if nobody waits for it."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(call(argument))
    except ForetokenError as error:
        done.set_exception(error)
