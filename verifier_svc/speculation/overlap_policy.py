"""Decide whether steps overlap with the host's work, who drafts in them, and why not where they do not."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.batch_limit import BatchLimit
from verifier_svc.speculation.capture import Capture
from verifier_svc.speculation.controllers import DrafterControllers
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.resident_drafting import ResidentDrafting
from verifier_svc.speculation.routing import AUTO, DrafterRouting
from verifier_svc.speculation.row_state import RowStates

# Steps that overlap beside look-up drafters that had found nothing: they must see the tokens to find something.
LOOKUP_RESTS = 16


# Sequences up to which a look-up drafter is asked beside a model: it must see a step's tokens, so the whole batch then
# waits for the host.
MOST_WITH_LOOKUP = 4


class OverlapBlock(Enum):
    """Why the next step cannot overlap with the host's work. The values are the reasons in metrics."""

    HOST_WORK = "host_work"  # logprobs of a prompt: the host works between two steps
    NO_FREE_BLOCKS = "no_free_blocks"
    SEVERAL_DRAFTERS = "several_drafters"
    LOOKUP_DRAFTER = "lookup_drafter"  # it must see the tokens of a step before it drafts the next
    NOT_ATTACHED = "not_attached"
    OTHER_HIDDEN_STATES = "other_hidden_states"  # the target captures more than the one drafter wants
    NO_DEVICE_MEMORY = "no_device_memory"  # the drafter is not on the target's GPU
    CATCHING_UP = "catching_up"
    UNANSWERED = "unanswered"  # the drafter may still read what it was sent
    NO_WAIT_BUDGET = "no_wait_budget"
    UNDRAFTED_ROW = "undrafted_row"  # the drafter owes KV entries, which it writes with ordinary requests only


class OverlapPolicy:
    """Used by the engine thread alone, between two steps."""

    def __init__(
        self,
        routing: DrafterRouting,
        rows: RowStates,
        capture: Capture,
        trees: NextTrees,
        limit: BatchLimit,
        controllers: DrafterControllers,
    ) -> None:
        self._routing, self._rows, self._capture = routing, rows, capture
        self._trees, self._limit = trees, limit
        self.controllers = controllers

    def drafting(
        self, running: Seq[Sequence], waiting: Seq[Sequence], *, has_asked: bool
    ) -> ResidentDrafting | OverlapBlock:
        """Return who drafts while steps overlap: one model on the target's GPU, or nobody; else what prevents it.

        Args:
            waiting: the sequences that could start now.
            has_asked: whether the last step asked the look-up drafters.
        """
        sequences = [*running, *waiting]
        if any(map(needs_host, sequences)):
            return OverlapBlock.HOST_WORK
        if self._limit.is_exceeded(len(sequences)):
            return ResidentDrafting(is_above_limit=True)
        is_large = len(sequences) > MOST_WITH_LOOKUP
        wanted = [(sequence, self._drafters_of(sequence, is_large=is_large)) for sequence in sequences]
        drafters = {drafter.number: drafter for _, found in wanted for drafter in found}
        rests = any(
            len(found) < len(self._routing.of(sequence))
            for sequence, found in wanted
            if not (is_large and any(drafter.has_model for drafter in found))
        )
        if rests and not has_asked:
            return OverlapBlock.LOOKUP_DRAFTER
        most_steps = LOOKUP_RESTS if rests else None
        if not drafters:
            return ResidentDrafting(most_steps=most_steps)
        if len(drafters) > 1:
            return OverlapBlock.SEVERAL_DRAFTERS
        (drafter,) = drafters.values()
        attachment = drafter.attachment
        if attachment is None:
            return OverlapBlock.NOT_ATTACHED
        block = self._block(drafter, attachment)
        if block is not None:
            return block
        undrafted = self._trees.undrafted if has_asked else ()
        if any((sequence.slot, sequence.generation) in undrafted for sequence, found in wanted if found):
            return OverlapBlock.UNDRAFTED_ROW
        controller = self.controllers.of(drafter)
        if controller.rests:
            return ResidentDrafting(controller=controller, most_steps=most_steps, is_large=is_large)
        drafting = ResidentDrafting(
            drafter,
            attachment,
            controller=controller,
            captured=self._capture.layers,
            most_steps=most_steps,
            is_large=is_large,
        )
        for sequence in running:
            self.start(sequence, drafting)
        return drafting

    def start(self, sequence: Sequence, drafting: ResidentDrafting) -> None:
        """Draft for a running sequence of a run if its request wants that."""
        if drafting.attachment is not None and self._drafters_of(sequence):
            drafting.add(sequence)

    def joins(self, sequence: Sequence, drafting: ResidentDrafting) -> bool:
        """Return whether a sequence that waits may join a run; if not, the run has to end for it."""
        if needs_host(sequence):
            return False
        if drafting.is_above_limit:
            return True
        found = self._drafters_of(sequence, is_large=drafting.is_large)
        rests = len(found) < len(self._routing.of(sequence)) and not (
            drafting.is_large and any(drafter.has_model for drafter in found)
        )
        if rests and drafting.most_steps is None:
            # A look-up drafter may rest for a few steps only.
            return False
        number = drafting.controller.number if drafting.controller is not None else 0
        return not found or [drafter.number for drafter in found] == [number]

    def choose(self, drafting: ResidentDrafting, num_sequences: int) -> bool:
        """Choose the shape of a run's next trees; return whether the run can go on with it."""
        controller = drafting.controller
        if controller is None:
            return True
        drafting.shape = controller.choose(num_sequences)
        return drafting.shape == NO_DRAFT if drafting.drafter is None else not controller.rests

    def _block(self, drafter: DrafterHandle, attachment: Attachment) -> OverlapBlock | None:
        """Return what keeps the one drafter of a batch from drafting ahead, or None."""
        if not drafter.has_model:
            return OverlapBlock.LOOKUP_DRAFTER
        if attachment.needs.features != self._capture.layers:
            return OverlapBlock.OTHER_HIDDEN_STATES
        if not attachment.has_resident:
            return OverlapBlock.NO_DEVICE_MEMORY
        if attachment.is_catching_up():
            return OverlapBlock.CATCHING_UP
        if not attachment.has_answered():
            return OverlapBlock.UNANSWERED
        if not attachment.can_afford_wait():
            return OverlapBlock.NO_WAIT_BUDGET
        return None

    def _drafters_of(self, sequence: Sequence, *, is_large: bool = False) -> Seq[DrafterHandle]:
        """Return the drafters of a row that must be asked before each step.

        Where the server chooses, it leaves a look-up drafter aside for a run if that has found nothing for the next
        step, and for a few steps if the client has said what comes. Beside a model it does so in any large batch.
        """
        drafters = self._routing.of(sequence)
        draft = self._trees.of(sequence)
        has_prediction = sequence.prediction_ids and self._rows.of(sequence).lookup_gate.expects_drafts
        if sequence.speculation.drafter != AUTO or has_prediction:
            return drafters
        if is_large and any(drafter.has_model for drafter in drafters):
            return [drafter for drafter in drafters if drafter.has_model]
        proposed = draft.sources if draft is not None else []
        return [drafter for drafter in drafters if drafter.has_model or drafter.number in proposed]

    def still_drafts(self, drafting: ResidentDrafting, running: Seq[Sequence], waiting: Seq[Sequence]) -> bool:
        """Return whether a run would begin again with the same drafter, or again with none.

        ``waiting``: the sequences that could start, as for ``drafting``.
        """
        if not drafting.is_current or not self._routing.is_as_attached:
            return False
        if drafting.drafter is not None and not drafting.has_drafted and not any(map(self._drafters_of, waiting)):
            return False
        return self._limit.is_exceeded(len(running) + len(waiting)) == drafting.is_above_limit


def needs_host(sequence: Sequence) -> bool:
    """Return whether the host works on a sequence's logits between two steps."""
    return sequence.wants_prompt_logprobs
