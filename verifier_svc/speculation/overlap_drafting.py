"""Say who drafts in overlapped steps, for which sequences, in which shape, and at what cost."""

from __future__ import annotations

from foretoken.overlap_memory import OverlapMemory
from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.controllers import DrafterController
from verifier_svc.speculation.costs import DraftCosts


class OverlapDrafting:
    """The drafting of one run of overlapped steps. Only the engine thread uses it.

    Args:
        drafter: the drafter. None: plain decode.
        attachment: the drafter's attachment when the run began.
        controller: chooses the shape of the batch's trees; without a drafter, when to draft again.
        captured: layers whose hidden states the target captures.
        is_above_limit: whether the batch is too large to draft for.
    """

    def __init__(
        self,
        drafter: DrafterHandle | None = None,
        attachment: Attachment | None = None,
        *,
        controller: DrafterController | None = None,
        captured: tuple[int, ...] = (),
        is_above_limit: bool = False,
    ) -> None:
        self.drafter, self.attachment = drafter, attachment
        self.controller = controller
        self.captured_layers = captured
        self.is_above_limit = is_above_limit
        # The shape of the trees that the next request asks for.
        self.shape = NO_DRAFT
        # Whether the controller chose it.
        self.is_controlled = False
        # The sequences that are drafted for, with the shapes that their requests ask for.
        self._drafted: dict[Sequence, Shape | None] = {}
        # These shapes. None: not known.
        self._own_shapes: set[Shape | None] | None = None

    @property
    def memory(self) -> OverlapMemory | None:
        """Return the memory that the drafter drafts in. None: no drafter takes part."""
        return self.attachment.transport.overlap_memory if self.attachment is not None else None

    @property
    def number(self) -> int:
        """Return the number of the last step whose results were in that memory."""
        return self.attachment.device_step_number if self.attachment is not None else 0

    @property
    def drafter_number(self) -> int:
        """Return the drafter's number, by which its tokens are marked; 0 without a drafter."""
        return self.drafter.number if self.drafter is not None else 0

    @property
    def is_current(self) -> bool:
        """Return whether the drafter still has the attachment that the run began with."""
        return self.drafter is None or self.drafter.attachment is self.attachment

    @property
    def is_open(self) -> bool:
        """Return whether the drafter's transport is open, as far as a quick check shows."""
        return self.attachment is None or self.attachment.transport.is_open()

    @property
    def has_drafted(self) -> bool:
        """Return whether any running sequence is drafted for."""
        return bool(self._drafted)

    @property
    def is_resting(self) -> bool:
        """Return whether steps go on without the drafter, as its drafts have not paid for long."""
        return self.drafter is None and self.controller is not None

    @property
    def common_shape(self) -> Shape | None:
        """Return the shape that all sequences ask for that are drafted for.

        It is None if they differ or leave it open.
        """
        if self._own_shapes is None:
            self._own_shapes = set(self._drafted.values())
        return next(iter(self._own_shapes)) if len(self._own_shapes) == 1 else None

    def is_for(self, sequence: Sequence) -> bool:
        """Return whether a running sequence is drafted for, even if only with roots."""
        return sequence in self._drafted

    def shape_of(self, sequence: Sequence) -> Shape:
        """Return the shape of the trees to request for a sequence."""
        if not self.is_for(sequence):
            return NO_DRAFT
        most = sequence.speculation.max_draft_tokens
        if most is None or most >= self.shape.nodes - 1:
            return self.shape
        return Shape(1 + most, min(self.shape.depth, max(most, 1)), self.shape.branches)

    def suits(self, num_sequences: int) -> bool:
        """Return whether a batch of this size may draft in the shape of the next trees."""
        return not self.is_controlled or self.controller is None or self.controller.suits(self.shape, num_sequences)

    def expected_tokens(self, sequence: Sequence) -> float:
        """Return the tokens that a step with the drafter's tree should yield for a sequence."""
        shape = self.shape_of(sequence)
        if shape == NO_DRAFT or self.controller is None:
            return 1.0
        return self.controller.expected_tokens(shape)

    def draft_s(self, batch: int) -> float:
        """Return the seconds that a step of ``batch`` sequences waits for the drafter's trees."""
        if self.shape == NO_DRAFT or self.controller is None:
            return 0.0
        return self.controller.draft_s(self.shape, batch)

    def step_s(self, shape: Shape, batch: int, costs: DraftCosts) -> float:
        """Return the seconds that a step of ``batch`` sequences should take without prompts."""
        if self.controller is None:
            return costs.plain_step_s(batch)
        return self.controller.step_s(shape, batch)

    def add(self, sequence: Sequence, shape: Shape | None = None) -> None:
        """Draft for a running sequence, from when it joins.

        The drafter was sent all its tokens by then.

        ``shape``: what its request asks for; None: it leaves that to the server.
        """
        self._drafted[sequence] = shape
        self._own_shapes = None

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._drafted.pop(sequence, None)
        self._own_shapes = None
