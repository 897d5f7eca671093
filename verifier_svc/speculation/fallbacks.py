"""Say why a decode step had no draft for a sequence whose request wanted one."""

from __future__ import annotations

from foretoken.results import FallbackReason
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.batch_limit import BatchLimit
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.routing import DrafterRouting


class Fallbacks:
    """Name reasons. The engine thread asks, before the tokens of the step are appended."""

    def __init__(self, routing: DrafterRouting, trees: NextTrees, limit: BatchLimit) -> None:
        self._routing, self._trees, self._limit = routing, trees, limit

    def of_step(self, sequence: Sequence) -> FallbackReason:
        """Return the reason in an ordinary step."""
        if self._limit.was_exceeded:
            return FallbackReason.BATCH_LIMIT
        if not self._routing.may_use(sequence):
            return FallbackReason.NO_DRAFTER
        if sequence.max_new_tokens <= 1:
            return FallbackReason.LAST_TOKEN
        if not self._trees.were_asked_for:
            return FallbackReason.FIRST_STEP
        is_awaited = None
        if self._trees.asked:
            key = sequence.batch_slot, sequence.generation
            is_awaited = self._trees.asked.get(key)
            if key in self._trees.undrafted or is_awaited is False:
                return FallbackReason.NOTHING_FOUND
            if is_awaited and key not in self._trees.found:
                return FallbackReason.NO_DRAFT_IN_TIME
        if is_awaited is None and not self._routing.of_kind(sequence, has_model=True):
            # A look-up drafter that found nothing for long is asked less often.
            return FallbackReason.NOTHING_FOUND
        return FallbackReason.DRAFTS_DO_NOT_PAY

    def of_overlapped(
        self,
        sequence: Sequence,
        *,
        drafting: OverlapDrafting,
        shape: Shape,
        has_shared: bool,
        is_first: bool = False,
    ) -> FallbackReason:
        """Return the reason in an overlapped step.

        Args:
            shape: the trees' shape in this step.
            has_shared: whether batch rows shared the step's rows, and the trees came in time.
            is_first: whether it is the sequence's first step of this run.
        """
        if drafting.is_above_limit:
            return FallbackReason.BATCH_LIMIT
        if not self._routing.may_use(sequence):
            return FallbackReason.NO_DRAFTER
        if sequence.max_new_tokens <= 1:
            return FallbackReason.LAST_TOKEN
        if drafting.is_for(sequence):
            if shape == NO_DRAFT:
                return FallbackReason.DRAFTS_DO_NOT_PAY
            if is_first:
                return FallbackReason.FIRST_STEP
            # Of shared rows, drafts that promise more got them.
            return FallbackReason.DRAFTS_DO_NOT_PAY if has_shared else FallbackReason.NO_DRAFT_IN_TIME
        # Look-up drafters that found nothing rest, or a model whose drafts did not pay for long.
        return FallbackReason.DRAFTS_DO_NOT_PAY if drafting.is_resting else FallbackReason.NOTHING_FOUND
