"""Look-ups of ordinary steps: who asks, and whether a step waits for what is found."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.draft_round import SEND_BEHIND, Found, LookupRound
from verifier_svc.speculation.gap_times import GapTimes
from verifier_svc.speculation.lookup_pace import RARELY_FROM, LookupPace
from verifier_svc.speculation.lookup_yield import LookupYields, saved_s
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.plan import DraftPlan

# Steps after which what is new of rows that ask nothing is looked at again.
LOOK_EVERY = 16
# Passes after which scouts are read although drafters in this process could answer beside none of
# them: where requests are short, each pass may compute prompts.
MOST_UNREAD = 3


class OrdinaryLookups:
    """Decide when ordinary steps look up. Only the engine thread uses it.

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
        # Whether scouts were sent whose answers were not read, and the passes for which they stay
        # so because drafters in this process could not answer yet.
        self._has_scouts, self._unread_for = False, 0
        # Steps until what is new of rows that ask nothing is looked at.
        self._unsent_for = 0
        # The plans for which the next step waits, and the tokens that they promise beyond one each.
        self._awaited: list[DraftPlan] = []
        self._promised = 0.0
        self._batch = 1

    def send_prompts(self, joining: Items[Sequence]) -> None:
        """Begin a step by sending prompts that it computes: those whose trees are soon waited for.

        The others are sent after it. On a CPU a pass over prompts has all cores, and a drafter that
        learns at the same time would take one of them away.
        """
        if joining:
            self._unsent_for = 0
        new = [sequence for sequence in joining if self._round.asks_at_once(sequence)]
        self._has_new = bool(new)
        if new:
            self._round.send([], new)

    def learn_beside(self) -> None:
        """Let drafters in this process learn, and answer scouts, beside the pass that begins."""
        self._unread_for = 0
        self._round.begin_unawaited()

    def find(self, decoding: Items[Sequence], batch: int) -> tuple[list[DraftPlan], Found]:
        """Ask for the trees of the next step, and send what is new.

        Return what was asked, and what was found in time.
        """
        self._batch = batch
        self._unread_for = max(self._unread_for - 1, 0)
        # To read an answer that is not there yet takes as long as to make it. And once only: what
        # is found again and does not pay would be asked for in each step.
        self._follows = self._unread_for == 0 and self._read_scouts() and not self._follows
        began = self._clock()
        is_due = self._pace.begin_step(batch, at_once=self._has_new or self._follows)
        self._unsent_for -= 1
        # What is left of ended sequences is sent with the last step at the latest.
        if not is_due and self._unsent_for > 0 and decoding:
            return [], {}
        asking = self._round.with_drafters(decoding)
        plans = self._plan(asking, batch) if is_due and asking else []
        awaited = {plan.sequence for plan in self._awaited}
        rest = [sequence for sequence in asking if sequence not in awaited]
        # Rows that are only sent what is new, and whether a drafter lacks much of some row. The
        # answer to that request would take the place of the scouts'.
        others, is_behind = self._behind(rest, plans) if self._unsent_for <= 0 == self._unread_for else ([], False)
        found: Found = {}
        if awaited:
            if self._unread_for:
                # A drafter answers them first.
                self._read_scouts()
                self._unread_for = 0
            # All rows wait for these look-ups, but not for long texts of others.
            found = self._round.run(self._awaited if is_behind else plans)
            self._times.observe(batch, self._clock() - began)
        if is_behind or not awaited:
            scouts = [plan for plan in plans if plan.sequence not in awaited] if not self._unread_for else []
            self._round.send(scouts, others)
            if scouts:
                self._has_scouts, self._unread_for = True, MOST_UNREAD
        if not decoding:
            # There may be no next pass.
            self._round.begin_unawaited()
        return plans, found

    def _read_scouts(self) -> bool:
        had_scouts, self._has_scouts = self._has_scouts, False
        return had_scouts and self._round.read_scouts()

    def _behind(self, rest: Items[Sequence], plans: Items[DraftPlan]) -> tuple[list[Sequence], bool]:
        """Return the rows of ``rest`` to send without a plan, and whether one lacks SEND_BEHIND.

        A request costs more than its rows, so rows that lack half as much go along.
        """
        behind = self._round.num_behind(rest)
        if max(behind, default=0) < SEND_BEHIND:
            self._unsent_for = LOOK_EVERY
            return [], False
        # Long prompts are sent in parts.
        self._unsent_for = 1
        planned = {plan.sequence for plan in plans}
        others = [s for s, num in zip(rest, behind, strict=True) if 2 * num >= SEND_BEHIND and s not in planned]
        return others, True

    def _plan(self, asking: Items[Sequence], batch: int) -> list[DraftPlan]:
        """Return what rows ask, and note for what the next step waits."""
        self._pace.ask_all(asking)
        plans = self._round.plan(asking, batch)
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
        gain_s = self._yields.of(batch).gain_s(self._promised, batch, self._token_s(batch), self._costs)
        return bool(plans) and gain_s >= self._times.seconds(batch)

    def _token_s(self, batch: int) -> float:
        """Return the seconds in which a batch makes a token without look-ups."""
        return self._costs.step_s(batch) / batch

    def observe(self, trees: NextTrees) -> None:
        """Learn what look-ups add to the next step, whose trees these are."""
        if not self._awaited:
            return
        drafts = [draft for plan in self._awaited if (draft := trees.of(plan.sequence)) is not None]
        chances = self._round.chances(drafts)
        num_tokens, batch = sum(chances), self._batch
        self._yields.of(batch).observe(self._promised, num_tokens, len(chances))
        gain_s = saved_s(num_tokens, len(chances), batch, self._token_s(batch), self._costs)
        self._pace.observe_try(has_paid=gain_s >= self._times.seconds(batch))
        self._awaited = []
