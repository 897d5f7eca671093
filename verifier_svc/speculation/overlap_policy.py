"""Decide whether steps overlap with the host's work, and who drafts in them.

Where they do not overlap, say why.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.batch_limit import BatchLimit
from verifier_svc.speculation.capture import Capture
from verifier_svc.speculation.controllers import DrafterControllers
from verifier_svc.speculation.next_trees import NextTrees
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.routing import DrafterRouting
from verifier_svc.speculation.row_state import RowStates


class OverlapObstacle(Enum):
    """Why the next step cannot overlap with the host's work.

    The values are the reasons in metrics.
    """

    # Logprobs of a prompt, or draft trees for a client: the host works between two steps.
    HOST_WORK = "host_work"
    NO_FREE_BLOCKS = "no_free_blocks"
    SEVERAL_DRAFTERS = "several_drafters"  # with a model each
    NOT_ATTACHED = "not_attached"
    OTHER_HIDDEN_STATES = "other_hidden_states"  # the target captures more than the drafter wants
    NO_DEVICE_MEMORY = "no_device_memory"  # the drafter is not on the target's GPU
    CATCHING_UP = "catching_up"
    UNANSWERED = "unanswered"  # the drafter may still read what it was sent
    NO_WAIT_BUDGET = "no_wait_budget"
    # The drafter owes KV entries, which it writes with ordinary requests only.
    UNDRAFTED_ROW = "undrafted_row"


class OverlapPolicy:
    """Decide whether the next steps overlap, and who drafts. Only the engine thread asks."""

    def __init__(
        self,
        routing: DrafterRouting,
        capture: Capture,
        trees: NextTrees,
        limit: BatchLimit,
        controllers: DrafterControllers,
        rows: RowStates,
    ) -> None:
        self._routing, self._capture, self._rows = routing, capture, rows
        self._trees, self._limit = trees, limit
        self.controllers = controllers

    def drafting(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> OverlapDrafting | OverlapObstacle:
        """Return who drafts while steps overlap, or what prevents the overlap.

        One model on the target's GPU drafts, or nobody.

        Look-up drafters are asked beside it (Lookups).

        ``waiting``: the sequences that could start now.
        """
        sequences = [*running, *waiting]
        if any(map(needs_host, sequences)):
            return OverlapObstacle.HOST_WORK
        if self._limit.is_exceeded(len(sequences)):
            return OverlapDrafting(is_above_limit=True)
        wanted = [(sequence, self._models_of(sequence)) for sequence in sequences]
        drafters = {drafter.number: drafter for _, found in wanted for drafter in found}
        if not drafters:
            return OverlapDrafting()
        if len(drafters) > 1:
            return OverlapObstacle.SEVERAL_DRAFTERS
        (drafter,) = drafters.values()
        attachment = drafter.attachment
        if attachment is None:
            return OverlapObstacle.NOT_ATTACHED
        obstacle = self._obstacle(attachment)
        if obstacle is not None:
            return obstacle
        undrafted = self._trees.undrafted if self._trees.were_asked_for else ()
        if any((sequence.batch_slot, sequence.generation) in undrafted for sequence, found in wanted if found):
            return OverlapObstacle.UNDRAFTED_ROW
        controller = self.controllers.of(drafter)
        if controller.rests and self._common_shape(sequences) is None:
            return OverlapDrafting(controller=controller)
        drafting = OverlapDrafting(drafter, attachment, controller=controller, captured=self._capture.layers)
        for sequence in running:
            self.start(sequence, drafting)
        return drafting

    def start(self, sequence: Sequence, drafting: OverlapDrafting) -> None:
        """Draft for a running sequence of a run if its request wants that."""
        if drafting.attachment is not None and self._models_of(sequence):
            drafting.add(sequence, self._own_shape(sequence))

    def joins(self, sequence: Sequence, drafting: OverlapDrafting) -> bool:
        """Return whether a sequence that waits may join a run.

        If not, the run has to end for it.
        """
        if needs_host(sequence):
            return False
        if drafting.is_above_limit:
            return True
        found = self._models_of(sequence)
        number = drafting.controller.number if drafting.controller is not None else 0
        return not found or [drafter.number for drafter in found] == [number]

    def choose(self, drafting: OverlapDrafting, num_sequences: int) -> bool:
        """Choose the shape of a run's next trees; return whether the run can go on with it.

        It is the requests' own shape if all that are drafted for ask for the same.
        """
        controller = drafting.controller
        if controller is None:
            return True
        drafting.is_controlled = drafting.common_shape is None
        if drafting.common_shape is not None:
            drafting.shape = drafting.common_shape
            return True
        drafting.shape = controller.choose(num_sequences)
        return drafting.shape == NO_DRAFT if drafting.drafter is None else not controller.rests

    def _obstacle(self, attachment: Attachment) -> OverlapObstacle | None:
        """Return what keeps a batch's one drafter from drafting in overlapped steps, or None."""
        if attachment.needs.captured_layers != self._capture.layers:
            return OverlapObstacle.OTHER_HIDDEN_STATES
        if not attachment.has_overlap_memory:
            return OverlapObstacle.NO_DEVICE_MEMORY
        if attachment.is_catching_up():
            return OverlapObstacle.CATCHING_UP
        if not attachment.has_answered():
            return OverlapObstacle.UNANSWERED
        if not attachment.can_afford_wait():
            return OverlapObstacle.NO_WAIT_BUDGET
        return None

    def _models_of(self, sequence: Sequence) -> Seq[DrafterHandle]:
        """Return the drafters of a row that have a model."""
        return self._routing.of_kind(sequence, has_model=True)

    def _own_shape(self, sequence: Sequence) -> Shape | None:
        """Return the shape that a request asks for; None if it leaves that to the server."""
        if sequence.speculation.shape is None:
            return None
        bounds = self._rows.of(sequence).bounds
        return bounds.of_row(True, bounds.max_depth, bounds.max_nodes - 1)

    def _common_shape(self, sequences: Seq[Sequence]) -> Shape | None:
        """Return the shape that all these sequences ask for if a model drafts for them.

        It is None if they differ.
        """
        common: Shape | None = None
        for sequence in sequences:
            if self._models_of(sequence):
                shape = self._own_shape(sequence)
                if shape is None or common not in (None, shape):
                    return None
                common = shape
        return common

    def still_drafts(self, drafting: OverlapDrafting, running: Seq[Sequence], waiting: Seq[Sequence]) -> bool:
        """Return whether a run would begin again with the same drafter, or again with none.

        ``waiting``: the sequences that could start, as for ``drafting``.
        """
        if not drafting.is_current or not self._routing.is_as_attached:
            return False
        if drafting.drafter is not None and not drafting.has_drafted and not any(map(self._models_of, waiting)):
            return False
        if drafting.is_resting and self._common_shape([*running, *waiting]) is not None:
            return False
        return self._limit.is_exceeded(len(running) + len(waiting)) == drafting.is_above_limit


def needs_host(sequence: Sequence) -> bool:
    """Return whether the host works on a sequence's logits or trees between two steps."""
    return sequence.wants_prompt_logprobs or sequence.submission.returns_trees
