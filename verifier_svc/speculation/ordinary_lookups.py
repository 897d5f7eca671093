"""Look-ups of ordinary steps: who asks, and whether a step waits for what is found."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.draft_round import SEND_BEHIND, Found, LookupRound
from verifier_svc.speculation.gap_times import GapTimes
from verifier_svc.speculation.lookup_pace import RARELY_FROM, LookupPace
from verifier_svc.speculation.lookup_yield import LookupYields
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.plan import DraftPlan


class OrdinaryLookups:
    """Used by the engine thread alone.

    The host asks between two steps, and all rows wait meanwhile. So look-ups must save the batch
    what asking takes, as it is measured. Where they do not, rows only scout.

    Args:
        clock: seconds, by which asking is measured.
    """

    def __init__(self, lookup_round: LookupRound, costs: DraftCosts, clock: Callable[[], float]) -> None:
        self._round, self._costs, self._clock = lookup_round, costs, clock
        self._pace, self._yields = LookupPace(lookup_round, in_turns=False), LookupYields()
        # What a step takes for asking that waits for look-ups.
        self._times = GapTimes()
        # Whether a sequence that joins looks up from its first token on, and whether this step asks
        # because scouts have just found something.
        self._has_new, self._follows = False, False
        # The plans for which the next step waits, and the tokens that they promise beyond one each.
        self._awaited: list[DraftPlan] = []
        self._promised = 0.0
        self._batch = 1

    def begin_step(self, joining: Items[Sequence]) -> None:
        """Begin a step; ``joining``: the sequences whose prompts it computes."""
        self._has_new = any(map(self._round.asks_at_once, joining))

    def find(self, decoding: Items[Sequence], batch: int) -> tuple[list[DraftPlan], Found]:
        """Ask for the trees of the next step, and send what is new.

        Return what was asked, and what was found in time.
        """
        self._batch = batch
        # Once only: what is found again and does not pay would be asked for in each step.
        self._follows = self._round.read_scouts() and not self._follows
        began = self._clock()
        asking = [sequence for sequence in decoding if self._round.asks(sequence)]
        plans = self._plan(asking, batch) if asking else []
        planned = {plan.sequence for plan in plans}
        # A request costs more than its rows: if one must be sent, all are.
        others = [sequence for sequence in asking if sequence not in planned]
        if self._round.most_behind(others) < SEND_BEHIND:
            others = []
        if not self._awaited:
            self._round.send(plans, others)
            return plans, {}
        found = self._round.run(plans, others)
        self._times.observe(batch, self._clock() - began)
        return plans, found

    def _plan(self, asking: Items[Sequence], batch: int) -> list[DraftPlan]:
        """Return what rows ask, and note for what the next step waits."""
        asked = self._pace.asked(asking, batch, at_once=self._has_new or self._follows)
        if not asked:
            return []
        plans = self._round.plan(asked, batch)
        awaited = [plan for plan in plans if plan.awaited]
        # A large batch scouts rarely, too, where its rows have nothing to wait for.
        if (awaited or batch >= RARELY_FROM) and self._pace.waits(pays=self._pays(awaited, batch)):
            self._awaited = awaited
            return plans
        return [plan._replace(awaited=False) for plan in plans]

    def _pays(self, plans: list[DraftPlan], batch: int) -> bool:
        """Return whether a step should wait for look-ups.

        It should if clients say what to look up, or if look-ups promise more than asking and their
        rows take.
        """
        self._promised = sum(self._round.promised_tokens(plan) - 1 for plan in plans)
        if any(plan.bounds.is_fixed or plan.sequence.submission.prediction_ids for plan in plans):
            return True
        token_s = self._costs.step_s(batch) / batch
        gain_s = self._yields.of(batch).gain_s(self._promised, batch, token_s, self._costs)
        return bool(plans) and gain_s >= self._times.seconds(batch)

    def observe(self, trees: NextTrees) -> None:
        """Learn what look-ups add to the next step, whose trees these are."""
        if not self._awaited:
            return
        drafts = [draft for plan in self._awaited if (draft := trees.of(plan.sequence)) is not None]
        chances = self._round.chances(drafts)
        self._yields.of(self._batch).observe(self._promised, sum(chances), len(chances))
        self._awaited = []
