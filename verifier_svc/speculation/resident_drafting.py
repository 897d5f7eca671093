"""Who drafts during a run of overlapped steps, what is asked of it, and what it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from foretoken.drafting import DeviceStep
from foretoken.resident import ResidentMemory, StreamOrder
from foretoken.tree import DraftTree
from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Row, Shape
from verifier_svc.scheduling.draft import Draft, DrafterShare
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.row_state import RowStates


class ResidentDrafting:
    """One run's. Used by the engine's thread alone.

    Args:
        rows: states of all rows.
        drafter: the drafter; None: plain decode.
        attachment: that drafter's when the run was planned.
        shapes: of the trees that sequences want, by slot; those of others are roots.
        drafts: trees for the first step, by slot.
        features: what the target is to capture.
        most_steps: for which the shapes are to hold; None: any number.
    """

    def __init__(
        self,
        rows: RowStates,
        drafter: DrafterHandle | None = None,
        attachment: Attachment | None = None,
        shapes: Mapping[int, Shape] | None = None,
        drafts: Mapping[int, Draft] | None = None,
        features: tuple[int, ...] = (),
        most_steps: int | None = None,
    ) -> None:
        self._states = rows
        self.drafter, self.attachment = drafter, attachment
        self.features = features
        self.most_steps = most_steps
        self._shapes, self._drafts = shapes or {}, drafts or {}
        self._rows: list[Row] = []
        # Blocks of each row that the drafter knows.
        self._num_blocks: list[int] = []
        self._has_begun = False

    @property
    def memory(self) -> ResidentMemory | None:
        """Where the drafter drafts; None: nobody does."""
        return self.attachment.transport.resident if self.attachment is not None else None

    @property
    def number(self) -> int:
        """Of the last step whose results were in that memory."""
        return self.attachment.resident_number if self.attachment is not None else 0

    @property
    def order(self) -> StreamOrder:
        return self.attachment.transport.order if self.attachment is not None else StreamOrder()

    @property
    def is_current(self) -> bool:
        """Whether the drafter is attached as it was when the run was planned."""
        return self.drafter is None or self.drafter.attachment is self.attachment

    @property
    def is_open(self) -> bool:
        """Whether the drafter is there, as far as can be seen at once."""
        return self.attachment is None or self.attachment.transport.is_open()

    def shape(self, sequence: Sequence) -> Shape:
        """Of the trees that a sequence wants."""
        return self._shapes.get(sequence.slot, NO_DRAFT)

    def tree(self, sequence: Sequence) -> DraftTree | None:
        """For the run's first step."""
        draft = self._drafts.get(sequence.slot)
        return draft.tree if draft is not None else None

    def is_for(self, sequence: Sequence) -> bool:
        """Whether a running sequence takes part in it, if with roots alone."""
        return sequence.slot in self._shapes

    def begin(self, sequences: Seq[Sequence]) -> None:
        """These are the run's seats."""
        if self.attachment is None:
            return
        sent = [self.attachment.sent.length(sequence) for sequence in sequences]
        size = self.attachment.sent.block_size
        self._num_blocks = [-(-length // size) for length in sent]
        self._rows = [
            Row(s, s.slot, s.generation, length, [], [], [], (), self.shape(s), False)
            for s, length in zip(sequences, sent, strict=True)
        ]

    def post(self, number: int, *, is_last: bool) -> None:
        """Ask for the trees behind step ``number``, which was launched. Where the drafter is gone nothing happens: the
        run is about to end. One that has attached anew meanwhile knows nothing of it."""
        if self.attachment is None or not self.is_current:
            return
        rows = []
        for index, row in enumerate(self._rows):
            blocks = self._blocks(row.sequence, self.attachment.sent.block_size)
            rows.append(row._replace(block_ids=blocks[self._num_blocks[index] :]))
            self._num_blocks[index] = max(self._num_blocks[index], len(blocks))
        self.attachment.post_resident(rows, DeviceStep(number, not self._has_begun, is_last))
        self._has_begun = True

    def _blocks(self, sequence: Sequence, block_size: int) -> list[int]:
        """Those that steps in flight may write to. More are in reserve, more than a request may name, and behind the
        context's end there are no entries."""
        # One that has ended needs no more, and one that is not drafted for none.
        if sequence.table is None or not self.is_for(sequence):
            return []
        assert self.memory is not None
        most = min(len(sequence.tokens) + MAX_IN_FLIGHT * self.memory.layout.tokens, sequence.max_len)
        return sequence.block_ids[: -(-most // block_size)]

    def observe(
        self, sequence: Sequence, num_nodes: int, num_matched: int, num_tokens: int
    ) -> tuple[DrafterShare, ...]:
        """Learn from a step, before its tokens are appended: they count as sent, since the next request is about
        them."""
        drafter = self.drafter
        if drafter is None or self.attachment is None or not self.is_for(sequence):
            return ()
        self.attachment.sent.mark(sequence.slot, sequence.generation, len(sequence.tokens) + num_tokens)
        if num_nodes <= 1:
            return ()
        share = DrafterShare(drafter.number, num_nodes - 1, tuple(range(1, num_matched + 1)))
        depth = min(self.shape(sequence).depth, num_nodes - 1)
        self._states.of(sequence).model_gate.observe(num_matched, depth)
        drafter.counters.add(share.num_drafted, share.accepted_depths)
        drafter.record.acceptance.observe(num_matched, depth)
        return (share,)
