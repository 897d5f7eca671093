"""Run the engine: one thread that schedules, drafts, verifies and commits, step after step.

    inbox -> schedule -> forward -> sample and walk -> commit -> draft the next step -> outboxes

That is an ordinary step. On a GPU overlapped steps (overlap/) come first, as long as nothing needs
the host between two steps.

This module owns the loop. lifecycle.py owns the sequences and their events; target_step.py runs the
target and handles its results. The service changes the engine only through ``send``,
``open_session`` and ``drain``; it reads figures from any thread.
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
from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.sampling.walker import HostWalker, Walker
from verifier_svc.scheduling.batch import Scheduled
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.speculator import Speculator
from verifier_svc.target_step import TargetStep

logger = logging.getLogger(__name__)

# Between two looks at an idle engine's drafters: one that has attached needs graphs.
_LOOK_S = 0.2
# Seconds after its start, or after a drafter has attached, from which an engine counts as prepared:
# under load it has no time to capture graphs.
_PREPARES_S = 80.0


class Engine:
    """Run sequences on one target model, in a thread or by ``run_step``."""

    def __init__(
        self,
        runner: TargetRunner,
        scheduler: Scheduler,
        speculator: Speculator,
        bounds: SequenceBounds,
        *,
        walker: Walker | None = None,
        overlap_runs: OverlapRuns | None = None,
        model_name: str = "model",
    ) -> None:
        """
        Args:
            walker: samples and walks on the runner's device. None: on the CPU.
            overlap_runs: runs overlapped steps. None: a step starts only after the last one was
                read.
            model_name: the target's name in error messages.
        """
        self.scheduler = scheduler
        self.speculator = speculator
        self.counters = EngineCounters()
        self.failure: BaseException | None = None
        self.lifecycle = Lifecycle(scheduler, speculator, self.counters, bounds, model_name)
        self._target = TargetStep(runner, walker or HostWalker(), speculator, self.lifecycle)
        self._overlap_runs = overlap_runs
        self._inbox = Inbox()
        self.is_stopping = False
        # Whether the graphs of usual sizes are captured, and until when anybody waits for it.
        self._is_prepared = overlap_runs is None
        self._prepares_until = time.monotonic() + _PREPARES_S
        # Attachments of all drafters at the last look.
        self._num_attaches = 0
        self._thread: threading.Thread | None = None

    # Called by the service, from any thread.

    def open_session(self, outbox: Outbox) -> int:
        """Register a session's outbox and return the session's id."""
        return self.lifecycle.sessions.open(outbox)

    def close_session(self, session_id: int) -> None:
        """Abort the session's sequences and forget its outbox."""
        self.send(CloseSession(session_id))

    def send(self, message: InboxMessage) -> None:
        """Queue a message for the next step."""
        self._inbox.put(message)

    @property
    def queue_room(self) -> int:
        """Return how many new sequences the next step can take, as estimated before it.

        A step may take long; with this the service can refuse at once. The next step may still
        refuse a sequence that had room here.
        """
        return self._inbox.room(lambda: self.scheduler.room)

    def drain(self) -> None:
        """Refuse new sequences from now on; running ones finish."""
        self.lifecycle.is_draining = True

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_work and not self._inbox

    @property
    def is_prepared(self) -> bool:
        """Return whether the first requests meet the graphs that they need.

        Once the time for that is over, return True.
        """
        return self._is_prepared or time.monotonic() > self._prepares_until

    def start(self) -> None:
        """Start the engine thread."""
        self._prepares_until = time.monotonic() + _PREPARES_S
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current step. Drops sequences that still run."""
        self.is_stopping = True
        self._inbox.wake()
        if self._thread is not None:
            self._thread.join()

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.is_stopping:
                if self._inbox.wait(lambda: self.is_stopping or self.scheduler.has_work, self._prepare()):
                    self.run_step()
        except BaseException as error:
            # The engine's state is unknown now. The server sees the dead thread and ends the
            # process; its supervisor starts another one.
            self.failure = error
            logger.exception("the engine died")

    def _prepare(self) -> float | None:
        """Capture one more graph for overlapped steps, if nothing else is to do.

        Returns the most seconds to wait for work before the next one. None: as long as it takes.
        """
        if self._overlap_runs is None:
            return None
        if self.scheduler.has_work or self._inbox:
            return 0.0
        num_attaches = sum(drafter.num_attaches for drafter in self.speculator.drafters)
        if num_attaches > self._num_attaches:
            # Readiness may still wait for this drafter, and its first graph takes long.
            self._is_prepared, self._prepares_until = False, time.monotonic() + _PREPARES_S
        self._num_attaches = num_attaches
        has_more = self._overlap_runs.prepare(self.speculator)
        self._is_prepared = not has_more
        return 0.0 if has_more else _LOOK_S

    # One step.

    def run_step(self) -> None:
        """Handle messages, run overlapped steps or else one step, and publish the events."""
        times = StepTimes()
        with times.phase("schedule"):
            # First, because it decides which drafters take part in this step.
            self.speculator.begin_step(self.scheduler.running)
            self.handle_messages()
        if self._run_overlapped():
            return
        with times.phase("schedule"):
            scheduled = self.scheduler.schedule(self._num_nodes, self.speculator.costs.step_s, time.monotonic())
        if scheduled:
            self._run_target(scheduled, times)
        computed_s = times.elapsed_s()
        with times.phase("draft_post"):
            self._post_drafts()
        waits_for_model = self.speculator.waits_for_model
        with times.phase("draft_wait"):
            if waits_for_model:
                # Drafting takes longer than the gateway needs for these tokens, on another core.
                self.lifecycle.publish()
            self.speculator.collect()
        with times.phase("publish"):
            self.lifecycle.publish()
        if scheduled:
            self._observe(scheduled, times, times.elapsed_s() - computed_s, has_model=waits_for_model)

    def handle_messages(self) -> None:
        """Handle the messages that have come, and end overdue sequences."""
        now = time.monotonic()
        while (message := self._inbox.take()) is not None:
            self.lifecycle.handle(message, now)
        self.lifecycle.end_overdue(now)

    def _run_overlapped(self) -> bool:
        """Run overlapped steps as long as possible; count why none could run.

        Return False if an ordinary step must come instead.
        """
        if self._overlap_runs is None or not self.scheduler.has_work:
            return False
        obstacle = self._overlap_runs.run(self.scheduler, self.speculator, self.lifecycle, self)
        if obstacle is not None:
            self.counters.count_blocked_overlap(obstacle.value)
        self.lifecycle.publish()
        return obstacle is None

    def _run_target(self, scheduled: list[Scheduled], times: StepTimes) -> None:
        """Run the target on the scheduled parts, sample, and commit."""
        new = [part.sequence for part in scheduled if not part.was_decoding]
        self.speculator.send_prompts(new, self.scheduler.num_soon)
        self._target.run(scheduled, times)
        self.counters.num_steps += 1
        if all(part.was_decoding for part in scheduled):
            self.speculator.costs.observe_step(sum(part.num_rows for part in scheduled), times.elapsed_s())

    def _observe(self, scheduled: list[Scheduled], times: StepTimes, after_s: float, *, has_model: bool) -> None:
        """Learn what a step took, and count it.

        ``after_s``: its seconds after the target's pass. ``has_model``: whether it has waited for a
        drafter with a model.
        """
        costs, seconds = self.speculator.costs, times.elapsed_s()
        if all(part.was_decoding for part in scheduled):
            costs.observe_overhead(after_s, has_model=has_model)
        else:
            num_rows = sum(part.num_rows for part in scheduled if part.was_decoding)
            num_prompt_rows = sum(part.num_rows for part in scheduled) - num_rows
            self.scheduler.prefill.observe(num_prompt_rows, seconds, costs.step_s(num_rows) if num_rows else 0.0)
        self.counters.add_step(times)

    def _post_drafts(self) -> None:
        """Request the next step's trees from the drafters."""
        running = self.scheduler.running
        self.speculator.post(
            [s for s in running if s.is_decoding], [s for s in running if not s.is_decoding and s.num_computed > 0]
        )
        self._target.fetch_hidden_states(running)

    def _num_nodes(self, sequence: Sequence) -> int:
        """Return how many nodes the sequence's next step verifies, including the root."""
        draft = self.speculator.trees.of(sequence)
        return draft.tree.num_nodes if draft is not None else 1
