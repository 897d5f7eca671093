"""The policy of speculation, all of it: which rows draft, with which drafter, how wide, and when plain decode is best.

It posts one request a step for the whole batch right after a step's tokens are known, and collects the trees before
those tokens are published: on few cores a drafter that shares them with the gateway's work on the last tokens would
answer later than one that runs alone. Whatever goes wrong with a drafter costs root-only rows and a counter, never an
error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.transport import TransportClosedError
from foretoken.tree import DraftTree, depths
from verifier_svc.draft_source import DraftSource
from verifier_svc.patience import Patience
from verifier_svc.sequence import Attachment, Sequence
from verifier_svc.step_costs import StepCosts

# Steps for which relative costs are taken as they are: they move slowly, and a step has better to do.
COSTS_HOLD_FOR = 16


@dataclass(slots=True)
class DrafterCounters:
    """What one drafter's trees came to."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    # Requests that a step waited for, and seconds of these waits.
    num_awaited: int = 0
    wait_seconds: float = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One row's verified tree."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(missing, 0))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


def attachment(source: DraftSource) -> Attachment:
    """The drafter as it is attached now: after a death it comes back as another one that knows nothing."""
    return Attachment(source.name, source.num_attaches)


class _Row(NamedTuple):
    """One row of a request, as it was when posted: its sequence may have ended or moved since."""

    sequence: Sequence
    slot: int
    generation: int
    # The drafter knows tokens [0, told) and is told those up to ``length`` now.
    told: int
    length: int
    # Nodes wanted at most, the root counted; 1: only to be learnt.
    nodes: int
    # Whether the answer is worth waiting for.
    awaited: bool


@dataclass(slots=True)
class _Posted:
    """A request that is on its way."""

    source: DraftSource
    step_id: int
    rows: list[_Row]


class Speculator:
    """Chooses each row's tree. Used by the engine thread alone."""

    def __init__(
        self,
        sources: Seq[DraftSource],
        costs: StepCosts,
        *,
        epoch: int,
        vocab_size: int,
        max_nodes: int,
        max_batch_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``max_nodes`` counts the root; ``max_batch_size`` of 0 means no limit."""
        self._sources = sources
        self._costs = costs
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._max_batch_size = max_batch_size
        self._timeout_s = timeout_s
        self._late_reason = f"no sound draft within {timeout_s * 1e3:.0f} ms"
        self._clock = clock
        self._step_id = 0
        self._posted: list[_Posted] = []
        # Requests of the step before that nobody waited for.
        self._scouts: list[_Posted] = []
        # Sound trees for the next step by slot and generation, with the drafter's index + 1.
        self._trees: dict[tuple[int, int], tuple[DraftTree, int]] = {}
        # Rows of ended sequences, by drafter: told in the next request, forgotten in the one after.
        self._last_words: dict[str, list[_Row]] = {source.name: [] for source in sources}
        self._to_release: dict[str, list[int]] = {source.name: [] for source in sources}
        self._patience = {source.name: Patience(timeout_s) for source in sources}
        self._num_posts = 0
        # By drafter and batch size: when they were counted, and relative costs by drafted tokens.
        self._cost_lists: dict[tuple[str, int], tuple[int, list[float]]] = {}
        self.counters = {source.name: DrafterCounters() for source in sources}
        self.num_plain_batch_steps = 0

    @property
    def sources(self) -> Seq[DraftSource]:
        return self._sources

    def wants_drafts(self, sequence: Sequence) -> bool:
        """Whether this request asked for speculation at all."""
        options = sequence.speculation
        return options.enabled and options.max_draft_tokens != 0 and bool(self._sources)

    def tree_of(self, sequence: Sequence) -> tuple[DraftTree | None, int]:
        """The tree to verify in the next step and its drafter's index + 1; (None, 0): the root alone."""
        return self._trees.get((sequence.slot, sequence.generation), (None, 0))

    def finish(self, sequence: Sequence) -> None:
        """A sequence is about to give its slot back: its last tokens ride in the next request, to be learnt."""
        if sequence.told_to is None:
            return
        length = len(sequence.tokens)
        self._last_words[sequence.told_to.name].append(
            _Row(sequence, sequence.slot, sequence.generation, sequence.told_length, length, 1, False)
        )

    def tell(self, prefilling: Seq[Sequence]) -> None:
        """Tell drafters the prompts that this step computes: they learn them while the target does."""
        for source in self._sources:
            rows = [
                _Row(sequence, sequence.slot, sequence.generation, 0, len(sequence.tokens), 1, False)
                for sequence in prefilling
                if sequence.told_to != attachment(source)
                and self.wants_drafts(sequence)
                and self._source_of(sequence) is source
            ]
            if rows:
                self._post(source, rows)

    def post(self, decoding: Seq[Sequence]) -> None:
        """Ask for the next step's trees. ``decoding``: the sequences whose next step is a decode step."""
        self._num_posts += 1
        self._read_scouts()
        if self._max_batch_size and len(decoding) > self._max_batch_size:
            # True plain decode. Drafters are told of these tokens when speculation returns.
            self.num_plain_batch_steps += 1
            decoding = ()
        for source in self._sources:
            rows = self._rows(source, decoding) if source.transport is not None else []
            if rows or self._last_words[source.name]:
                self._post(source, rows)

    def _post(self, source: DraftSource, rows: list[_Row]) -> None:
        """Send rows behind the last tokens of the sequences that ended since, one of whose slots they may have."""
        last_words, self._last_words[source.name] = self._last_words[source.name], []
        # A drafter that attached anew knows nothing of what it was told before, and has nothing to forget.
        last_words = [row for row in last_words if row.sequence.told_to == attachment(source)]
        owned = {row.slot for row in rows}
        rows = last_words + rows
        transport = source.transport
        if transport is None or not rows:
            return
        # Slots are forgotten one request after their last tokens were told, and before a new owner's first; a new
        # owner in the same request makes the drafter forget by its generation.
        gone = self._to_release[source.name]
        self._to_release[source.name] = [row.slot for row in last_words if row.slot not in owned]
        self._step_id += 1
        try:
            if gone:
                transport.release(gone)
            transport.post(self._request(rows))
        except TransportClosedError as error:
            source.report_failure(str(error))
            return
        for row in rows:
            row.sequence.told_length = row.length
            row.sequence.told_to = attachment(source)
        self._posted.append(_Posted(source, self._step_id, rows))

    def collect(self) -> None:
        """Wait for the trees that were asked for and keep those that are sound; ``tree_of`` has them afterwards."""
        self._trees = {}
        for posted in self._posted:
            if not any(row.awaited for row in posted.rows):
                self._scouts.append(posted)
                continue
            batch = self._receive(posted)
            if batch is not None:
                self._accept(posted, batch)
        self._posted = []

    def _read_scouts(self) -> None:
        """See what the drafters that nobody waited for had to say: too late for a tree, in time for the gates."""
        scouts, self._scouts = self._scouts, []
        for posted in scouts:
            transport = posted.source.transport
            if transport is None or all(row.nodes == 1 for row in posted.rows):
                continue
            try:
                batch = transport.receive(0.0)
            except TransportClosedError as error:
                posted.source.report_failure(str(error))
                continue
            patience = self._patience[posted.source.name]
            if batch is None:
                if patience.times_out_again(self._clock()):
                    posted.source.report_failure(self._late_reason)
                continue
            patience.answer()
            if batch.num_rows != len(posted.rows):
                continue
            for index, row in enumerate(posted.rows):
                if row.nodes > 1:
                    found = batch.tree(index).num_nodes > 1
                    row.sequence.gate.observe_find() if found else row.sequence.gate.observe_miss()

    def observe(self, sequence: Sequence, tree: DraftTree, drafter: int, num_accepted: int) -> None:
        """Learn from a verified tree of ``drafter`` (index + 1)."""
        if tree.num_speculative_tokens == 0:
            return
        sequence.gate.observe(num_accepted, int(depths(tree.parents).max()))
        self.counters[self._sources[drafter - 1].name].add(tree.num_speculative_tokens, num_accepted)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Learn what a step without prefill cost."""
        self._costs.observe(num_rows, seconds)

    def _source_of(self, sequence: Sequence) -> DraftSource | None:
        """The drafter of a row: the one it names, or the first that is attached."""
        wanted = sequence.speculation.drafter
        for source in self._sources:
            if (wanted == "auto" or wanted == source.name) and source.transport is not None:
                return source
        return None

    def _rows(self, source: DraftSource, decoding: Seq[Sequence]) -> list[_Row]:
        """The rows that draft with this source in the next step."""
        relative_costs = self._relative_costs(source, max(len(decoding), 1))
        is_affordable = self._patience[source.name].has_some(self._clock())
        rows = []
        for sequence in decoding:
            if not self.wants_drafts(sequence) or self._source_of(sequence) is not source:
                continue
            most = self._max_nodes - 1
            if sequence.speculation.max_draft_tokens is not None:
                most = min(most, sequence.speculation.max_draft_tokens)
            # The last token that may be emitted needs no draft behind it.
            most = min(most, sequence.max_new_tokens - 1)
            width = sequence.gate.num_tokens(most, relative_costs)
            if width > 0:
                told = sequence.told_length if sequence.told_to == attachment(source) else 0
                length = len(sequence.tokens)
                awaited = is_affordable and not sequence.gate.is_scouting
                rows.append(_Row(sequence, sequence.slot, sequence.generation, told, length, 1 + width, awaited))
        return rows

    def _relative_costs(self, source: DraftSource, batch: int) -> list[float]:
        """Cost of a step in which each of ``batch`` rows verifies k tokens that ``source`` drafted, over that of a
        plain step, by k."""
        counted_at, costs = self._cost_lists.get((source.name, batch), (0, []))
        if not costs or self._num_posts - counted_at >= COSTS_HOLD_FOR:
            plain = self._costs.estimate(batch)
            drafted = [self._costs.estimate(batch * (1 + k)) for k in range(1, self._max_nodes)]
            wait_s = self._patience[source.name].wait_s
            costs = [1.0, *((seconds + wait_s) / plain for seconds in drafted)]
            self._cost_lists[source.name, batch] = (self._num_posts, costs)
        return costs

    def _request(self, rows: list[_Row]) -> DraftRequest:
        new_tokens: list[int] = []
        starts = [0]
        for row in rows:
            new_tokens.extend(row.sequence.tokens[row.told : row.length])
            starts.append(len(new_tokens))
        sequences = [row.sequence for row in rows]
        return DraftRequest(
            epoch=self._epoch,
            step_id=self._step_id,
            slots=np.array([row.slot for row in rows], np.int32),
            generations=np.array([row.generation for row in rows], np.int32),
            lengths=np.array([row.length for row in rows], np.int32),
            prompt_lengths=np.array([s.num_prompt_tokens for s in sequences], np.int32),
            max_nodes=np.array([row.nodes for row in rows], np.int32),
            new_token_starts=np.array(starts, np.int32),
            new_tokens=np.array(new_tokens, np.int32),
            salts=np.array([s.salt_digest for s in sequences], np.uint64),
            seeds=np.array([s.sampling.seed % 2**64 for s in sequences], np.uint64),
            choice_indices=np.array([s.key.choice_index for s in sequences], np.int32),
            temperatures=np.array([s.sampling.temperature for s in sequences], np.float32),
        )

    def _receive(self, posted: _Posted) -> DraftBatch | None:
        transport = posted.source.transport
        if transport is None:
            return None
        began = self._clock()
        try:
            batch = transport.receive(self._timeout_s)
        except TransportClosedError as error:
            posted.source.report_failure(str(error))
            return None
        # Each row that waits gains at most its drafted tokens, each of which is a plain step of all rows saved.
        gain = max(row.nodes - 1 for row in posted.rows)
        worth_s = gain * self._costs.estimate(len(posted.rows))
        patience, now = self._patience[posted.source.name], self._clock()
        patience.observe(now - began, worth_s)
        counters = self.counters[posted.source.name]
        counters.num_awaited += 1
        counters.wait_seconds += now - began
        if batch is None:
            patience.time_out(now)
            posted.source.report_failure(self._late_reason)
        else:
            patience.answer()
        return batch

    def _accept(self, posted: _Posted, batch: DraftBatch) -> None:
        """Take over the sound trees of a reply. A stale, short or malformed one is dropped and counted."""
        counters = self.counters[posted.source.name]
        if (batch.epoch, batch.step_id) != (self._epoch, posted.step_id) or batch.num_rows != len(posted.rows):
            counters.num_rejected_drafts += 1
            posted.source.report_failure("a draft with another step's stamp or number of rows")
            return
        drafter = 1 + self._sources.index(posted.source)
        for index, row in enumerate(posted.rows):
            tree = batch.tree(index)
            if not tree.is_valid(row.sequence.tokens[row.length - 1], self._vocab_size, row.nodes):
                counters.num_rejected_drafts += 1
                posted.source.report_failure("a malformed draft tree")
                return
            if tree.num_nodes > 1:
                self._trees[row.slot, row.generation] = (tree, drafter)
            elif row.nodes > 1:
                row.sequence.gate.observe_miss()
        posted.source.report_success()
