"""The engine: one thread that schedules, drafts, verifies and commits, step after step.

    inbox -> schedule -> forward -> sample and walk -> commit -> draft the next step -> outboxes

It owns every sequence, the cache and the decision of what is committed. The rim talks to it only through ``submit``,
``open_session``, ``close_session`` and the outboxes; it knows no protobuf and no asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from foretoken.errors import DeadlineError, ForetokenError, PreconditionError, QueueFullError, UnavailableError
from foretoken.results import FinishReason
from foretoken.tree import DraftTree
from verifier_svc.drafters.changes import AttachDrafter, DetachDrafter
from verifier_svc.engine_counters import EngineCounters
from verifier_svc.inbox import Inbox, InboxMessage
from verifier_svc.messages import (
    Abort,
    CloseSession,
    ErrorEvent,
    FinishedEvent,
    SequenceKey,
    Submit,
    TokensEvent,
)
from verifier_svc.model.target_runner import TargetRunner
from verifier_svc.outbox import Outbox
from verifier_svc.overlap import RunAhead
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.sampling.walker import HostWalker, Walk, Walker
from verifier_svc.scheduling.batch import Scheduled, StepBatch, build_batch, commit_slots
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.hidden_states import FeatureRows, PassRows
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import NO_SLOT, DecodeStep, Sequence
from verifier_svc.sessions import Sessions
from verifier_svc.speculation.speculator import Speculator

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Argument = TypeVar("Argument")


class Engine:
    """Runs sequences on one target model. ``start`` makes the thread; ``run_step`` is the same step without one."""

    def __init__(
        self,
        runner: TargetRunner,
        blocks: BlockManager,
        scheduler: Scheduler,
        speculator: Speculator,
        *,
        max_model_len: int,
        eos_ids: frozenset[int],
        token_limit: int,
        walker: Walker | None = None,
        run_ahead: RunAhead | None = None,
    ) -> None:
        """``token_limit``: ids from here on are padding of the output head and never sampled.

        ``walker``: goes with the runner's device; None: on the host. ``run_ahead``: for a runner on a GPU.
        """
        self._runner = runner
        self._run_ahead = run_ahead
        self._walker: Walker = walker or HostWalker()
        self._blocks = blocks
        self._scheduler = scheduler
        self._speculator = speculator
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._token_limit = token_limit
        self._inbox = Inbox()
        self._sessions = Sessions()
        self._sequences: dict[SequenceKey, Sequence] = {}
        # Hidden states of the target that this step captures.
        self._captured: tuple[int, ...] = ()
        # Those of its rows that drafters are to be told.
        self._kept: PassRows | None = None
        self._stopping = False
        self._draining = False
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.counters = EngineCounters()

    # The rim's side: any thread.

    def open_session(self, outbox: Outbox) -> int:
        """Register where a session's events go; returns its id."""
        return self._sessions.open(outbox)

    def close_session(self, session_id: int) -> None:
        """Abort what the session runs and forget its outbox."""
        self.send(CloseSession(session_id))

    def send(self, message: InboxMessage) -> None:
        """Queue a message for the next step."""
        self._inbox.put(message)

    @property
    def queue_room(self) -> int:
        """How many new sequences the next step will take, as far as can be known before it.

        Steps may take long; with this, refusals need not wait for one. Where there is room, the step has the last word.
        """
        return self._inbox.room(lambda: self._scheduler.room)

    def drain(self) -> None:
        """Refuse new sequences from now on; running ones finish."""
        self._draining = True

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.has_work and not self._inbox

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def blocks(self) -> BlockManager:
        return self._blocks

    @property
    def speculator(self) -> Speculator:
        return self._speculator

    def start(self) -> None:
        """Start the engine thread."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step that runs; sequences that still run are dropped."""
        self._stopping = True
        self._inbox.wake()
        if self._thread is not None:
            self._thread.join()

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._inbox.wait(lambda: self._stopping or self._scheduler.has_work)
                if self._stopping:
                    return
                self.run_step()
        except BaseException as error:
            # The engine's state is unknown from here on. The server sees the dead thread and ends the process, and
            # whoever supervises it starts another.
            self.failure = error
            logger.exception("the engine died")

    # One step.

    def run_step(self) -> None:
        """Take in messages, run one step if there is work, hand out its events."""
        began = time.perf_counter()
        now = time.monotonic()
        self._captured = self._speculator.capture(self._scheduler.running)
        self._take_inbox(now)
        self._end_overdue(now)
        scheduled = self._scheduler.schedule(self._num_nodes, now)
        scheduled_at = time.perf_counter()
        if scheduled:
            new = [part.sequence for part in scheduled if not part.was_decoding]
            self._speculator.tell(new, self._scheduler.num_soon)
            self._run_scheduled(scheduled)
            self.counters.num_steps += 1
        ended_at = time.perf_counter()
        if scheduled and all(part.was_decoding for part in scheduled):
            self._speculator.costs.observe_step(sum(part.num_rows for part in scheduled), ended_at - began)
        running = self._scheduler.running
        self._speculator.post(
            [s for s in running if s.is_decoding], [s for s in running if not s.is_decoding and s.num_computed > 0]
        )
        self._fetch_features()
        posted_at = time.perf_counter()
        waits_for_model = self._speculator.waits_for_model
        if waits_for_model:
            # A model drafts for longer than the gateway works on the last tokens, on another core than this one.
            self._sessions.publish()
        self._speculator.collect()
        collected_at = time.perf_counter()
        self._sessions.publish()
        if scheduled:
            published_at = time.perf_counter()
            if all(part.was_decoding for part in scheduled):
                self._speculator.costs.observe_overhead(published_at - ended_at, has_model=waits_for_model)
            for phase, seconds in (
                ("schedule", scheduled_at - began),
                ("draft_post", posted_at - ended_at),
                ("draft_wait", collected_at - posted_at),
                ("publish", published_at - collected_at),
                ("step", published_at - began),
            ):
                self.counters.add_time(phase, seconds)
            if self._run_ahead is not None:
                self._run_ahead.run(self._scheduler, self._speculator, self, self._is_undisturbed)

    def _is_undisturbed(self) -> bool:
        """Whether nobody wants anything of the engine but tokens."""
        now = time.monotonic()
        return not (
            self._stopping
            or self._inbox
            or any(s.deadline is not None and s.deadline <= now for s in self._sequences.values())
        )

    def _num_nodes(self, sequence: Sequence) -> int:
        """Nodes of the tree that is there for a sequence's next step, the root counted."""
        draft = self._speculator.draft_of(sequence)
        return draft.tree.num_nodes if draft is not None else 1

    def _run_scheduled(self, scheduled: list[Scheduled]) -> None:
        for part in scheduled:
            part.has_features = self._speculator.wants_features(part.sequence)
            if part.was_decoding:
                draft = self._speculator.draft_of(part.sequence)
                if draft is not None and draft.tree.num_nodes <= part.max_nodes:
                    part.draft = draft
            elif part.sequence.num_computed != part.sequence.features.end:
                # The token after a prefix hit is drafted from hidden states of the prefix's end, which nobody has.
                part.num_rerun = self._speculator.num_rerun(part.sequence)
        began = time.perf_counter()
        blocks = self._blocks
        batch = build_batch(scheduled, blocks.block_size, blocks.num_blocks * blocks.block_size)
        # Rows whose drafters want no hidden states, or that have none, do not pay for them.
        captured = self._captured if any(part.has_features for part in scheduled) else ()
        logits = self._runner.forward(batch.forward, captured)
        forward_at = time.perf_counter()
        self._verify(scheduled, batch, logits)
        self.counters.add_time("forward", forward_at - began)
        self.counters.add_time("verify", time.perf_counter() - forward_at)

    def _verify(self, scheduled: list[Scheduled], batch: StepBatch, logits: torch.Tensor) -> None:
        """Sample and walk each sequence's rows, then commit."""
        walks: list[Walk] = []
        for index, part in enumerate(scheduled):
            sequence, first_row = part.sequence, batch.logit_starts[index]
            if sequence.wants_prompt_logprobs and sequence.num_computed < sequence.num_prompt_tokens:
                first_row = self._take_prompt_logprobs(part, logits, first_row)
            if part.samples:
                tree = part.tree or DraftTree.root_only(sequence.tokens[-1])
                walks.append(Walk(sequence, tree, first_row, part.draft.sources if part.draft is not None else None))
        walked = iter(self._walker.walk(walks, logits))
        results = [next(walked) if part.samples else None for part in scheduled]
        self._keep_features(scheduled, batch, results)
        source_slots: list[int] = []
        target_slots: list[int] = []
        for part, result in zip(scheduled, results, strict=True):
            if result is None:
                self._advance(part.sequence, part.num_tokens)
                continue
            moved = commit_slots(part.sequence, result.accepted_nodes, self._blocks.block_size)
            source_slots.extend(moved[0])
            target_slots.extend(moved[1])
            self._commit(part, result)
        if source_slots:
            self._runner.commit(np.array(source_slots, np.int32), np.array(target_slots, np.int32))

    def _take_prompt_logprobs(self, part: Scheduled, logits: torch.Tensor, first_row: int) -> int:
        """Store the prompt logprobs of a chunk; returns the first of the rows that are left for sampling."""
        sequence = part.sequence
        first = sequence.num_computed
        known = min(part.num_tokens, sequence.num_prompt_tokens - 1 - first)
        wanted = sequence.sampling.prompt_logprobs
        assert wanted is not None
        if known > 0:
            following = sequence.tokens[first + 1 : first + 1 + known]
            rows = logits[first_row : first_row + known]
            sequence.prompt_logprobs.extend(self._walker.logprobs(rows, following, wanted))
        return first_row + part.num_tokens - 1

    def _keep_features(self, scheduled: list[Scheduled], batch: StepBatch, results: list[WalkResult | None]) -> None:
        """Keep the hidden rows of what was computed, accepted nodes included, for the drafters to be told."""
        kept: list[tuple[Scheduled, int]] = []
        rows: list[int] = []
        for part, row_start, result in zip(scheduled, batch.row_starts, results, strict=True):
            if part.has_features:
                end = row_start + part.num_rerun + part.num_tokens
                # Nodes come behind the tokens, of which the root is the last one.
                nodes = [end - 1 + node for node in result.accepted_nodes] if result is not None else []
                kept.append((part, len(rows)))
                rows += [*range(row_start, end), *nodes]
        if not kept:
            return
        self._kept = PassRows(rows, self._runner.features, self._runner.feature_rows)
        ends = [first for _, first in kept[1:]] + [len(rows)]
        for (part, first), end in zip(kept, ends, strict=True):
            found = FeatureRows(self._kept, first, end)
            part.sequence.features.append(part.sequence.num_computed - part.num_rerun, found)

    def _fetch_features(self) -> None:
        """The next pass writes where this one's hidden rows are."""
        if self._kept is None:
            return
        self._speculator.fetch_features(self._scheduler.running)
        self._kept.retire()
        self._kept = None

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens as computed, and let others share the blocks that are full of them."""
        sequence.num_computed += num_tokens
        assert sequence.table is not None
        self._blocks.hash_full_blocks(sequence.table, sequence.tokens, sequence.num_computed)

    def _commit(self, part: Scheduled, result: WalkResult) -> None:
        if not part.was_decoding:
            self._append(part.sequence, part.num_tokens, result)
            return
        shares: tuple[DrafterShare, ...] = ()
        if part.draft is not None:
            shares = part.draft.shares(result.matched_nodes)
            self._speculator.observe(part.sequence, part.draft, result.matched_nodes, shares)
        self.commit_decode(part.sequence, result, shares)

    def commit_decode(self, sequence: Sequence, result: WalkResult, shares: tuple[DrafterShare, ...]) -> None:
        """Append what a decode step's walk emitted; end the sequence if it is done.

        ``shares``: of the drafters in the tree that was walked; empty if there was none.
        """
        wanted = self._speculator.wants_drafts(sequence)
        sequence.steps.append(DecodeStep(result.num_walked_tokens, shares, wanted))
        self.counters.num_fallback_steps += wanted and not shares
        self._append(sequence, 1, result)

    def end_step(self, num_rows: int, seconds: float, *, is_plain: bool) -> None:
        """A step that ran ahead of this thread is over, so long after the one before."""
        self.counters.num_steps += 1
        self.counters.num_resident_steps += 1
        for phase in ("resident", "step"):
            self.counters.add_time(phase, seconds)
        if is_plain:
            self._speculator.observe_plain_step(num_rows, seconds)
        self._sessions.publish()

    def _append(self, sequence: Sequence, num_computed: int, result: WalkResult) -> None:
        """Append what a walk emitted behind a pass over ``num_computed`` tokens; end the sequence if it is done."""
        offset = sequence.num_output_tokens
        sequence.tokens.extend(result.tokens)
        self._advance(sequence, num_computed + len(result.accepted_nodes))
        is_first = sequence.first_token_at is None
        if is_first:
            sequence.first_token_at = time.monotonic()
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_generated_tokens += len(result.tokens)
        prompt_logprobs = () if sequence.prompt_logprobs_sent else tuple(sequence.prompt_logprobs)
        if result.tokens or prompt_logprobs:
            event = TokensEvent(
                sequence.key,
                sequence.attempt,
                offset,
                tuple(result.tokens),
                tuple(result.sources),
                tuple(result.logprobs),
                prompt_logprobs,
                sequence.num_cached_tokens if is_first else None,
            )
            sequence.prompt_logprobs_sent = True
            self._sessions.emit(event)
        if result.finish is not None:
            self._finish(sequence, result.finish, stop_token_id=result.stop_token_id)
        elif result.error is not None:
            self._fail(sequence, result.error)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        now = time.monotonic()
        started = sequence.started_at if sequence.started_at is not None else now
        first_token = sequence.first_token_at if sequence.first_token_at is not None else now
        names = tuple(link.name for link in self._speculator.links)
        self._sessions.emit(
            FinishedEvent(
                key=sequence.key,
                attempt=sequence.attempt,
                reason=reason,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens or 0,
                num_output_tokens=sequence.num_output_tokens,
                speculation=sequence.stats(names, kept_tokens),
                stop_token_id=stop_token_id,
                queue_ms=(started - sequence.arrived_at) * 1e3,
                prefill_ms=(first_token - started) * 1e3,
                decode_ms=(now - first_token) * 1e3,
            )
        )
        self._remove(sequence)

    def _fail(self, sequence: Sequence, error: ForetokenError) -> None:
        self._sessions.emit(ErrorEvent(sequence.key, sequence.attempt, error.code, error.message, error.field))
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        if sequence.slot != NO_SLOT:
            self._speculator.finish(sequence)
        self._scheduler.remove(sequence)

    # Messages.

    def _take_inbox(self, now: float) -> None:
        while (message := self._inbox.take()) is not None:
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

    def _submit(self, message: Submit, now: float) -> None:
        error: ForetokenError | None = None
        if message.key in self._sequences:
            error = PreconditionError("a sequence of this request id and choice is running", field="request_id")
        elif self._draining:
            error = UnavailableError("the verifier is draining")
        elif self._scheduler.is_full and not message.attempt:
            # A resumed sequence was admitted once: its client has been promised the rest.
            error = QueueFullError("the queue is full")
        elif len(message.output_ids) >= message.sampling.max_tokens:
            error = PreconditionError("the output emitted so far is complete", field="output_token_ids")
        if error is not None:
            self._sessions.emit(ErrorEvent(message.key, message.attempt, error.code, error.message, error.field))
            return
        sequence = Sequence(
            message, max_model_len=self._max_model_len, eos_ids=self._eos_ids, token_limit=self._token_limit, now=now
        )
        self._sequences[message.key] = sequence
        self._scheduler.add(sequence)

    def _close(self, session_id: int) -> None:
        for sequence in [s for s in self._sequences.values() if s.key.session_id == session_id]:
            self._remove(sequence)
        self._sessions.close(session_id)

    def _end_overdue(self, now: float) -> None:
        for sequence in [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]:
            self._fail(sequence, DeadlineError("the request's deadline has passed"))


def _answer(done: Future[Answer], call: Callable[[Argument], Answer], argument: Argument) -> None:
    """Make a call of the rim's, unless nobody waits for it any more."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(call(argument))
    except ForetokenError as error:
        done.set_exception(error)
