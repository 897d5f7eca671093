"""Request drafts during a run of overlapped steps, and record what the drafter was sent."""

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
    """The drafting of one run. Only the engine thread uses it.

    Args:
        rows: states of all rows.
        drafter: the drafter. None: plain decode.
        attachment: the drafter's attachment when the run was planned.
        shapes: shapes of the requested trees, by batch slot. Other sequences get roots.
        drafts: trees for the first step, by batch slot.
        features: layers whose hidden states the target captures.
        most_steps: most steps for which the shapes hold. None: any number.
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
        """Return the memory that the drafter drafts in. None: no drafter takes part."""
        return self.attachment.transport.resident if self.attachment is not None else None

    @property
    def number(self) -> int:
        """Return the number of the last step whose results were in that memory."""
        return self.attachment.resident_number if self.attachment is not None else 0

    @property
    def order(self) -> StreamOrder:
        return self.attachment.transport.order if self.attachment is not None else StreamOrder()

    @property
    def is_current(self) -> bool:
        """Return whether the drafter still has the attachment that the run was planned with."""
        return self.drafter is None or self.drafter.attachment is self.attachment

    @property
    def is_open(self) -> bool:
        """Return whether the drafter's transport is open, as far as a quick check shows."""
        return self.attachment is None or self.attachment.transport.is_open()

    def shape(self, sequence: Sequence) -> Shape:
        """Return the shape of the trees to request for a sequence."""
        return self._shapes.get(sequence.slot, NO_DRAFT)

    def tree(self, sequence: Sequence) -> DraftTree | None:
        """Return a sequence's tree for the run's first step, or None."""
        draft = self._drafts.get(sequence.slot)
        return draft.tree if draft is not None else None

    def is_for(self, sequence: Sequence) -> bool:
        """Return whether a running sequence is drafted for, even if only with roots."""
        return sequence.slot in self._shapes

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Start the run with one seat for each of ``sequences``."""
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
        """Request the trees that follow step ``number``, which was launched.

        Does nothing if the drafter has detached, because the run is about to end, or has attached
        again, because it then does not know the run.
        """
        if self.attachment is None or not self.is_current:
            return
        rows = []
        for index, row in enumerate(self._rows):
            blocks = self._blocks(row.sequence, self.attachment.sent.block_size)
            rows.append(row._replace(block_ids=blocks[self._num_blocks[index] :]))
            self._num_blocks[index] = max(self._num_blocks[index], len(blocks))
        self.attachment.post_resident(rows, DeviceStep(number, not self._has_begun, is_last, len(rows)))
        self._has_begun = True

    def _blocks(self, sequence: Sequence, block_size: int) -> list[int]:
        """Return the blocks that steps in flight may write to.

        More blocks are reserved, but a request may not name all of them, and no KV entries lie
        after the context's end.
        """
        # A sequence that has ended, or is not drafted for, needs no blocks.
        if sequence.table is None or not self.is_for(sequence):
            return []
        assert self.memory is not None
        most = min(len(sequence.tokens) + MAX_IN_FLIGHT * self.memory.layout.tokens, sequence.max_len)
        return sequence.block_ids[: -(-most // block_size)]

    def observe(
        self, sequence: Sequence, num_nodes: int, num_matched: int, num_tokens: int
    ) -> tuple[DrafterShare, ...]:
        """Record a step's acceptance before its tokens are appended; return the drafter's share.

        The tokens count as sent, because the next request includes them.
        """
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
