"""Learn from what became of drafted trees.

This keeps the acceptance of rows and drafters, and drafters' counters.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.tree import depths
from verifier_svc.scheduling.draft import Draft, DrafterShare
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.draft_round import LookupRound, ModelRound
from verifier_svc.speculation.routing import DrafterRouting


class TreeOutcomes:
    """Learn from verified trees. Only the engine thread uses it."""

    def __init__(self, routing: DrafterRouting, lookup_round: LookupRound, model_round: ModelRound) -> None:
        self._routing, self._lookup_round, self._model_round = routing, lookup_round, model_round

    def observe(self, sequence: Sequence, draft: Draft, matched: Seq[int], shares: Seq[DrafterShare]) -> None:
        """Learn from a verified tree, in which the walk went through the nodes ``matched``."""
        for share in shares:
            self._routing.drafters[share.drafter - 1].counters.add(share.num_drafted, share.accepted_depths)
        self._learn(sequence, draft, matched, shares)

    def observe_passed_over(self, sequence: Sequence, draft: Draft, tokens: Seq[int]) -> None:
        """Learn from a tree that was not verified: the text went on with these tokens."""
        draft = draft.to_depth(len(tokens))
        matched = draft.along(tokens)
        self._learn(sequence, draft, matched, draft.shares(matched))

    def _learn(self, sequence: Sequence, draft: Draft, matched: Seq[int], shares: Seq[DrafterShare]) -> None:
        drafters, depth = self._routing.drafters, int(depths(draft.tree.parents).max())
        has_model = any(drafters[share.drafter - 1].has_model for share in shares)
        draft_round = self._model_round if has_model else self._lookup_round
        draft_round.gate(sequence).observe(len(matched), depth)
        for share in shares:
            record = drafters[share.drafter - 1].record
            if len(shares) == 1:
                record.acceptance.observe(len(matched), depth)
                # In a merged tree a node that several drafters proposed
                # counts for one of them only.
                record.watch.observe(len(share.accepted_depths))
            mine = [node for node, source in enumerate(draft.sources) if source == share.drafter]
            record.estimates.observe([draft.scores[node] for node in mine], [node in matched for node in mine])
