"""The engine: one thread that schedules, drafts, verifies and commits, step after step.

    inbox -> schedule -> forward -> sample and walk -> commit -> draft the next step -> outboxes

It owns the loop. lifecycle.py has the sequences and their events, target_step.py the target's pass and its results. The
service talks to the engine only through ``send``, ``open_session`` and the outboxes.
"""

from __future__ import annotations

import logging
import threading
import time

from verifier_svc.engine_counters import EngineCounters, StepTimes
from verifier_svc.inbox import Inbox, InboxMessage
from verifier_svc.lifecycle import Lifecycle, SequenceBounds
from verifier_svc.messages import CloseSession
from verifier_svc.model.target_runner import TargetRunner
from verifier_svc.outbox import Outbox
from verifier_svc.overlap import RunAhead
from verifier_svc.sampling.walker import HostWalker, Walker
from verifier_svc.scheduling.batch import Scheduled
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.speculator import Speculator
from verifier_svc.target_step import TargetStep

logger = logging.getLogger(__name__)


class Engine:
    """Runs sequences on one target model. ``start`` makes the thread; ``run_step`` is one step without it."""

    def __init__(
        self,
        runner: TargetRunner,
        scheduler: Scheduler,
        speculator: Speculator,
        bounds: SequenceBounds,
        *,
        walker: Walker | None = None,
        run_ahead: RunAhead | None = None,
        model_name: str = "model",
    ) -> None:
        """
        Args:
            walker: the one of the runner's device; None: the CPU's.
            run_ahead: steps that overlap, for a runner on a GPU.
            model_name: names the target in errors.
        """
        self.scheduler = scheduler
        self.speculator = speculator
        self.counters = EngineCounters()
        self.failure: BaseException | None = None
        self.lifecycle = Lifecycle(scheduler, speculator, self.counters, bounds, model_name)
        self._target = TargetStep(runner, walker or HostWalker(), speculator, self.lifecycle)
        self._run_ahead = run_ahead
        self._inbox = Inbox()
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    # The service's side: any thread.

    def open_session(self, outbox: Outbox) -> int:
        """Register where a session's events go; returns its id."""
        return self.lifecycle.sessions.open(outbox)

    def close_session(self, session_id: int) -> None:
        """Abort what the session runs and forget its outbox."""
        self.send(CloseSession(session_id))

    def send(self, message: InboxMessage) -> None:
        """Queue a message for the next step."""
        self._inbox.put(message)

    @property
    def queue_room(self) -> int:
        """How many new sequences the next step will take, as far as can be known before it.

        Steps may take long; with this, refusals need not wait for one. If there is room, the step still decides.
        """
        return self._inbox.room(lambda: self.scheduler.room)

    def drain(self) -> None:
        """Refuse new sequences from now on; running ones finish."""
        self.lifecycle.is_draining = True

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_work and not self._inbox

    def start(self) -> None:
        """Start the engine thread."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step that runs; sequences that still run are dropped."""
        self._is_stopping = True
        self._inbox.wake()
        if self._thread is not None:
            self._thread.join()

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._inbox.wait(lambda: self._is_stopping or self.scheduler.has_work)
                if self._is_stopping:
                    return
                self.run_step()
        except BaseException as error:
            # The engine's state is unknown from here on. The server sees the dead thread and ends the process, and
            # its supervisor starts another.
            self.failure = error
            logger.exception("the engine died")

    # One step.

    def run_step(self) -> None:
        """Take in messages, run one step if there is work, hand out its events."""
        times = StepTimes()
        with times.phase("schedule"):
            scheduled = self._schedule()
        if scheduled:
            self._run_target(scheduled, times)
        computed_s = times.elapsed_s()
        with times.phase("draft_post"):
            self._post_drafts()
        waits_for_model = self.speculator.waits_for_model
        with times.phase("draft_wait"):
            if waits_for_model:
                # A model drafts for longer than the gateway works on the last tokens, on another core than this one.
                self.lifecycle.sessions.publish()
            self.speculator.collect()
        with times.phase("publish"):
            self.lifecycle.sessions.publish()
        if not scheduled:
            return
        if all(part.was_decoding for part in scheduled):
            self.speculator.costs.observe_overhead(times.elapsed_s() - computed_s, has_model=waits_for_model)
        self.counters.add_step(times)
        if self._run_ahead is not None:
            self._run_overlapped(self._run_ahead)

    def _schedule(self) -> list[Scheduled]:
        """Take in messages, end what is overdue, and choose the parts of this step."""
        now = time.monotonic()
        # First, since it decides which drafters take part in this step.
        self._target.captured = self.speculator.capture(self.scheduler.running)
        while (message := self._inbox.take()) is not None:
            self.lifecycle.handle(message, now)
        self.lifecycle.end_overdue(now)
        return self.scheduler.schedule(self._num_nodes, now)

    def _run_target(self, scheduled: list[Scheduled], times: StepTimes) -> None:
        """Compute the scheduled parts, sample, and commit."""
        new = [part.sequence for part in scheduled if not part.was_decoding]
        self.speculator.send_prompts(new, self.scheduler.num_soon)
        self._target.run(scheduled, times)
        self.counters.num_steps += 1
        if all(part.was_decoding for part in scheduled):
            self.speculator.costs.observe_step(sum(part.num_rows for part in scheduled), times.elapsed_s())

    def _post_drafts(self) -> None:
        """Ask for the trees of the next step."""
        running = self.scheduler.running
        self.speculator.post(
            [s for s in running if s.is_decoding], [s for s in running if not s.is_decoding and s.num_computed > 0]
        )
        self._target.fetch_hidden_states(running)

    def _run_overlapped(self, run_ahead: RunAhead) -> None:
        """Make overlapped steps as long as possible, or count why there are none."""
        blocked = run_ahead.run(self.scheduler, self.speculator, self.lifecycle, self._is_undisturbed)
        if blocked is not None:
            self.counters.count_blocked_overlap(blocked.value)

    def _is_undisturbed(self) -> bool:
        """Whether nobody wants anything of the engine but tokens."""
        return not (self._is_stopping or self._inbox or self.lifecycle.is_overdue(time.monotonic()))

    def _num_nodes(self, sequence: Sequence) -> int:
        """Nodes of the tree that a sequence's next step verifies, the root included."""
        draft = self.speculator.draft_of(sequence)
        return draft.tree.num_nodes if draft is not None else 1
