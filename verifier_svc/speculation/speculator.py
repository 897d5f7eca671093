"""The policy of speculation.

It decides which rows draft, how wide, whom they wait for, and when plain decode is best.

Look-up drafters answer in microseconds: they are asked first, right after a step's tokens are
known, and waited for at once. Drafters with a model are asked next; where the server chooses for
itself, only for rows that are worth more with them. Whatever goes wrong with a drafter costs
root-only rows and a counter, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from functools import partial

from verifier_svc.drafters.attachment import AttachmentSettings
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.drafters.source import DraftSource
from verifier_svc.scheduling.draft import merge
from verifier_svc.scheduling.sequence import NO_BATCH_SLOT, Sequence
from verifier_svc.speculation.batch_limit import BatchLimit
from verifier_svc.speculation.capture import Capture
from verifier_svc.speculation.controllers import DrafterControllers
from verifier_svc.speculation.costs import DraftCosts, StepCosts
from verifier_svc.speculation.draft_round import Found, LookupRound, ModelRound
from verifier_svc.speculation.fallbacks import Fallbacks
from verifier_svc.speculation.lookup_record import LookupRecord
from verifier_svc.speculation.lookups import Lookups
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.ordinary_lookups import OrdinaryLookups
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.overlap_policy import OverlapPolicy
from verifier_svc.speculation.plan import DraftPlan
from verifier_svc.speculation.routing import AUTO, DrafterRouting
from verifier_svc.speculation.row_state import RowStates
from verifier_svc.speculation.tree_outcomes import TreeOutcomes


class Speculator:
    """Chooses each row's tree. Only the engine thread uses it."""

    def __init__(
        self,
        sources: Seq[DraftSource],
        costs: StepCosts,
        settings: AttachmentSettings,
        bounds: TreeBounds,
        *,
        max_batch_size: int,
        limit_s: float = math.inf,
        controller_log: str = "",
    ) -> None:
        """
        Args:
            max_batch_size: the largest batch to draft for; 0: no limit.
            limit_s: seconds that a step should take at most with its prompts.
            controller_log: begins the names of the controllers' logs; empty: they have none.
        """
        self.costs = DraftCosts(costs, bounds)
        self.limit = BatchLimit(max_batch_size)
        self.rows = RowStates(bounds)
        self._routing = DrafterRouting(partial(DrafterHandle, settings=settings), self._pays, self.rows)
        self.hidden_states = Capture(self._routing)
        self.trees = NextTrees(self.costs)
        self.overlap = OverlapPolicy(
            self._routing,
            self.hidden_states,
            self.trees,
            self.limit,
            DrafterControllers(bounds, self.costs.plain_step_s, limit_s, controller_log),
            self.rows,
        )
        self.fallbacks = Fallbacks(self._routing, self.trees, self.limit)
        shared = (self._routing, self.rows, self.hidden_states, self.costs, bounds)
        self.lookup_round, self.model_round = LookupRound(*shared), ModelRound(*shared)
        self.outcomes = TreeOutcomes(self._routing, self.lookup_round, self.model_round)
        self.bounds = bounds
        self._lookups = OrdinaryLookups(self.lookup_round, self.costs, settings.clock)
        self._lookup_record = LookupRecord()
        # What look-up drafters have for the next step.
        self._found: Found = {}
        # Rows that the next steps will have.
        self._batch = 1
        for source in sources:
            self.add_source(source)

    @property
    def drafters(self) -> Seq[DrafterHandle]:
        """All drafters that there were, by number. Any thread may read their figures."""
        return self._routing.drafters

    def drafter(self, name: str) -> DrafterHandle:
        """Return the drafter of this name.

        Any thread may ask. Raises KeyError if there never was one.
        """
        return {drafter.name: drafter for drafter in self.drafters}[name]

    def add_source(self, source: DraftSource) -> None:
        """Add a drafter. Raises as DrafterRouting.add."""
        self._routing.add(source)

    def remove_source(self, name: str) -> DraftSource:
        """Remove a drafter; return its source, which the caller closes outside the engine's thread.

        Rows that wait with a tree of it decode plainly in the next step. Raises
        NotFoundError if there is none.
        """
        drafter = self._routing.remove(name)
        self.trees.drop(drafter.number)
        return drafter.source

    def begin_step(self, sequences: Seq[Sequence]) -> None:
        """Choose the drafters of a step, and the layers whose hidden states the target captures.

        Called once a step, before it.
        """
        self._routing.begin_step(sequences)
        self.hidden_states.begin_step(sequences)

    def wants_drafts(self, sequence: Sequence) -> bool:
        """Return whether this request asked for speculation at all."""
        return self._routing.is_wanted(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that ends.

        Its last tokens go to its drafters with their next requests.
        """
        self.rows.forget(sequence)
        self._routing.forget(sequence)
        if sequence.batch_slot == NO_BATCH_SLOT:
            return
        for drafter in self.drafters:
            if drafter.attachment is not None:
                drafter.attachment.finish(sequence, self.hidden_states.layers)

    def send_prompts(self, prefilling: Seq[Sequence], num_soon: int) -> None:
        """Send drafters the prompts that this step computes: they learn them while the target does.

        Drafters that want hidden states get them by ``post``, when there are some. ``num_soon``:
        sequences that the batch will have, by which is decided whether a model pays for new ones.
        """
        self._batch = max(num_soon, 1)
        self._lookups.send_prompts(prefilling)
        for drafter, attachment in self.model_round.attached():
            if not attachment.needs.captured_layers:
                attachment.post(self.model_round.rows_to_send(drafter, attachment, prefilling))

    def learn_beside(self) -> None:
        """Let look-up drafters in this process learn and answer scouts beside the target's pass."""
        self._lookups.learn_beside()

    def post(self, decoding: Seq[Sequence], prefilling: Seq[Sequence]) -> None:
        """Ask for the next step's trees.

        ``decoding``: sequences whose next step is a decode step; ``prefilling``: those in the
        middle of their prompt.
        """
        self.costs.begin_step(self.drafters, len(decoding))
        self.model_round.read_scouts()
        if self.limit.count(len(decoding)):
            # True plain decode. Drafters are sent these tokens when speculation returns.
            decoding = ()
        self._batch = batch = max(len(decoding), 1)
        lookup_plans, self._found = self._lookups.find(decoding, batch)
        drafting = self.model_round.with_drafters(decoding)
        plans = self.model_round.plan(drafting, batch)
        plans = [plan for plan in plans if not self._is_served(plan, batch)]
        plans = self.model_round.worth_waiting(plans, batch)
        self.model_round.post(plans, drafting, prefilling, self.trees.undrafted)
        self.trees.plans = [*plans, *lookup_plans]
        for sequence in (*decoding, *prefilling):
            self.hidden_states.forget_sent(sequence)

    def _is_served(self, plan: DraftPlan, batch: int) -> bool:
        """Return whether a row has a draft that promises as much as the model's.

        It is a row for which the server chooses.
        """
        found = self._found.get(plan.key)
        if found is None or plan.sequence.speculation.drafter != AUTO or plan.bounds.is_fixed:
            return False
        return self.costs.best_rate(merge(found).best(1 + plan.most), batch) >= max(plan.rate, 1.0)

    @property
    def waits_for_model(self) -> bool:
        """Return whether ``collect`` will wait for a drafter with a model."""
        return any(attachment.is_awaited for _, attachment in self.model_round.attached())

    def collect(self) -> None:
        """Wait for the trees that were asked for and keep the sound ones.

        ``trees.of`` returns them afterwards.
        """
        found, self._found = self._found, {}
        for _, attachment in self.model_round.attached():
            self.model_round.collect(attachment, found)
        self.costs.end_waits(self.drafters)
        self.trees.choose(found, self._batch)
        self._lookups.observe(self.trees)

    def begin_overlap(self, drafting: OverlapDrafting, running: Seq[Sequence], max_depth: int) -> Lookups:
        """Begin a run of overlapped steps. Return its look-ups, with the trees of the next step.

        Args:
            running: the sequences that run.
            max_depth: most edges from the root of a tree in overlapped steps.
        """
        found = {sequence: draft for sequence in running if (draft := self.trees.of(sequence)) is not None}
        self.trees.clear()
        return Lookups(
            self.lookup_round,
            self.costs,
            self._lookup_record,
            drafting,
            found,
            max_depth=max_depth,
            is_on=not drafting.is_above_limit,
        )

    def end_overlap(self, lookups: Lookups, num_steps: int, decoding: Seq[Sequence]) -> None:
        """Count ``num_steps`` overlapped steps, after which ``decoding`` still run."""
        lookups.end(num_steps, decoding)
        self.costs.begin_step(self.drafters, len(decoding), num_steps)

    def _pays(self, drafter: DrafterHandle) -> bool:
        attachment = drafter.attachment
        if attachment is not None and attachment.has_overlap_memory:
            # In overlapped steps the controller decides, for the whole batch.
            return True
        return self.model_round.pays(drafter, self._batch)
