"""The trees that the next step verifies, and the plans by which they were asked for."""

from __future__ import annotations

from verifier_svc.scheduling.draft import Draft, merge
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.draft_round import Found
from verifier_svc.speculation.plan import DraftPlan

# A batch slot and its generation.
Key = tuple[int, int]


class NextTrees:
    """By batch slot and generation."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self.plans: list[DraftPlan] = []
        # Whether drafters were asked, or could have been, since the last overlapped step.
        self.were_asked_for = False
        self._drafts: dict[Key, Draft] = {}
        # Drafts without a node that is worth its row.
        self._passed_over: dict[Key, Draft] = {}
        # Rows that asked, and whether the step waits for an answer.
        self.asked: dict[Key, bool] = {}
        # Rows for which a draft came, and such rows that got only their root.
        self.found: set[Key] = set()
        self.undrafted: set[Key] = set()

    def __bool__(self) -> bool:
        return bool(self._drafts)

    def of(self, sequence: Sequence) -> Draft | None:
        """Return the tree of a sequence; None means the root alone."""
        return self._drafts.get((sequence.batch_slot, sequence.generation))

    def passed_over(self, sequence: Sequence) -> Draft | None:
        """Return the draft that came for a sequence and is not worth verifying, if there is one."""
        return self._passed_over.get((sequence.batch_slot, sequence.generation))

    def clear(self) -> None:
        """Forget trees and plans: the step was made."""
        self._drafts, self._passed_over, self.plans, self.asked = {}, {}, [], {}
        self.were_asked_for = False

    def drop(self, drafter: int) -> None:
        """Drop the trees that have nodes of this drafter."""
        for drafts in (self._drafts, self._passed_over):
            for key in [key for key, draft in drafts.items() if drafter in draft.sources]:
                del drafts[key]

    def choose(self, found: Found, batch: int) -> None:
        """Merge the drafts of each row and keep the best nodes.

        With these, ``batch`` rows make the most tokens a second.

        Trees of a fixed shape keep all their nodes.
        """
        self.were_asked_for = True
        if not self.plans and not found:
            # A step has better to do than to merge nothing.
            self.found, self.undrafted, self.asked = set(), set(), {}
            self._drafts, self._passed_over = {}, {}
            return
        plans: dict[Key, list[DraftPlan]] = {}
        for plan in self.plans:
            plans.setdefault(plan.key, []).append(plan)
        self.asked = {key: any(plan.awaited for plan in mine) for key, mine in plans.items()}
        self.found = set(found)
        self.undrafted = {key for key, drafts in found.items() if all(draft.tree.num_nodes == 1 for draft in drafts)}
        drafts = {key: merge(drafts) for key, drafts in found.items() if key not in self.undrafted}
        most = {key: max(plan.most for plan in plans[key]) for key in drafts if key in plans}
        drafts = {key: draft.best(1 + most[key]) if key in most else draft for key, draft in drafts.items()}
        fixed = {plan.key for plan in self.plans if plan.bounds.is_fixed}
        cut = drafts if fixed.issuperset(drafts) else self._cut(drafts, fixed, batch)
        self._drafts = {key: draft for key, draft in cut.items() if draft.tree.num_nodes > 1}
        self._passed_over = {key: draft for key, draft in drafts.items() if key not in self._drafts}

    def _cut(self, drafts: dict[Key, Draft], fixed: set[Key], batch: int) -> dict[Key, Draft]:
        """Return the drafts without the nodes that are not worth their rows.

        Drafts in ``fixed`` stay as they are.
        """
        base = self._costs.base(batch)
        free = []
        for key, draft in drafts.items():
            free.append(draft.tree.num_nodes if key in fixed else 1)
            if key in fixed:
                more = sum(draft.chances) - 1
                base = base._replace(rows=base.rows + draft.tree.num_nodes - 1, tokens=base.tokens + more)
        counts = self._costs.best_counts(list(drafts.values()), base, free)
        return {key: draft.best(count) for (key, draft), count in zip(drafts.items(), counts, strict=True)}
