"""Look-ups within one run of overlapped steps: who asks, when, and whose trees are verified."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from verifier_svc.scheduling.batch_row import BatchRow
from verifier_svc.scheduling.draft import Draft, merge
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts, StepBase
from verifier_svc.speculation.draft_round import LookupRound
from verifier_svc.speculation.lookup_pace import LookupPace
from verifier_svc.speculation.lookup_record import LookupRecord
from verifier_svc.speculation.lookup_yield import saved_s
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.plan import DraftPlan

# A row that asks nothing is sent in every so many steps, in turns: in one step, all rows of a large
# batch would take the drafter too long to learn.
SEND_EVERY = 16

# New tokens from which a thread of its own pays for learning them while the engine's goes on: the
# hand-over costs the engine some 0.3 ms, and so do 300 tokens.
LEAST_FOR_A_THREAD = 1024


class PassedOver(NamedTuple):
    """A row that does not verify the tree that a look-up found.

    Attributes:
        draft: the tree that was found.
        expected: the tokens that the model's trees yield, as a mean of all rows, if the model's is
            verified although the look-up promised more; else None.
    """

    draft: Draft
    expected: float | None


class Lookups:
    """A run's look-ups. Only the engine thread uses it.

    A look-up needs the tokens of the step before, so the host launches a step with look-ups after
    it has read that one. Only rows whose look-ups were worth it lately make it wait. The others are
    scouted while a step runs, in turns (LookupPace).

    Args:
        record: what earlier runs have learned.
        found: trees that were found before the run, by sequence.
        max_depth: most edges from the root of a tree.
        is_on: whether drafts are wanted in this run.
    """

    def __init__(
        self,
        lookup_round: LookupRound,
        costs: DraftCosts,
        record: LookupRecord,
        drafting: OverlapDrafting,
        found: Mapping[Sequence, Draft],
        *,
        max_depth: int,
        is_on: bool,
    ) -> None:
        self._round, self._costs, self._record = lookup_round, costs, record
        self._drafting, self._max_depth, self._is_on = drafting, max_depth, is_on
        # Rows that do not verify in the next step what a look-up found.
        self._passed_over: dict[Sequence, PassedOver] = {}
        # Trees for the first step of their sequences.
        self._waiting = dict(found) if is_on else {}
        # What rows ask before the next step.
        self._plans: list[DraftPlan] = []
        # The tokens that these plans promise beyond the model's.
        self._promised = 0.0
        self._batch, self._has_prompts = 1, False
        self._pace = LookupPace(lookup_round, in_turns=True)
        self._num_prepared = 0
        # Whether a sequence that joins looks up from its first token on.
        self._has_new = False

    @property
    def are_due(self) -> bool:
        """Return whether the next step must wait for look-ups.

        They need the tokens of all steps in flight.
        """
        return bool(self._plans)

    def most_nodes(self, sequence: Sequence) -> int:
        """Return the most nodes of a sequence's tree that comes from the host."""
        if not self._is_on or not (self._round.asks(sequence) or sequence in self._waiting):
            return 1
        most = sequence.speculation.max_draft_tokens
        return self._round.max_nodes if most is None else min(self._round.max_nodes, 1 + most)

    def prepare(self, joined: Items[Sequence], joining: Items[Sequence], *, has_prompts: bool) -> None:
        """Do what needs no tokens of the step in flight.

        This sends prompts, scouts, and plans the look-ups of the next step.

        Args:
            joined: the sequences that have a batch row.
            joining: those that wait for one.
            has_prompts: whether the next step computes prompts.
        """
        if not self._is_on:
            return
        self._round.read_scouts()
        self._batch, self._has_prompts = max(len(joined), 1), has_prompts
        # The first step of a sequence with a batch row is in flight, so it decodes once that is
        # read.
        decoding = [*joined, *(s for s in joining if s.is_decoding)]
        asking = self._round.with_drafters(decoding)
        prompts = [sequence for sequence in joining if not sequence.is_decoding]
        # One that joins has its first step now and may look up before its second one.
        had_new, self._has_new = self._has_new, any(map(self._round.asks_at_once, joining))
        asked: Items[Sequence] = asking
        if self._pace.begin_step(self._batch, at_once=had_new or self._has_new):
            self._pace.ask_all(asking)
        else:
            asked = self._pace.ask_some(asking)
        plans = self._round.plan([s for s in asked if not self._round.gate(s).pauses()], self._batch)
        self._plans = [plan for plan in plans if plan.awaited]
        if not self._are_worth_waiting():
            self._plans = []
        planned = {plan.sequence for plan in self._plans}
        scouts = [plan._replace(awaited=False) for plan in plans if plan.sequence not in planned]
        known = planned | {plan.sequence for plan in scouts}
        self._num_prepared += 1
        turn = self._num_prepared % SEND_EVERY
        others = [s for s in asking if s.batch_slot % SEND_EVERY == turn and s not in known]
        self._round.send(scouts, [*others, *prompts])
        self._round.begin_unawaited(LEAST_FOR_A_THREAD)

    def _are_worth_waiting(self) -> bool:
        """Return whether the next step waits for what was planned.

        That costs the time by which it is launched later than it is for a model's drafts.
        """
        if not self._plans:
            return False
        extra = (self._round.promised_tokens(p) - self._model_tokens(p.sequence) for p in self._plans)
        self._promised = sum(max(tokens, 0.0) for tokens in extra)
        batch = self._batch
        gain_s = self._record.lookup_yields.of(batch).gain_s(
            self._promised, self._num_rows, self._token_s(), self._costs
        )
        pays = any(plan.bounds.is_fixed for plan in self._plans) or gain_s > self._late_s()
        return self._pace.waits(pays=pays)

    def _late_s(self) -> float:
        """Return how much later a step that waits for look-ups is launched than others."""
        return max(self._gap_s(self._batch) - self._drafting.draft_s(self._batch), 0.0)

    def _gap_s(self, batch: int) -> float:
        return self._record.gaps.seconds(batch, has_prompts=self._has_prompts)

    @property
    def _num_rows(self) -> int:
        """The rows of a step without look-ups."""
        return self._batch * self._drafting.shape.rows

    def _token_s(self) -> float:
        """Return the seconds in which the batch makes a token without look-ups."""
        drafting, batch = self._drafting, self._batch
        tokens = 1.0 if drafting.controller is None else drafting.controller.expected_tokens(drafting.shape)
        return drafting.step_s(drafting.shape, batch, self._costs) / (batch * tokens)

    def _model_tokens(self, sequence: Sequence) -> float:
        """Return the tokens that a step with the model's tree should yield.

        The step is one in which a look-up finds something.
        """
        if self._drafting.controller is None:
            return 1.0
        expected = self._drafting.expected_tokens(sequence)
        return self._record.model_yield.tokens(expected, 1 + self._drafting.shape_of(sequence).depth)

    def find(self, batch_rows: Items[BatchRow | None], *, is_drafted: bool) -> dict[int, Draft]:
        """Look up what was planned, once all steps are read.

        Return the next step's trees, by batch row.

        ``is_drafted``: whether the model's trees come, too.
        """
        if not self._plans and not self._waiting:
            return {}
        self._round.read_scouts()
        were_planned, plans = bool(self._plans), [plan for plan in map(_up_to_date, self._plans) if plan is not None]
        self._plans = []
        found = self._round.run(plans, max_depth=self._max_depth)
        trees = {plan.sequence: merge(found[plan.key]).best(1 + plan.most) for plan in plans if plan.key in found}
        taken = {index: batch_row for index, batch_row in enumerate(batch_rows) if batch_row is not None}
        drafts: dict[int, Draft] = {}
        for index, batch_row in taken.items():
            draft = trees.get(batch_row.sequence) or self._waiting.pop(batch_row.sequence, None)
            if draft is not None:
                draft = draft.to_depth(self._max_depth).best(batch_row.sequence.max_new_tokens)
                if draft.tree.num_nodes > 1:
                    drafts[index] = draft
        chosen = self._chosen(drafts, taken, is_drafted=is_drafted) if drafts else {}
        if were_planned:
            self._observe_yield([(taken[index], draft) for index, draft in chosen.items()], trees)
        return chosen

    def _observe_yield(self, chosen: Items[tuple[BatchRow, Draft]], trees: Container[Sequence]) -> None:
        """Learn what the look-ups that the step has waited for add to it.

        ``chosen``: the step's trees; ``trees``: the sequences for which these look-ups found one.
        """
        num_tokens, num_added_rows = 0.0, 0
        for batch_row, draft in chosen:
            if batch_row.sequence in trees:
                num_tokens += max(sum(draft.chances) - self._model_tokens(batch_row.sequence), 0.0)
                num_added_rows += batch_row.num_added_rows(draft, self._drafting.shape.budget)
        self._record.lookup_yields.of(self._batch).observe(self._promised, num_tokens, num_added_rows)
        gain_s = saved_s(num_tokens, num_added_rows, self._num_rows, self._token_s(), self._costs)
        self._pace.observe_try(has_paid=gain_s > self._late_s())

    def observe_gap(self, seconds: float) -> None:
        """Learn how long after the end of the last step the next one was launched."""
        self._record.gaps.observe(self._batch, seconds, has_prompts=self._has_prompts)

    def end(self, num_steps: int, decoding: Items[Sequence]) -> None:
        """End the run after ``num_steps`` steps, after which ``decoding`` still run."""
        self._round.read_scouts()
        if not self._is_on:
            for sequence in decoding:
                self._round.gate(sequence).pass_steps(num_steps)

    def _chosen(
        self, drafts: dict[int, Draft], batch_rows: Mapping[int, BatchRow], *, is_drafted: bool
    ) -> dict[int, Draft]:
        """Return the drafts that promise more than the model's.

        They have only the nodes that are worth their rows. ``batch_rows``: all that are taken.
        """
        drafting = self._drafting
        tokens = {index: drafting.expected_tokens(batch_row.sequence) for index, batch_row in batch_rows.items()}
        if is_drafted:
            drafts = {
                index: draft for index, draft in drafts.items() if not self._passes_over(draft, batch_rows[index])
            }
        # Nodes that each draft has in any case: those that the step has rows
        # for, and all of a fixed shape.
        free, budget = [], drafting.shape.budget
        num_rows = sum(batch_row.num_rows(budget) for batch_row in batch_rows.values())
        for index, draft in drafts.items():
            batch_row = batch_rows[index]
            is_fixed = self._round.bounds(batch_row.sequence).is_fixed
            free.append(max(batch_row.width, draft.tree.num_nodes) if is_fixed else batch_row.width)
            num_rows += free[-1] - batch_row.num_rows(budget)
            tokens[index] = sum(sorted(draft.chances, reverse=True)[: free[-1]])
        if not drafts or all(count >= draft.tree.num_nodes for count, draft in zip(free, drafts.values(), strict=True)):
            return drafts
        beside_s = drafting.draft_s(len(batch_rows)) or self._gap_s(len(batch_rows))
        base = StepBase(num_rows, sum(tokens.values()), beside_s)
        counts = self._costs.best_counts(list(drafts.values()), base, free)
        best: dict[int, Draft] = {}
        for (index, draft), count in zip(drafts.items(), counts, strict=True):
            if count > 1:
                best[index] = draft.best(count)
                continue
            self._passed_over[batch_rows[index].sequence] = PassedOver(draft, None)
        return best

    def _passes_over(self, draft: Draft, batch_row: BatchRow) -> bool:
        """Decide whether a sequence verifies the model's tree although a look-up has found one.

        Note it if so.

        It does where the model is known to do better on such text, or to learn whether it does.
        """
        sequence, expected = batch_row.sequence, self._drafting.expected_tokens(batch_row.sequence)
        promised = sum(draft.chances)
        # There is no other tree in the first step, and the model yields
        # no more than its deepest path.
        if not batch_row.has_stepped or promised > 1 + self._drafting.shape_of(sequence).depth:
            return False
        promises_more = promised > expected
        # A fixed shape leaves no choice.
        if promises_more and (expected <= 1.0 or self._round.bounds(sequence).is_fixed):
            return False
        if promises_more and not self._record.model_yield.is_compared() and promised > self._model_tokens(sequence):
            return False
        self._passed_over[sequence] = PassedOver(draft, expected if promises_more else None)
        return True

    def take_passed_over(self) -> dict[Sequence, PassedOver]:
        """Return the rows of the next step that do not verify what was found for them."""
        passed_over, self._passed_over = self._passed_over, {}
        return passed_over

    def observe_model(self, num_tokens: int, passed_over: PassedOver) -> None:
        """Learn what the model's tree has yielded for a row of ``take_passed_over``."""
        if passed_over.expected is not None:
            self._record.model_yield.observe(num_tokens, passed_over.expected)


def _up_to_date(plan: DraftPlan) -> DraftPlan | None:
    """Return a plan with what the step that was read has left of it; None: nothing."""
    sequence = plan.sequence
    most = min(plan.most, sequence.max_new_tokens - 1)
    if sequence.table is None or not sequence.is_decoding or most < 1:
        return None
    return plan if most == plan.most else plan._replace(most=most)
