"""The policy of speculation: which rows draft, how wide, whom they wait for, and when plain decode is best.

Drafters without a model answer in microseconds: they are asked first, right after a step's tokens are known, and waited
for at once. Drafters with a model are asked then, and where the server chooses for itself only for rows that are
worth more with them. Whatever goes wrong with a drafter costs root-only rows and a counter, never an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from foretoken.tree import depths
from verifier_svc.drafters.attachment import Attachment, AttachmentSettings, Posted
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Row, Shape, TreeBounds
from verifier_svc.drafters.source import DraftSource
from verifier_svc.scheduling.draft import Draft, DrafterShare, merge
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts, StepCosts
from verifier_svc.speculation.gate import best_reach
from verifier_svc.speculation.plan import DraftPlan
from verifier_svc.speculation.resident_drafting import ResidentDrafting
from verifier_svc.speculation.routing import AUTO, DrafterRouting

# Tokens that a model may be behind on a row that drafts without it, before it is told of them.
SEND_BEHIND = 32
# Tokens a second that a model's own steps must promise, over plain decode's, for the server to choose it by itself:
# less is lost again in the prompt's entries and in telling it of what others drafted.
MODEL_PAYS_FROM = 1.3
# Steps that run ahead of the host with the shapes that paid when they began.
PLAN_HOLDS = 64
# The same beside drafters without a model that had found nothing: they must see the tokens to find something.
QUICK_RESTS = 16


# Drafts that came for a row, by slot and generation.
_Found = dict[tuple[int, int], list[Draft]]


class Speculator:
    """Chooses each row's tree. Used by the engine thread alone."""

    def __init__(
        self,
        sources: Seq[DraftSource],
        costs: StepCosts,
        *,
        epoch: int,
        vocab_size: int,
        block_size: int,
        shape: TreeBounds,
        max_batch_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``max_batch_size`` of 0 means no limit."""
        self.costs = DraftCosts(costs, shape)
        self._shape = shape
        self._max_batch_size = max_batch_size
        settings = AttachmentSettings(epoch, vocab_size, block_size, timeout_s, clock)
        self._routing = DrafterRouting(partial(DrafterHandle, settings=settings), self._pays)
        # Trees for the next step by slot and generation.
        self._drafts: dict[tuple[int, int], Draft] = {}
        # Rows that wanted one and got their root.
        self._undrafted: set[tuple[int, int]] = set()
        self._plans: list[DraftPlan] = []
        # What drafters without a model had for the next step.
        self._quick: _Found = {}
        self._captured: tuple[int, ...] = ()
        # Rows that the next steps will have.
        self._batch = 1
        self.num_plain_batch_steps = 0
        for source in sources:
            self.add_source(source)

    @property
    def drafters(self) -> Seq[DrafterHandle]:
        """All drafters that there were, by their numbers; its figures may be read by any thread."""
        return self._routing.drafters

    def drafter(self, name: str) -> DrafterHandle:
        """The drafter of this name. Any thread may ask. Raises KeyError if there never was one."""
        return {drafter.name: drafter for drafter in self.drafters}[name]

    @property
    def counters(self) -> dict[str, DrafterCounters]:
        """By drafter."""
        return {drafter.name: drafter.counters for drafter in self.drafters}

    @property
    def _attachments(self) -> list[Attachment]:
        """Of all drafters that are attached now."""
        return [drafter.attachment for drafter in self.drafters if drafter.attachment is not None]

    def add_source(self, source: DraftSource) -> None:
        """One more drafter. Raises as DrafterRouting.add."""
        self._routing.add(source)

    def remove_source(self, name: str) -> DraftSource:
        """Do without a drafter from now on; its source, which the caller closes, outside of the engine's thread.

        Rows that wait with a tree of it decode plainly in the next step. Raises NotFoundError if there is none.
        """
        drafter = self._routing.remove(name)
        self._drafts = {key: draft for key, draft in self._drafts.items() if drafter.number not in draft.sources}
        return drafter.source

    def num_rerun(self, sequence: Sequence) -> int:
        """Positions before the first computed one that its drafters want run again for their hidden states."""
        if not self._captured:
            return 0
        wanted = max((drafter.source.needs.num_rerun for drafter in self._routing.of(sequence)), default=0)
        return min(wanted, sequence.num_computed)

    def capture(self, sequences: Seq[Sequence]) -> tuple[int, ...]:
        """The target's hidden states that attached drafters want of the next step. Called once a step, before it.

        Rows of another set of states are of no use any more. A drafter that attaches later takes part from the next
        step on.
        """
        self._routing.begin_step(sequences)
        wanted = tuple(dict.fromkeys(feature for drafter in self._routing.attached for feature in drafter.features))
        if wanted != self._captured:
            self._captured = wanted
            for sequence in sequences:
                sequence.features.clear()
        return wanted

    def wants_drafts(self, sequence: Sequence) -> bool:
        """Whether this request asked for speculation at all."""
        return self._routing.is_wanted(sequence)

    def wants_features(self, sequence: Sequence) -> bool:
        """Whether a drafter of this sequence wants the target's hidden states."""
        return bool(self._captured) and any(drafter.features for drafter in self._routing.of(sequence))

    def draft_of(self, sequence: Sequence) -> Draft | None:
        """The tree to verify in the next step; None: the root alone."""
        return self._drafts.get((sequence.slot, sequence.generation))

    def finish(self, sequence: Sequence) -> None:
        """A sequence is about to give its slot back: its last tokens ride in the next requests, to be learnt."""
        for drafter in self.drafters:
            if drafter.attachment is not None:
                drafter.attachment.finish(sequence, self._captured)

    def tell(self, prefilling: Seq[Sequence], num_soon: int) -> None:
        """Tell drafters the prompts that this step computes: they learn them while the target does.

        Those that want the target's hidden states are told by ``post``, when there are some. ``num_soon``:
        sequences of the batch that there will be, by which is decided whether a model pays for those that are new.
        """
        self._batch = max(num_soon, 1)
        for drafter in self.drafters:
            attachment = drafter.attachment
            if attachment is not None and not attachment.needs.features:
                attachment.post(self._rows_to_send(drafter, attachment, prefilling))

    def post(self, decoding: Seq[Sequence], prefilling: Seq[Sequence]) -> None:
        """Ask for the next step's trees.

        ``decoding``: sequences whose next step is a decode step; ``prefilling``: those in the middle of their prompt.
        """
        self.costs.begin_step(self.drafters, len(decoding))
        self._read_scouts(self.drafters)
        if self._is_above_limit(len(decoding)):
            # True plain decode. Drafters are told of these tokens when speculation returns.
            self.num_plain_batch_steps += 1
            decoding = ()
        self._batch = batch = max(len(decoding), 1)
        quick_plans = self._make_plans(decoding, batch, has_model=False)
        self._quick = self._ask_quickly(quick_plans)
        plans = self._make_plans(decoding, batch, has_model=True)
        self._plans = [plan for plan in plans if not self._is_served(plan, batch)]
        for drafter in self.drafters:
            attachment = drafter.attachment
            if attachment is not None and drafter.has_model:
                rows = self._rows_to_send(drafter, attachment, prefilling) if attachment.needs.features else []
                drafted: list[Row] = []
                if not attachment.is_catching_up():
                    drafted = self._rows_to_draft(drafter, attachment, self._plans)
                    rows += drafted
                    asked = {row.slot for row in rows}
                    # Sending what is on the GPU now costs no more than this; later it would be on the host.
                    least = 1 if drafted and attachment.has_resident else SEND_BEHIND
                    behind = [
                        s
                        for s in decoding
                        if s.slot not in asked
                        and drafter in self._routing.of(s)
                        and len(s.tokens) - attachment.sent.length(s) >= least
                    ]
                    rows += self._rows_to_send(drafter, attachment, behind)
                # A model writes the KV entries that it still owes of a sequence only with ordinary requests.
                may_feed = all((row.slot, row.generation) not in self._undrafted for row in drafted)
                attachment.post(rows, may_feed=may_feed)
        self._plans += quick_plans
        for sequence in (*decoding, *prefilling):
            self._forget_sent_features(sequence)

    def _is_above_limit(self, num_decoding: int) -> bool:
        return 0 < self._max_batch_size < num_decoding

    def _make_plans(self, decoding: Seq[Sequence], batch: int, *, has_model: bool) -> list[DraftPlan]:
        plans = []
        for sequence in decoding:
            drafters = [drafter for drafter in self._routing.of(sequence) if drafter.has_model == has_model]
            plan = self._plan(sequence, drafters, batch) if drafters else None
            if plan is not None:
                plans.append(plan)
        return plans

    def _ask_quickly(self, plans: list[DraftPlan]) -> _Found:
        """Ask the drafters without a model and wait for what they have."""
        found: _Found = {}
        for drafter in self.drafters:
            attachment = drafter.attachment
            if attachment is not None and not drafter.has_model:
                attachment.post(self._rows_to_draft(drafter, attachment, plans))
                self._take(attachment, found)
        for plan in plans:
            if plan.key in found and all(draft.tree.num_nodes == 1 for draft in found[plan.key]):
                plan.sequence.quick_gate.observe_miss()
        return found

    def _read_scouts(self, drafters: Seq[DrafterHandle]) -> None:
        """Tell the gates what requests found that nobody waited for."""
        for drafter in drafters:
            attachment = drafter.attachment
            for sequence, is_found in attachment.read_scout() if attachment is not None else ():
                gate = sequence.gate if drafter.has_model else sequence.quick_gate
                gate.observe_find() if is_found else gate.observe_miss()

    def _take(self, attachment: Attachment, found: _Found) -> None:
        for row, draft in attachment.collect(self._worth_s):
            found.setdefault((row.slot, row.generation), []).append(draft)

    def _is_served(self, plan: DraftPlan, batch: int) -> bool:
        """Whether a row for which the server chooses has a draft already that promises as much as the model's."""
        quick = self._quick.get(plan.key)
        if quick is None or plan.sequence.speculation.drafter != AUTO or self._shape.is_fixed:
            return False
        return self.costs.best_rate(merge(quick).best(1 + plan.most), batch) >= max(plan.rate, 1.0)

    def _rows_to_send(self, drafter: DrafterHandle, attachment: Attachment, sequences: Seq[Sequence]) -> list[Row]:
        rows = []
        for sequence in sequences:
            if drafter in self._routing.of(sequence):
                row = attachment.sent.row(sequence, NO_DRAFT, awaited=False, captured=self._captured)
                if row is not None:
                    rows.append(row)
        return rows

    def _rows_to_draft(self, drafter: DrafterHandle, attachment: Attachment, plans: list[DraftPlan]) -> list[Row]:
        rows = []
        for plan in plans:
            if drafter not in plan.drafters:
                continue
            shape = self._shape.of_row(drafter.has_model, plan.reach, plan.most)
            awaited = plan.awaited and attachment.can_afford_wait()
            row = attachment.sent.row(plan.sequence, shape, awaited=awaited, captured=self._captured)
            if row is not None:
                rows.append(row)
        return rows

    def fetch_features(self, sequences: Seq[Sequence]) -> None:
        """Have on the host all hidden rows that are not told: the next pass writes where they are."""
        for sequence in sequences:
            sequence.features.fetch()
        for attachment in self._attachments:
            attachment.final_updates.fetch()

    def _forget_sent_features(self, sequence: Sequence) -> None:
        attachments = [drafter.attachment for drafter in self._routing.of(sequence)]
        sent = [a.sent.length(sequence) for a in attachments if a is not None and a.needs.features]
        if sent:
            # The hidden state at position sent - 1 belongs to the first token that was not sent.
            sequence.features.forget_before(min(sent) - 1)

    @property
    def waits_for_model(self) -> bool:
        """Whether ``collect`` will wait for a drafter with a model."""
        return any(attachment.is_awaited for attachment in self._attachments)

    def collect(self) -> None:
        """Wait for the trees that were asked for and keep those that are sound; ``draft_of`` has them afterwards."""
        found, self._quick = self._quick, {}
        for attachment in self._attachments:
            self._take(attachment, found)
        self.costs.end_waits(self.drafters)
        plans: dict[tuple[int, int], list[DraftPlan]] = {}
        for plan in self._plans:
            plans.setdefault(plan.key, []).append(plan)
        self._undrafted = {key for key, drafts in found.items() if all(draft.tree.num_nodes == 1 for draft in drafts)}
        merged = {key: merge(drafts) for key, drafts in found.items() if key not in self._undrafted}
        self._drafts = self._trimmed(merged, plans)

    def resident_drafting(self, decoding: Seq[Sequence]) -> ResidentDrafting | None:
        """Who drafts where steps run ahead of the host: one model, on the target's GPU, or nobody. None: these
        sequences want more than that.

        Called behind ``collect``; the trees that it found are those of the first step, and those of the others have
        the shapes that were asked for.
        """
        if self._is_above_limit(len(decoding)):
            return ResidentDrafting()
        wanted = [(sequence, self._links_ahead(sequence)) for sequence in decoding]
        drafters = {drafter.number: drafter for _, found in wanted for drafter in found}
        rests = any(len(found) < len(self._routing.of(sequence)) for sequence, found in wanted)
        if not drafters:
            return ResidentDrafting(most_steps=QUICK_RESTS if rests else None)
        drafter = next(iter(drafters.values()))
        drafted = [sequence for sequence, found in wanted if found]
        attachment = drafter.attachment
        if (
            len(drafters) > 1
            or attachment is None
            or not (drafter.has_model and attachment.needs.features == self._captured)
            or not attachment.has_resident
            or attachment.final_updates
            or attachment.is_catching_up()
            or not attachment.has_answered()
            or not attachment.can_afford_wait()
            # What the model still has to write of a sequence it writes with ordinary requests alone.
            or any((sequence.slot, sequence.generation) in self._undrafted for sequence in drafted)
            or any(attachment.sent.length(sequence) != len(sequence.tokens) for sequence in drafted)
        ):
            return None
        reaches = {plan.sequence.slot: plan.reach for plan in self._plans if drafter in plan.drafters}
        shapes: dict[int, Shape] = {}
        for sequence in drafted:
            # A tree is cut on the device to what may still be emitted.
            most = sequence.speculation.max_draft_tokens
            most = self._shape.max_nodes - 1 if most is None else min(most, self._shape.max_nodes - 1)
            reach = most if self._shape.is_fixed else reaches.get(sequence.slot, 0)
            shapes[sequence.slot] = self._shape.of_row(True, reach, most) if reach else NO_DRAFT
        drafts = {s.slot: draft for s in drafted if (draft := self.draft_of(s)) is not None}
        most_steps = QUICK_RESTS if rests else None if self._shape.is_fixed else PLAN_HOLDS
        return ResidentDrafting(drafter, shapes, drafts, self._captured, most_steps)

    def _links_ahead(self, sequence: Sequence) -> Seq[DrafterHandle]:
        """Of a row's drafters those who are asked before each step: where the server chooses, one without a model is
        left aside for a run if it has found nothing for the next step, and for a few steps where the client has said
        what comes."""
        drafters = self._routing.of(sequence)
        draft = self.draft_of(sequence)
        if sequence.speculation.drafter != AUTO or (sequence.prediction_ids and sequence.quick_gate.expects_drafts):
            return drafters
        return [
            drafter
            for drafter in drafters
            if drafter.has_model or (draft is not None and drafter.number in draft.sources)
        ]

    def observe_plain_step(self, num_rows: int, seconds: float) -> None:
        """Learn from a step of plain decode that ran ahead of the host."""
        self.costs.observe_step(num_rows, seconds)

    def count_batch(self, num_decoding: int) -> None:
        """A step that ran ahead of the host leaves so many sequences to the next one, as ``post`` learns of others."""
        self.num_plain_batch_steps += self._is_above_limit(num_decoding)

    def still_drafts(self, drafting: ResidentDrafting, decoding: Seq[Sequence]) -> bool:
        """Whether those of a run that still run would be drafted for as they are: drafters are attached as they were
        when it began, and no end took away the last one that has one, or the batch below the limit of drafting."""
        if not drafting.is_current or not self._routing.is_as_attached:
            return False
        if drafting.drafter is not None:
            return any(drafting.is_for(sequence) for sequence in decoding)
        return self._is_above_limit(len(decoding)) or not any(self._links_ahead(sequence) for sequence in decoding)

    def end_resident(self, drafting: ResidentDrafting, number: int, num_steps: int, decoding: Seq[Sequence]) -> None:
        """A run of ``num_steps`` is over, its last one, ``number``, read: get the next step's trees. ``decoding``: who
        still runs."""
        self._drafts, self._plans = {}, []
        # Answers to the step before the run: pauses for them were over within the run.
        self._read_scouts([drafter for drafter in self.drafters if not drafter.has_model])
        for sequence in decoding:
            sequence.quick_gate.pass_steps(num_steps)
        self.costs.begin_step(self.drafters, len(decoding), num_steps)
        self._batch = max(len(decoding), 1)
        if drafting.drafter is None:
            return
        self._plans = self._make_plans(decoding, self._batch, has_model=True)
        drafting.post(number, is_last=True)
        self.collect()

    def _worth_s(self, posted: Posted) -> float:
        """Each row that waits gains at most its drafted tokens, each of which is a plain step of all rows saved."""
        return max(row.shape.nodes - 1 for row in posted.rows) * self.costs.plain_step_s(len(posted.rows))

    def _trimmed(
        self, drafts: dict[tuple[int, int], Draft], plans: dict[tuple[int, int], list[DraftPlan]]
    ) -> dict[tuple[int, int], Draft]:
        """The nodes that make the most tokens a second; drafts of which that is the root alone are left out."""
        most = {key: max(plan.most for plan in plans[key]) for key in drafts if key in plans}
        drafts = {key: draft.best(1 + most[key]) if key in most else draft for key, draft in drafts.items()}
        if not self._shape.is_fixed and drafts:
            counts = self.costs.best_counts(list(drafts.values()), self._batch)
            drafts = {key: draft.best(count) for (key, draft), count in zip(drafts.items(), counts, strict=True)}
        return {key: draft for key, draft in drafts.items() if draft.tree.num_nodes > 1}

    def observe(self, sequence: Sequence, draft: Draft, matched: Seq[int], shares: Seq[DrafterShare]) -> None:
        """Learn from a verified tree of which the walk went through the nodes ``matched``."""
        depth = int(depths(draft.tree.parents).max())
        has_model = any(self.drafters[share.drafter - 1].has_model for share in shares)
        (sequence.gate if has_model else sequence.quick_gate).observe(len(matched), depth)
        for share in shares:
            drafter = self.drafters[share.drafter - 1]
            drafter.counters.add(share.num_drafted, share.accepted_depths)
            if len(shares) == 1:
                drafter.record.acceptance.observe(len(matched), depth)
            mine = [node for node, source in enumerate(draft.sources) if source == share.drafter]
            drafter.record.estimates.observe([draft.scores[node] for node in mine], [node in matched for node in mine])

    def _pays(self, drafter: DrafterHandle) -> bool:
        """Whether a model makes more of a step than it costs; a tree whose shape was given is to be drafted."""
        if self._shape.is_fixed:
            return True
        costs = self.costs.relative([drafter], self._batch)
        return (
            best_reach(drafter.record.acceptance.value, self._shape.most_reach(drafter.has_model), costs)[1]
            >= MODEL_PAYS_FROM
        )

    def _plan(self, sequence: Sequence, drafters: list[DrafterHandle], batch: int) -> DraftPlan | None:
        """What a row asks of drafters of one kind in the next step; None: nothing."""
        has_model = drafters[0].has_model
        # The last token that may be emitted needs no draft behind it.
        most = min(self._shape.max_nodes, sequence.max_new_tokens) - 1
        if sequence.speculation.max_draft_tokens is not None:
            most = min(most, sequence.speculation.max_draft_tokens)
        gate = sequence.gate if has_model else sequence.quick_gate
        if has_model:
            # A model always has something to propose.
            gate.expect_drafts(max(drafter.record.acceptance.value for drafter in drafters))
        reach = gate.num_tokens(min(most, self._shape.most_reach(has_model)), self.costs.relative(drafters, batch))
        if self._shape.is_fixed:
            reach = most
        return DraftPlan(sequence, drafters, reach, most, not gate.is_scouting, gate.rate) if reach > 0 else None
