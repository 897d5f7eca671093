"""The engine's end of one drafter: what it was told of each sequence, what it was asked, what came back.

Whom to ask, how wide, and whether to wait is the speculator's to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from foretoken.drafting import DraftBatch, DraftRequest, ResidentStep
from foretoken.transports.transport import DraftTransport, TransportClosedError
from verifier_svc.drafters.acceptance_estimates import AcceptanceEstimates
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.device_feed import ResidentFeed, as_seats, can_feed
from verifier_svc.drafters.request import NO_DRAFT, RequestKind, Row, Shape, request_of
from verifier_svc.drafters.source import DraftSource, State
from verifier_svc.drafters.waits import DraftTimes, WaitBudget
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.hidden_states import FeatureRows, columns_of
from verifier_svc.scheduling.sequence import Sequence, Told
from verifier_svc.speculation.gate import PRIOR_ACCEPTANCE, PRIOR_TRIALS

# A model that is told of more new tokens than this has first to write their entries, and nobody waits for that: rows
# decode plainly until it has.
CATCH_UP_TOKENS = 48
# Draft timeouts that catching up may take before it counts as one.
CATCH_UP_TIMEOUTS = 10
# What a step's outcome weighs in the acceptance that a new row is believed to have.
ACCEPTANCE_MEMORY = 0.99


class Posted(NamedTuple):
    """A request that is on its way."""

    step_id: int
    rows: list[Row]
    is_resident: bool = False

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


class _Tenure(NamedTuple):
    """A source that a name stands for, and what those before it counted."""

    source: DraftSource
    num_attaches_before: int = 0
    num_rejected_before: int = 0

    @property
    def num_attaches(self) -> int:
        return self.num_attaches_before + self.source.num_attaches

    @property
    def num_rejected(self) -> int:
        return self.num_rejected_before + self.source.num_rejected


class DraftLink:
    """One drafter by its name, whatever source it has. Used by the engine thread alone; figures may be read by any."""

    def __init__(
        self,
        source: DraftSource,
        number: int,
        *,
        epoch: int,
        vocab_size: int,
        block_size: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``number``: index + 1 of the drafter, which stands in the sources of its nodes."""
        self.name = source.name
        self.number = number
        self.counters = DrafterCounters()
        # Taken away by the operator.
        self.is_detached = False
        self._tenure = _Tenure(source)
        self._epoch = epoch
        self._vocab_size = vocab_size
        self.block_size = block_size
        self._timeout_s = timeout_s
        self._late_reason = f"no sound draft within {timeout_s * 1e3:.0f} ms"
        self._clock = clock
        self._step_id = 0
        self._feed: ResidentFeed | None = None
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of the source, and nothing is under way."""
        self.estimates = AcceptanceEstimates()
        self.times = DraftTimes()
        self._patience = WaitBudget(self._timeout_s)
        # Of the attachment that it has met kinds of requests of.
        self._patient_with = self.num_attaches
        self._posted: Posted | None = None
        # A request of the step before that nobody waited for.
        self._scout: Posted | None = None
        # Rows of ended sequences: told in the next request, forgotten in the one after.
        self._last_words: list[Row] = []
        self._last_words_to = 0
        self._to_release: list[int] = []
        # The last step whose results were in device memory: of which attachment, and its number.
        self._last_resident = (0, 0)
        # Since when the drafter works on a request that takes it long, until it has answered it.
        self._catching_up_since: float | None = None
        self._accepted, self._trials = PRIOR_TRIALS * PRIOR_ACCEPTANCE, PRIOR_TRIALS

    @property
    def patience(self) -> WaitBudget:
        """With the drafter as it is attached now: a new attachment has captured nothing yet."""
        if self._patient_with != self.num_attaches:
            self._patient_with = self.num_attaches
            self._patience.forget_kinds()
        return self._patience

    @property
    def acceptance(self) -> float:
        """Chance that a drafted token is accepted given that its parent was, over all rows of late."""
        return self._accepted / self._trials

    def observe_acceptance(self, num_accepted: int, depth: int) -> None:
        """Learn from a tree of this drafter alone, ``depth`` edges deep."""
        self._accepted = self._accepted * ACCEPTANCE_MEMORY + num_accepted
        self._trials = self._trials * ACCEPTANCE_MEMORY + min(num_accepted + 1, depth)

    def is_catching_up(self) -> bool:
        """Whether the drafter still works on a long request: what is asked of it now would be waited for too long."""
        transport = self.source.transport
        if self._catching_up_since is None or transport is None:
            return False
        try:
            is_idle = transport.is_idle()
        except TransportClosedError as error:
            self.source.report_failure(str(error))
            return True
        now = self._clock()
        if is_idle:
            self._catching_up_since = None
        elif now - self._catching_up_since > CATCH_UP_TIMEOUTS * self._timeout_s:
            self._catching_up_since = now
            self.source.report_failure(self._late_reason)
        return not is_idle

    def has_answered(self) -> bool:
        """Whether it has answered all that it was sent: until then it may still read what it was told of."""
        transport = self.source.transport
        try:
            return transport is not None and transport.is_idle()
        except TransportClosedError as error:
            self.source.report_failure(str(error))
            return False

    def leave_alone(self) -> None:
        """A model that is late may be capturing graphs of a batch that it has not met: it is asked again once it has
        answered."""
        if self.has_model and self._catching_up_since is None:
            self._catching_up_since = self._clock()

    def detach(self) -> None:
        """The source is of no more use: what was asked of it is dropped. Closing it is the caller's."""
        self.is_detached = True
        self._begin()

    def replace_source(self, source: DraftSource) -> None:
        """Go on with another source in place of the detached one: number and counters stay, the rest begins anew."""
        self._tenure = _Tenure(source, self._tenure.num_attaches, self._tenure.num_rejected)
        self.is_detached = False

    @property
    def source(self) -> DraftSource:
        return self._tenure.source

    @property
    def state(self) -> State:
        return "detached" if self.is_detached else self.source.state

    @property
    def reason(self) -> str:
        """Why there is no attachment; empty while there is one, and once it was taken away."""
        return "" if self.is_detached else self.source.reason

    @property
    def num_attaches(self) -> int:
        """Of all its sources: a new attachment knows nothing of any sequence."""
        return self._tenure.num_attaches

    @property
    def num_rejected(self) -> int:
        """Drafts that were of no use, by its own judgement and by that of all its sources."""
        return self.counters.num_rejected_drafts + self._tenure.num_rejected

    @property
    def gauges(self) -> Mapping[str, float]:
        return {} if self.is_detached else self.source.gauges

    @property
    def is_attached(self) -> bool:
        return not self.is_detached and self.source.transport is not None

    @property
    def has_model(self) -> bool:
        """Whether it computes its drafts with a model and keeps keys and values for that: it takes milliseconds."""
        return self.source.needs.blocks

    @property
    def _captures_graphs(self) -> bool:
        """Whether the first request of a kind may take it long."""
        return self.has_model and bool(self.source.needs.device)

    @property
    def has_resident(self) -> bool:
        """Whether it can be told of steps by device memory."""
        transport = self.source.transport
        return transport is not None and transport.resident is not None

    @property
    def resident_number(self) -> int:
        """Of the last step that it was told of by device memory, as it is attached now: numbers only grow."""
        num_attaches, number = self._last_resident
        return number if num_attaches == self.num_attaches else 0

    @property
    def has_last_words(self) -> bool:
        return bool(self._last_words)

    @property
    def features(self) -> tuple[int, ...]:
        """Hidden states of the target that requests carry now."""
        return self.source.needs.features if self.is_attached else ()

    def told_length(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the drafter was told of, as it is attached now."""
        told = sequence.told.get(self.name)
        return told.length if told is not None and told.num_attaches == self.num_attaches else 0

    def can_tell(self, sequence: Sequence) -> int:
        """Committed tokens that the drafter can be told of now: it may have to wait for blocks or features."""
        length = len(sequence.tokens)
        needs = self.source.needs
        if needs.blocks:
            length = min(length, len(sequence.block_ids) * self.block_size)
        if needs.features:
            length = min(length, sequence.num_computed + 1)
        return length

    def row(self, sequence: Sequence, shape: Shape, *, awaited: bool, captured: tuple[int, ...]) -> Row | None:
        """What there is to say of a sequence; None if there is nothing. ``captured``: what its feature rows hold."""
        told, length = self.told_length(sequence), self.can_tell(sequence)
        if told > length or (told == length and shape.nodes == 1):
            return None
        # A root that cannot be told yet cannot be drafted for.
        if length < len(sequence.tokens) or length == told or self._takes_long(length - told):
            shape, awaited = NO_DRAFT, False
        return Row(
            sequence,
            sequence.slot,
            sequence.generation,
            length,
            sequence.tokens[told:length],
            self._hidden(sequence, told, length, captured),
            self._blocks(sequence, told, length),
            sequence.prediction_ids if told == 0 else (),
            shape,
            awaited,
        )

    def _takes_long(self, num_tokens: int) -> bool:
        return self.has_model and num_tokens > CATCH_UP_TOKENS

    def _hidden(self, sequence: Sequence, told: int, length: int, captured: tuple[int, ...]) -> list[FeatureRows]:
        wanted = self.source.needs.features
        # One that attached in the middle of a step is told without what that step did not capture.
        if not wanted or not set(wanted).issubset(captured):
            return []
        parts = sequence.features.rows(max(told - 1, 0), length - 1)
        if not parts:
            return []
        columns = columns_of(wanted, captured, parts[0].source.width // len(captured))
        return parts if columns is None else [replace(part, columns=columns) for part in parts]

    def _blocks(self, sequence: Sequence, told: int, length: int) -> list[int]:
        if not self.source.needs.blocks or told == length:
            return []
        return sequence.block_ids[told // self.block_size : (length - 1) // self.block_size + 1]

    def finish(self, sequence: Sequence, captured: tuple[int, ...]) -> None:
        """A sequence is about to give its slot back: its last tokens ride in the next request, to be learnt."""
        if self.told_length(sequence) == 0:
            return
        row = self.row(sequence, NO_DRAFT, awaited=False, captured=captured)
        if row is None:
            length = len(sequence.tokens)
            row = Row(sequence, sequence.slot, sequence.generation, length, [], [], [], (), NO_DRAFT, False)
        self._last_words.append(row)
        self._last_words_to = self.num_attaches

    def fetch_last_words(self) -> None:
        """Have on the host what they still have on the device: the next pass writes there."""
        for row in self._last_words:
            for part in row.hidden:
                part.values()

    def post(self, rows: list[Row], *, may_feed: bool = False) -> None:
        """Send rows behind the last tokens of the sequences that ended since, one of whose slots they may have.

        ``may_feed``: by device memory, if there is one and it can take them, and a tree is waited for.
        """
        last_words, self._last_words = self._last_words, []
        # A drafter that attached anew knows nothing of what it was told before, and has nothing to forget.
        if self._last_words_to != self.num_attaches:
            last_words = []
        owned = {row.slot for row in rows}
        # Of a sequence that ended within a run in device memory all is known. A row of it without words would let the
        # drafter write entries that it still had to, into blocks that the run may have given to others.
        rows = [row for row in last_words if row.new_tokens] + rows
        transport = self.source.transport
        if transport is None:
            return
        # Slots are forgotten one request after their last tokens were told, and before a new owner's first; a new
        # owner in the same request makes the drafter forget by its generation.
        told = [row.slot for row in last_words if row.slot not in owned]
        if not rows:
            self._to_release += told
            return
        gone, self._to_release = self._to_release, told
        self._step_id += 1
        try:
            # A drafter that has answered everything reads nothing in the memory.
            is_fed = (
                may_feed
                and transport.resident is not None
                and any(row.awaited for row in rows)
                and can_feed(rows, transport.resident.layout)
                and transport.is_idle()
            )
            if gone:
                transport.release(gone)
            request = self._fed(transport, rows) if is_fed else request_of(self._epoch, self._step_id, rows)
            transport.post(request)
        except TransportClosedError as error:
            self.source.report_failure(str(error))
            return
        for row in rows:
            row.sequence.told[self.name] = Told(self.num_attaches, row.length)
        if self._catching_up_since is None and any(self._takes_long(len(row.new_tokens)) for row in rows):
            self._catching_up_since = self._clock()
        self._posted = Posted(self._step_id, rows, is_resident=is_fed)

    def _fed(self, transport: DraftTransport, rows: list[Row]) -> DraftRequest:
        """What the rows have to say goes to device memory; the request that says so, a run of one step."""
        memory, number = transport.resident, self.resident_number + 1
        assert memory is not None
        if self._feed is None or (self._feed.layout, self._feed.device) != (memory.layout, memory.stamp.device):
            self._feed = ResidentFeed(memory.layout, memory.stamp.device)
        self._feed.place(rows, memory, number)
        transport.order.signal_step(number)
        self._last_resident = (self.num_attaches, number)
        request = request_of(self._epoch, self._step_id, as_seats(rows, self.block_size))
        return replace(request, resident=ResidentStep(number, begins=True, is_last=True))

    def post_resident(self, rows: list[Row], step: ResidentStep) -> None:
        """Ask for the trees behind a step whose results are in device memory. ``rows`` tell of blocks alone.

        If it ``is_last`` the step has been read, and ``collect`` has the trees of sequences that still run.
        """
        transport = self.source.transport
        if transport is None:
            return
        self._step_id += 1
        self._last_resident = (self.num_attaches, step.number)
        try:
            transport.post(replace(request_of(self._epoch, self._step_id, rows), resident=step))
        except TransportClosedError as error:
            self.source.report_failure(str(error))
            return
        if step.is_last:
            self._posted = Posted(
                self._step_id,
                [
                    row._replace(shape=NO_DRAFT)
                    if row.has_ended
                    else row._replace(new_tokens=row.sequence.tokens[-1:], awaited=row.shape.nodes > 1)
                    for row in rows
                ],
                is_resident=True,
            )

    def tell_resident(self, sequence: Sequence, length: int, num_attaches: int) -> None:
        """That attachment finds the tokens up to ``length`` in device memory, before any later request."""
        sequence.told[self.name] = Told(num_attaches, length)

    @property
    def is_awaited(self) -> bool:
        """Whether ``collect`` will wait."""
        return self._posted is not None and self._posted.is_awaited

    def collect(self, worth_s: Callable[[Posted], float]) -> list[tuple[Row, Draft]]:
        """Wait for what was asked for in earnest: the sound drafts of rows that wanted one, roots alone included.

        ``worth_s``: seconds that a request's drafts would save, were all accepted.
        """
        posted, self._posted = self._posted, None
        if posted is None:
            return []
        if not posted.is_awaited:
            self._scout = posted
            return []
        batch = self._receive(posted, worth_s(posted))
        return [] if batch is None else self._accept(posted, batch)

    def read_scout(self) -> None:
        """See what a request that nobody waited for had to say: too late for a tree, in time for the gates."""
        posted, self._scout = self._scout, None
        transport = self.source.transport
        if posted is None or transport is None or all(row.shape.nodes == 1 for row in posted.rows):
            return
        try:
            batch = transport.receive(0.0)
        except TransportClosedError as error:
            self.source.report_failure(str(error))
            return
        if batch is None:
            if self.patience.times_out_again(self._clock()):
                self.source.report_failure(self._late_reason)
            return
        self.patience.answer()
        if batch.num_rows != len(posted.rows):
            return
        for index, row in enumerate(posted.rows):
            if row.shape.nodes > 1:
                found = batch.tree(index).num_nodes > 1
                gate = row.sequence.gate if self.has_model else row.sequence.quick_gate
                gate.observe_find() if found else gate.observe_miss()

    def _receive(self, posted: Posted, worth_s: float) -> DraftBatch | None:
        transport = self.source.transport
        if transport is None:
            return None
        began = self._clock()
        try:
            batch = transport.receive(self._timeout_s)
        except TransportClosedError as error:
            self.source.report_failure(str(error))
            return None
        now = self._clock()
        is_first = self._captures_graphs and self.patience.is_new(
            RequestKind.of(posted.rows, is_resident=posted.is_resident)
        )
        self.patience.observe(now - began, worth_s, is_first=is_first, is_answered=batch is not None)
        self.counters.num_awaited += 1
        self.counters.wait_seconds += now - began
        if batch is None:
            self.patience.time_out(now)
            self.leave_alone()
            self.source.report_failure(self._late_reason)
        else:
            if not is_first:
                self.times.observe(posted.depth, posted.num_drafted, now - began)
            self.patience.answer()
        return batch

    def _accept(self, posted: Posted, batch: DraftBatch) -> list[tuple[Row, Draft]]:
        """The sound trees of a reply. A stale, short or malformed one is dropped and counted."""
        if (batch.epoch, batch.step_id) != (self._epoch, posted.step_id) or batch.num_rows != len(posted.rows):
            self._reject("a draft with another step's stamp or number of rows")
            return []
        drafts: list[tuple[Row, Draft]] = []
        for index, row in enumerate(posted.rows):
            if row.shape.nodes == 1:
                continue
            tree, scores = batch.tree(index), batch.row_scores(index).tolist()
            if not tree.is_valid(row.root, self._vocab_size, row.shape.nodes) or any(map(math.isnan, scores)):
                self._reject("a malformed draft tree")
                return drafts
            sources = [0] + [self.number] * (len(scores) - 1)
            drafts.append((row, Draft(tree, sources, scores, self.estimates.chances(scores))))
        self.source.report_success()
        return drafts

    def _reject(self, reason: str) -> None:
        self.counters.num_rejected_drafts += 1
        self.source.report_failure(reason)
