"""One round of drafting.

It asks the drafters of one kind side by side for the trees of the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import ClassVar

from foretoken.transports.transport import TransportClosedError
from verifier_svc.drafters.attachment import Attachment, Posted
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, DraftRow, TreeBounds
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.capture import Capture
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.gate import Gate, best_reach
from verifier_svc.speculation.plan import DraftPlan
from verifier_svc.speculation.routing import DrafterRouting
from verifier_svc.speculation.row_state import RowStates

# Tokens that a model may be behind on a row that drafts without it, before it is sent them.
SEND_BEHIND = 32
# Tokens a second that a model's own steps must promise, over plain decode's, for the
# server to choose it by itself: less is lost again in the prompt's KV entries and in
# sending it what others drafted.
MODEL_PAYS_FROM = 1.3

# Drafts that came for a row, by batch slot and generation.
Found = dict[tuple[int, int], list[Draft]]


class DraftRound(ABC):
    """What both rounds share: who takes part, what each row asks for, and what came of it."""

    has_model: ClassVar[bool]

    def __init__(
        self, routing: DrafterRouting, rows: RowStates, capture: Capture, costs: DraftCosts, bounds: TreeBounds
    ) -> None:
        self._routing = routing
        self._rows = rows
        self._capture = capture
        self._costs = costs
        self._bounds = bounds

    @abstractmethod
    def gate(self, sequence: Sequence) -> Gate:
        """Return the gate of a row under the drafters of this round."""

    def attached(self) -> list[tuple[DrafterHandle, Attachment]]:
        """Return the drafters of this round that take part in this step and are still attached."""
        mine = self._routing.attached_of_kind(has_model=self.has_model)
        return [(drafter, attachment) for drafter in mine if (attachment := drafter.attachment) is not None]

    def read_scouts(self) -> bool:
        """Learn from the replies for which the last step did not wait.

        Return whether drafters found anything.
        """
        has_found = False
        for _, attachment in self.attached():
            for sequence, is_found in attachment.read_scout():
                if self._rows.has(sequence):
                    gate = self.gate(sequence)
                    gate.observe_find() if is_found else gate.observe_miss()
                    has_found |= is_found
        return has_found

    def with_drafters(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Return those that have drafters of this round."""
        if not self._routing.attached_of_kind(has_model=self.has_model):
            return []
        return [sequence for sequence in sequences if self._routing.of_kind(sequence, has_model=self.has_model)]

    def plan(self, sequences: Seq[Sequence], batch: int) -> list[DraftPlan]:
        """Return what sequences ask of this round's drafters in a step of ``batch`` rows."""
        plans = []
        for sequence in sequences:
            drafters = self._routing.of_kind(sequence, has_model=self.has_model)
            plan = self.plan_row(sequence, drafters, batch)
            if plan is not None:
                plans.append(plan)
        return plans

    def plan_row(self, sequence: Sequence, drafters: Seq[DrafterHandle], batch: int) -> DraftPlan | None:
        """Return what one row asks of these drafters, or None if it asks nothing."""
        bounds = self.bounds(sequence)
        # No draft is needed after the last token that may be emitted.
        most = min(bounds.max_nodes, sequence.max_new_tokens) - 1
        if sequence.speculation.max_draft_tokens is not None:
            most = min(most, sequence.speculation.max_draft_tokens)
        gate = self._expecting_gate(sequence, drafters)
        most_reach = min(most, bounds.most_reach(self.has_model))
        reach = gate.num_tokens(most_reach, self._costs.relative(drafters, batch))
        if bounds.is_fixed:
            reach = most
        if reach <= 0:
            return None
        return DraftPlan(sequence, drafters, reach, most, not gate.is_scouting, bounds, gate.rate)

    @property
    def max_nodes(self) -> int:
        """Return the most nodes of a tree."""
        return self._bounds.max_nodes

    def bounds(self, sequence: Sequence) -> TreeBounds:
        """Return the bounds of a row's trees."""
        return self._rows.of(sequence).bounds

    def _expecting_gate(self, sequence: Sequence, drafters: Seq[DrafterHandle]) -> Gate:
        """Return the gate of a row, which knows what these drafters make one expect."""
        return self.gate(sequence)

    def rows_to_send(
        self, drafter: DrafterHandle, attachment: Attachment, sequences: Seq[Sequence], others: Seq[DraftRow] = ()
    ) -> list[DraftRow]:
        """Return the rows that send a drafter what is new of sequences, and ask for nothing.

        ``others``: the other rows of the request.
        """
        rows = []
        room = attachment.sent.most_new_tokens - sum(len(row.new_tokens) for row in others)
        for sequence in sequences:
            if room <= 0:
                break
            if drafter in self._routing.of(sequence):
                row = attachment.sent.row(sequence, NO_DRAFT, awaited=False, captured=self._capture.layers, most=room)
                if row is not None:
                    rows.append(row)
                    room -= len(row.new_tokens)
        return rows

    def rows_to_draft(
        self, drafter: DrafterHandle, attachment: Attachment, plans: list[DraftPlan], *, max_depth: int | None = None
    ) -> list[DraftRow]:
        """Return the rows that ask a drafter for what was planned.

        ``max_depth``: most edges from a root.
        """
        rows: list[DraftRow] = []
        if not plans:
            return rows
        room, can_wait = attachment.sent.most_new_tokens, attachment.can_afford_wait()
        for plan in plans:
            if room <= 0:
                break
            if drafter in plan.drafters:
                shape = plan.bounds.of_row(self.has_model, plan.reach, plan.most)
                if max_depth is not None and shape.depth > max_depth:
                    shape = shape._replace(depth=max_depth)
                row = attachment.sent.row(
                    plan.sequence, shape, awaited=plan.awaited and can_wait, captured=self._capture.layers, most=room
                )
                if row is not None:
                    rows.append(row)
                    room -= len(row.new_tokens)
        return rows

    def collect(self, attachment: Attachment, found: Found) -> None:
        """Add the drafts that a drafter was waited for to those that were found."""
        for row, draft in attachment.collect(self._worth_s):
            found.setdefault((row.batch_slot, row.generation), []).append(draft)

    def _worth_s(self, posted: Posted) -> float:
        """Return the most seconds that a request's drafts can save.

        Each row gains at most its drafted tokens, and each token saves all rows a plain step.
        """
        return max(row.shape.nodes - 1 for row in posted.rows) * self._costs.plain_step_s(len(posted.rows))


class LookupRound(DraftRound):
    """The round of look-up drafters, which have no model.

    They answer in microseconds, so it ends where it begins.
    """

    has_model = False

    def gate(self, sequence: Sequence) -> Gate:
        return self._rows.of(sequence).lookup_gate

    def promised_tokens(self, plan: DraftPlan) -> float:
        """Return the tokens that a step should yield for a row by what was planned."""
        chance = self.gate(plan.sequence).acceptance
        # 1 + chance + ... + chance^reach.
        return (1 - chance ** (plan.reach + 1)) / (1 - chance) if chance < 1 else 1.0 + plan.reach

    def asks(self, sequence: Sequence) -> bool:
        """Return whether a row has drafters of this round."""
        return bool(self._routing.of_kind(sequence, has_model=False))

    def asks_at_once(self, sequence: Sequence) -> bool:
        """Return whether a row asks such drafters in earnest from its first token on."""
        return self.asks(sequence) and (self.bounds(sequence).is_fixed or not self.gate(sequence).is_scouting)

    def send(self, plans: list[DraftPlan], others: Seq[Sequence]) -> None:
        """Ask for what was planned, and send what is new of other sequences.

        ``read_scouts`` reads the answers.
        """
        for drafter, attachment in self.attached():
            drafted = self.rows_to_draft(drafter, attachment, plans)
            attachment.post(self.rows_to_send(drafter, attachment, others, drafted) + drafted)
            attachment.collect(self._worth_s)

    def begin_unawaited(self, least: int = 0) -> None:
        """Let drafters in this process begin with requests whose reply no step waits for.

        ``least``: see DraftTransport.begin_unawaited.
        """
        for drafter, attachment in self.attached():
            try:
                attachment.transport.begin_unawaited(least)
            except TransportClosedError as error:
                drafter.source.report_failure(str(error))

    def num_behind(self, sequences: Seq[Sequence]) -> list[int]:
        """Return how many tokens of each sequence some drafter was not sent."""
        sent = [attachment.sent for _, attachment in self.attached()]
        return [max((len(s.tokens) - each.length(s) for each in sent), default=0) for s in sequences]

    def chances(self, drafts: Seq[Draft]) -> list[float]:
        """Return the chances of those nodes that this round's drafters have found."""
        mine = {drafter.number for drafter in self._routing.drafters if not drafter.has_model}
        nodes = [node for draft in drafts for node in zip(draft.chances, draft.sources, strict=True)]
        return [chance for chance, source in nodes if source in mine]

    def run(self, plans: list[DraftPlan], *, max_depth: int | None = None) -> Found:
        """Ask for what was planned, and wait for what the drafters have.

        ``max_depth``: most edges from the root of a tree.
        """
        found: Found = {}
        for drafter, attachment in self.attached():
            attachment.post(self.rows_to_draft(drafter, attachment, plans, max_depth=max_depth))
            self.collect(attachment, found)
        for plan in plans:
            if plan.key in found and all(draft.tree.num_nodes == 1 for draft in found[plan.key]):
                self.gate(plan.sequence).observe_miss()
        return found


class ModelRound(DraftRound):
    """The round of drafters with a model, which take milliseconds.

    They are asked now, and collected later.
    """

    has_model = True

    def gate(self, sequence: Sequence) -> Gate:
        return self._rows.of(sequence).model_gate

    def _expecting_gate(self, sequence: Sequence, drafters: Seq[DrafterHandle]) -> Gate:
        gate = self.gate(sequence)
        # A model always has something to propose.
        gate.expect_drafts(max(drafter.record.acceptance.value for drafter in drafters))
        return gate

    def pays(self, drafter: DrafterHandle, batch: int) -> bool:
        """Return whether a model makes more of a step than it costs."""
        costs = self._costs.relative([drafter], batch)
        most = self._bounds.most_reach(self.has_model)
        return best_reach(drafter.record.acceptance.value, most, costs)[1] >= MODEL_PAYS_FROM

    def worth_waiting(self, plans: list[DraftPlan], batch: int) -> list[DraftPlan]:
        """Return the plans for which a step of ``batch`` rows should wait.

        A row's gate takes it that all rows draft likewise. If few do, the others wait for nothing.
        Fixed shapes are exact, and probes are rare.
        """
        if not plans:
            return plans
        kept: list[DraftPlan] = []
        chosen: list[DraftPlan] = []
        for plan in plans:
            (kept if plan.bounds.is_fixed or plan.is_probe else chosen).append(plan)
        return kept + self._costs.best_plans(chosen, batch)

    def post(
        self,
        plans: list[DraftPlan],
        sequences: Seq[Sequence],
        prefilling: Seq[Sequence],
        undrafted: set[tuple[int, int]],
    ) -> None:
        """Ask for what was planned, and send models what they are behind on.

        Args:
            sequences: those that decode with drafters of this round.
            undrafted: rows that got only their root in the last step.
        """
        for drafter, attachment in self.attached():
            if not (sequences or prefilling or attachment.final_updates):
                continue
            rows = self.rows_to_send(drafter, attachment, prefilling) if attachment.needs.captured_layers else []
            drafted: list[DraftRow] = []
            if not attachment.is_catching_up():
                drafted = self.rows_to_draft(drafter, attachment, plans)
                rows += drafted
                asked = {row.batch_slot for row in rows}
                # Sending what is on the GPU now costs no more than this;
                # later it would be on the host.
                least = 1 if drafted and attachment.has_overlap_memory else SEND_BEHIND
                behind = [
                    s
                    for s in sequences
                    if drafter in self._routing.of_kind(s, has_model=True)
                    and s.batch_slot not in asked
                    and len(s.tokens) - attachment.sent.length(s) >= least
                ]
                rows += self.rows_to_send(drafter, attachment, behind)
            # A model writes the KV entries that it still owes of a sequence
            # only with ordinary requests.
            may_feed = all((row.batch_slot, row.generation) not in undrafted for row in drafted)
            attachment.post(rows, may_feed=may_feed)
