"""One attachment of a drafter: everything that is true only while that drafter stays attached.

When the drafter attaches again, a new attachment takes its place, and nothing has been sent over
that one. The speculator decides whom to ask, for how much, and whether to wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from foretoken.drafting import DeviceStep, DraftBatch, DrafterNeeds, DraftRequest
from foretoken.transports.transport import DraftTransport, TransportClosedError
from verifier_svc.drafters.acceptance_estimates import bounded
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.deadline import Deadline
from verifier_svc.drafters.device_feed import DeviceFeed, as_batch_rows, can_feed
from verifier_svc.drafters.final_updates import FinalUpdates
from verifier_svc.drafters.request import DraftRow, RequestKind, request_of
from verifier_svc.drafters.sent_tokens import SentTokens
from verifier_svc.drafters.source_record import SourceRecord
from verifier_svc.drafters.waits import FirstWaits
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence

# Draft timeouts that catching up may take before it counts as one.
CATCH_UP_TIMEOUTS = 10


class AttachmentSettings(NamedTuple):
    """What all attachments of one engine share.

    Attributes:
        epoch: the verifier's.
        timeout_s: the shortest deadline of a draft.
        clock: seconds, by which waits are measured.
    """

    epoch: int
    vocab_size: int
    block_size: int
    timeout_s: float
    clock: Callable[[], float] = time.perf_counter

    @property
    def late_reason(self) -> str:
        return f"no sound draft within {self.timeout_s * 1e3:.0f} ms"


class Posted(NamedTuple):
    """A request that is on its way."""

    step_id: int
    rows: list[DraftRow]
    in_device_memory: bool = False

    @property
    def is_awaited(self) -> bool:
        return any(row.awaited for row in self.rows)

    @property
    def num_drafted(self) -> int:
        """Rows that want a tree."""
        return sum(row.shape.nodes > 1 for row in self.rows)

    @property
    def depth(self) -> int:
        return max(row.shape.depth for row in self.rows)


class LateDraft(NamedTuple):
    """A draft that missed its deadline, by its depth and rows, and when it was asked for."""

    depth: int
    num_rows: int
    since: float


class Attachment:
    """Send requests to one attached drafter, and read its trees. Only the engine thread uses it.

    Args:
        number: the drafter's, which its nodes name as their source.
        record: of the source; it outlives the attachment, as do the counters.
    """

    def __init__(
        self,
        transport: DraftTransport,
        number: int,
        record: SourceRecord,
        counters: DrafterCounters,
        settings: AttachmentSettings,
    ) -> None:
        self.transport = transport
        self.needs: DrafterNeeds = record.source.needs
        self.sent = SentTokens(self.needs, settings.block_size)
        self.final_updates = FinalUpdates()
        # The last step whose results the drafter found in device memory. Numbers only grow.
        self.device_step_number = 0
        self._number = number
        self._record = record
        self._counters = counters
        self._settings = settings
        self._first_waits = FirstWaits(record.budget)
        self._deadline = Deadline(settings.timeout_s, record.times)
        # An excused one that the drafter still works on, and when it was last seen to do so.
        self._late: LateDraft | None = None
        self._busy_at = 0.0
        self._feed: DeviceFeed | None = None
        self._step_id = 0
        self._posted: Posted | None = None
        # A request of the last step that nobody waited for.
        self._scout: Posted | None = None
        # When the drafter began to work on a long request, until it has answered that.
        self._catching_up_since: float | None = None

    @property
    def has_overlap_memory(self) -> bool:
        """Return whether the drafter can read the results of steps from device memory."""
        return self.transport.overlap_memory is not None

    @property
    def is_awaited(self) -> bool:
        """Return whether ``collect`` will wait."""
        return self._posted is not None and self._posted.is_awaited

    def can_afford_wait(self) -> bool:
        """Return whether the wait budget has something left."""
        return self._record.budget.has_some(self._settings.clock())

    def is_catching_up(self) -> bool:
        """Return whether the drafter still works on a long request.

        A new one would wait too long.
        """
        if self._catching_up_since is None:
            return False
        try:
            is_idle = self.transport.is_idle()
        except TransportClosedError as error:
            self._record.source.report_failure(str(error))
            return True
        now = self._settings.clock()
        if is_idle:
            self._catching_up_since = None
            self._learn_from_late()
            return False
        self._busy_at = now
        if now - self._catching_up_since > CATCH_UP_TIMEOUTS * self._settings.timeout_s:
            self._catching_up_since = now
            self._record.source.report_failure(self._settings.late_reason)
        return True

    def has_answered(self) -> bool:
        """Return whether the drafter has answered everything.

        Until then it may still read what it was sent.
        """
        try:
            return self.transport.is_idle()
        except TransportClosedError as error:
            self._record.source.report_failure(str(error))
            return False

    def leave_alone(self) -> None:
        """Ask a late model nothing until it has answered.

        It may be capturing graphs for a batch that is new to it.
        """
        if self.needs.blocks and self._catching_up_since is None:
            self._catching_up_since = self._settings.clock()

    def deadline_s(self, depth: int, num_rows: int) -> float:
        """Return how long to wait for drafts of ``num_rows`` rows with at most ``depth`` edges."""
        return self._deadline.seconds(depth, num_rows)

    def miss(self, depth: int, num_rows: int, since: float, *, is_first: bool = False) -> None:
        """Record that such a draft, asked for at ``since``, missed its deadline.

        A model's miss that load alone may explain is no failure: the model is asked nothing until
        it has answered, and reported if it never does. ``is_first``: the request may have captured
        graphs, so it says nothing of the cost.
        """
        now = self._settings.clock()
        self.leave_alone()
        if self.needs.blocks and (is_first or self._deadline.is_excused(depth, num_rows)):
            self._late = None if is_first else LateDraft(depth, num_rows, since)
            self._busy_at = now
            return
        self._record.budget.time_out(now)
        seconds = self.deadline_s(depth, num_rows)
        self._record.source.report_failure(f"no sound draft within {seconds * 1e3:.0f} ms")

    def _learn_from_late(self) -> None:
        """Learn what a late draft cost at least, so that the next one has time enough."""
        late, self._late = self._late, None
        if late is not None:
            self._record.times.observe(late.depth, late.num_rows, self._busy_at - late.since)

    def finish(self, sequence: Sequence, captured: tuple[int, ...]) -> None:
        """Queue the final update of a sequence that is about to give its batch slot back."""
        row = self.sent.final_row(sequence, captured)
        if row is not None:
            self.final_updates.add(row)

    def post(self, rows: list[DraftRow], *, may_feed: bool = False) -> None:
        """Send rows, after the final updates of ended sequences, whose batch slots they may have.

        ``may_feed``: go by device memory if there is some, if it can take the
        rows, and if a tree is awaited.
        """
        rows, released = self.final_updates.merge(rows)
        if not rows:
            return
        self._step_id += 1
        try:
            is_fed = may_feed and self._can_feed(rows)
            if released:
                self.transport.release(released)
            request = self._fed_request(rows) if is_fed else request_of(self._settings.epoch, self._step_id, rows)
            posted = Posted(self._step_id, rows, in_device_memory=is_fed)
            if posted.is_awaited:
                self.transport.post(request)
            else:
                self.transport.post_unawaited(request)
        except TransportClosedError as error:
            self._record.source.report_failure(str(error))
            return
        for row in rows:
            self.sent.mark(row.batch_slot, row.generation, row.length)
        if self._catching_up_since is None and any(self.sent.takes_long(len(row.new_tokens)) for row in rows):
            self._catching_up_since = self._settings.clock()
        self._posted = posted

    def _can_feed(self, rows: list[DraftRow]) -> bool:
        """Return whether device memory can take the rows. An idle drafter reads nothing there."""
        return (
            self.transport.overlap_memory is not None
            and any(row.awaited for row in rows)
            and can_feed(rows, self.transport.overlap_memory.layout)
            and self.transport.is_idle()
        )

    def _fed_request(self, rows: list[DraftRow]) -> DraftRequest:
        """Copy what the rows send to device memory.

        Return the request that says so: a run of one step.
        """
        memory = self.transport.overlap_memory
        assert memory is not None
        self.device_step_number += 1
        if self._feed is None:
            self._feed = DeviceFeed(memory.layout, memory.stamp.device)
        self._feed.place(rows, memory, self.device_step_number)
        self.transport.order.signal_step(self.device_step_number)
        request = request_of(self._settings.epoch, self._step_id, as_batch_rows(rows, self._settings.block_size))
        step = DeviceStep(self.device_step_number, begins=True, is_last=True, num_batch_rows=len(rows))
        return replace(request, device_step=step)

    def post_device_step(self, request: DraftRequest, step: DeviceStep) -> None:
        """Send a request about a step whose results are in device memory.

        Nobody waits for the answer on the host.

        ``request``: without epoch and step id.
        """
        self._step_id += 1
        self.device_step_number = step.number
        self.final_updates.forget_batch_slots(set(request.batch_slots[step.num_batch_rows :].tolist()))
        try:
            self.transport.post(replace(request, epoch=self._settings.epoch, step_id=self._step_id, device_step=step))
        except TransportClosedError as error:
            self._record.source.report_failure(str(error))

    def collect(self, worth_s: Callable[[Posted], float]) -> list[tuple[DraftRow, Draft]]:
        """Wait for the trees that are worth it.

        Return the sound ones, those that are only a root included.

        ``worth_s``: seconds that a request's drafts would save if all were accepted.
        """
        posted, self._posted = self._posted, None
        if posted is None:
            return []
        if not posted.is_awaited:
            self._scout = posted
            return []
        batch = self._wait(posted, worth_s(posted))
        return [] if batch is None else self._accept(posted, batch)

    def read_scout(self) -> list[tuple[Sequence, bool]]:
        """Read the answer to a request that nobody waited for.

        It is too late for a tree and in time for the gates.

        Returns the sequence of each row that wanted a tree, and whether the drafter had one.
        """
        posted, self._scout = self._scout, None
        if posted is None or posted.num_drafted == 0:
            return []
        source, budget = self._record.source, self._record.budget
        try:
            batch = self.transport.receive(0.0)
        except TransportClosedError as error:
            source.report_failure(str(error))
            return []
        if batch is None:
            if budget.times_out_again(self._settings.clock()):
                source.report_failure(self._settings.late_reason)
            return []
        budget.answer()
        if batch.step_id != posted.step_id or batch.num_rows != len(posted.rows):
            return []
        return [
            (row.sequence, batch.tree(index).num_nodes > 1)
            for index, row in enumerate(posted.rows)
            if row.shape.nodes > 1
        ]

    def _wait(self, posted: Posted, worth_s: float) -> DraftBatch | None:
        clock, record = self._settings.clock, self._record
        began = clock()
        try:
            batch = self.transport.receive(self.deadline_s(posted.depth, posted.num_drafted))
        except TransportClosedError as error:
            record.source.report_failure(str(error))
            return None
        now = clock()
        # On a GPU the first request of a kind may take long.
        captures_graphs = self.needs.blocks and bool(self.needs.device)
        is_first = captures_graphs and self._first_waits.is_new(
            RequestKind.of(posted.rows, in_device_memory=posted.in_device_memory)
        )
        self._first_waits.observe(now - began, worth_s, is_first=is_first, is_answered=batch is not None)
        self._counters.num_awaited += 1
        self._counters.wait_seconds += now - began
        if batch is None:
            self.miss(posted.depth, posted.num_drafted, began, is_first=is_first)
        else:
            if not is_first:
                record.times.observe(posted.depth, posted.num_drafted, now - began)
            record.budget.answer()
        return batch

    def _accept(self, posted: Posted, batch: DraftBatch) -> list[tuple[DraftRow, Draft]]:
        """Return the sound trees of a reply.

        A stale, short or malformed one is dropped and counted.
        """
        stamp = self._settings.epoch, posted.step_id
        if (batch.epoch, batch.step_id) != stamp or batch.num_rows != len(posted.rows):
            self._reject("a draft with another step's stamp or number of rows")
            return []
        roots = np.array([row.root if row.shape.nodes > 1 else 0 for row in posted.rows], np.int32)
        are_sound = batch.are_sound(roots, self._settings.vocab_size).tolist()
        starts, scores, parents = batch.node_starts.tolist(), batch.scores.tolist(), batch.parents.tolist()
        chances = self._record.estimates.of_scores(batch.scores)
        drafts: list[tuple[DraftRow, Draft]] = []
        for index, row in enumerate(posted.rows):
            if row.shape.nodes == 1:
                continue
            if not are_sound[index]:
                self._reject("a malformed draft tree")
                return drafts
            low, high = starts[index], starts[index + 1]
            sources = [0] + [self._number] * (high - low - 1)
            bounded_chances = bounded(chances[low:high], parents[low:high])
            drafts.append((row, Draft(batch.tree(index), sources, scores[low:high], bounded_chances)))
        self._record.source.report_success()
        return drafts

    def _reject(self, reason: str) -> None:
        self._counters.num_rejected_drafts += 1
        self._record.source.report_failure(reason)
