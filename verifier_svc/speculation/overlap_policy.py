"""Whether steps may overlap with the host's work, and why not where they may not."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.batch_limit import BatchLimit
from verifier_svc.speculation.capture import Capture
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.resident_drafting import ResidentDrafting
from verifier_svc.speculation.routing import AUTO, DrafterRouting
from verifier_svc.speculation.row_state import RowStates

# Steps that overlap with the shapes that paid when they began.
PLAN_HOLDS = 64
# The same beside look-up drafters that had found nothing: they must see the tokens to find something.
LOOKUP_RESTS = 16


class OverlapBlock(Enum):
    """Why the next step cannot overlap with the host's work. The values are the reasons in metrics."""

    DISTURBED = "disturbed"  # a message or a deadline wants the engine
    NOT_STEADY = "not_steady"  # a prompt, a grammar, logprobs, or a sequence that may be admitted
    NO_FREE_BLOCKS = "no_free_blocks"
    SEVERAL_DRAFTERS = "several_drafters"
    LOOKUP_DRAFTER = "lookup_drafter"  # it must see the tokens of a step before it drafts the next
    NOT_ATTACHED = "not_attached"
    OTHER_HIDDEN_STATES = "other_hidden_states"  # the target captures more than the one drafter wants
    NO_DEVICE_MEMORY = "no_device_memory"  # the drafter is not on the target's GPU
    FINAL_UPDATE = "final_update"  # a sequence has just ended, and the drafter must be sent its last tokens
    CATCHING_UP = "catching_up"
    UNANSWERED = "unanswered"  # the drafter may still read what it was sent
    NO_WAIT_BUDGET = "no_wait_budget"
    UNDRAFTED_ROW = "undrafted_row"  # the drafter owes KV entries, which it writes with ordinary requests only
    UNSENT_TOKENS = "unsent_tokens"


class OverlapPolicy:
    """Used by the engine thread alone, after the trees of an ordinary step were collected."""

    def __init__(
        self,
        routing: DrafterRouting,
        rows: RowStates,
        capture: Capture,
        trees: NextTrees,
        bounds: TreeBounds,
        limit: BatchLimit,
    ) -> None:
        self._routing, self._rows, self._capture = routing, rows, capture
        self._trees, self._bounds, self._limit = trees, bounds, limit

    def drafting(self, decoding: Seq[Sequence]) -> ResidentDrafting | OverlapBlock:
        """Return who drafts while steps overlap: one model on the target's GPU, or nobody; else what prevents it.

        The trees that were collected are those of the first step. Those of later steps have the shapes that were asked
        for.
        """
        if self._limit.is_exceeded(len(decoding)):
            return ResidentDrafting(self._rows)
        wanted = [(sequence, self._drafters_of(sequence)) for sequence in decoding]
        drafters = {drafter.number: drafter for _, found in wanted for drafter in found}
        rests = any(len(found) < len(self._routing.of(sequence)) for sequence, found in wanted)
        if not drafters:
            return ResidentDrafting(self._rows, most_steps=LOOKUP_RESTS if rests else None)
        if len(drafters) > 1:
            return OverlapBlock.SEVERAL_DRAFTERS
        (drafter,) = drafters.values()
        drafted = [sequence for sequence, found in wanted if found]
        attachment = drafter.attachment
        if attachment is None:
            return OverlapBlock.NOT_ATTACHED
        block = self._block(drafter, attachment, drafted)
        if block is not None:
            return block
        shapes = self._shapes(drafter, drafted)
        drafts = {s.slot: draft for s in drafted if (draft := self._trees.of(s)) is not None}
        most_steps = LOOKUP_RESTS if rests else None if self._bounds.is_fixed else PLAN_HOLDS
        return ResidentDrafting(self._rows, drafter, attachment, shapes, drafts, self._capture.layers, most_steps)

    def _block(self, drafter: DrafterHandle, attachment: Attachment, drafted: Seq[Sequence]) -> OverlapBlock | None:
        """Return what keeps the one drafter of these sequences from drafting ahead, or None."""
        if not drafter.has_model:
            return OverlapBlock.LOOKUP_DRAFTER
        if attachment.needs.features != self._capture.layers:
            return OverlapBlock.OTHER_HIDDEN_STATES
        if not attachment.has_resident:
            return OverlapBlock.NO_DEVICE_MEMORY
        if attachment.final_updates:
            return OverlapBlock.FINAL_UPDATE
        if attachment.is_catching_up():
            return OverlapBlock.CATCHING_UP
        if not attachment.has_answered():
            return OverlapBlock.UNANSWERED
        if not attachment.can_afford_wait():
            return OverlapBlock.NO_WAIT_BUDGET
        if any((sequence.slot, sequence.generation) in self._trees.undrafted for sequence in drafted):
            return OverlapBlock.UNDRAFTED_ROW
        if any(attachment.sent.length(sequence) != len(sequence.tokens) for sequence in drafted):
            return OverlapBlock.UNSENT_TOKENS
        return None

    def _shapes(self, drafter: DrafterHandle, drafted: Seq[Sequence]) -> dict[int, Shape]:
        """Return the shapes of these sequences' trees by batch slot."""
        reaches = {plan.sequence.slot: plan.reach for plan in self._trees.plans if drafter in plan.drafters}
        shapes: dict[int, Shape] = {}
        for sequence in drafted:
            # The device cuts a tree to what may still be emitted.
            most = sequence.speculation.max_draft_tokens
            most = self._bounds.max_nodes - 1 if most is None else min(most, self._bounds.max_nodes - 1)
            reach = most if self._bounds.is_fixed else reaches.get(sequence.slot, 0)
            shapes[sequence.slot] = self._bounds.of_row(True, reach, most) if reach else NO_DRAFT
        return shapes

    def _drafters_of(self, sequence: Sequence) -> Seq[DrafterHandle]:
        """Return the drafters of a row that must be asked before each step.

        Where the server chooses, it leaves a look-up drafter aside for a run if that has found nothing for the next
        step, and for a few steps if the client has said what comes.
        """
        drafters = self._routing.of(sequence)
        draft = self._trees.of(sequence)
        has_prediction = sequence.prediction_ids and self._rows.of(sequence).lookup_gate.expects_drafts
        if sequence.speculation.drafter != AUTO or has_prediction:
            return drafters
        proposed = draft.sources if draft is not None else []
        return [drafter for drafter in drafters if drafter.has_model or drafter.number in proposed]

    def still_drafts(self, drafting: ResidentDrafting, decoding: Seq[Sequence]) -> bool:
        """Return whether the sequences of a run that still run would be drafted for as they are.

        The same drafters must be attached as when it began, and no end may have taken away the last sequence that has
        a drafter, or the batch below the limit of drafting.
        """
        if not drafting.is_current or not self._routing.is_as_attached:
            return False
        if drafting.drafter is not None:
            return any(drafting.is_for(sequence) for sequence in decoding)
        return self._limit.is_exceeded(len(decoding)) or not any(map(self._drafters_of, decoding))
