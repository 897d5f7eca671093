"""Request drafts of overlapped steps, and record what the drafter was sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretoken.drafting import RAGGED_COLUMNS, ROW_DTYPE, DeviceStep, DraftRequest
from foretoken.overlap_memory import OverlapMemory, StreamOrder
from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, DraftRow, Shape, record_of, request_of
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT, BatchRow
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.controllers import DrafterController
from verifier_svc.speculation.costs import DraftCosts

# The row of DraftRequest.starts that says where each row's blocks begin.
_BLOCKS = list(RAGGED_COLUMNS).index("block_ids")
_NO_TOKENS = np.zeros(0, np.int32)
_NO_HIDDEN = np.zeros((0, 0), np.float32)
# An empty batch row: no slot, no tokens, nothing asked.
_EMPTY = np.zeros(1, ROW_DTYPE)
_EMPTY["slots"], _EMPTY["max_nodes"], _EMPTY["max_depths"], _EMPTY["max_branches"] = -1, *NO_DRAFT[:3]


@dataclass(slots=True)
class _Walks:
    """The rows of one step with trees of one size and as many matched nodes, and their share."""

    shares: tuple[DrafterShare]
    num_rows: int = 0


class OverlapDrafting:  # large: what a run asks of its drafter, has sent it, and got of it
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
        # Most tokens that steps in flight may add to a sequence.
        self._most_in_flight = MAX_IN_FLIGHT * self.memory.layout.tokens if self.memory is not None else 0
        # The shape of the trees that the next request asks for.
        self.shape = NO_DRAFT
        # The sequences that are drafted for, with the shapes that their requests ask for.
        self._drafted: dict[Sequence, Shape | None] = {}
        # These shapes. None: not known.
        self._own_shapes: set[Shape | None] | None = None
        # The batch rows of the last request, their records and shape; blocks that it has named.
        self._batch_rows: tuple[BatchRow | None, ...] | None = None
        self._records = np.zeros(0, ROW_DTYPE)
        self._num_blocks: list[int] = []
        self._asked_shape = NO_DRAFT
        # The prompts of the next request, and the tokens for which it has room reserved.
        self._prompts: list[DraftRow] = []
        self._num_new: list[int] = []
        # Whether every sequence of the last request is drafted for. None: not known.
        self._is_for_all: bool | None = None
        # Tokens of each sequence before the last step that was read.
        self._lengths: dict[Sequence, int] = {}
        # The walks of the step that is being read, by nodes of the tree and matched ones.
        self._walks: dict[tuple[int, int], _Walks] = {}

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
    def order(self) -> StreamOrder:
        return self.attachment.transport.order if self.attachment is not None else StreamOrder()

    @property
    def is_current(self) -> bool:
        """Return whether the drafter still has the attachment that the run began with."""
        return self.drafter is None or self.drafter.attachment is self.attachment

    @property
    def is_open(self) -> bool:
        """Return whether the drafter's transport is open, as far as a quick check shows."""
        return self.attachment is None or self.attachment.transport.is_open()

    @property
    def has_prompts(self) -> bool:
        """Return whether the next request sends prompts."""
        return bool(self._prompts)

    @property
    def has_drafted(self) -> bool:
        """Return whether any running sequence is drafted for."""
        return bool(self._drafted)

    @property
    def is_resting(self) -> bool:
        """Return whether steps go on without the drafter,
        because its drafts have not paid for long.
        """
        return self.drafter is None and self.controller is not None

    @property
    def common_shape(self) -> Shape | None:
        """Return the shape that all sequences ask for that are drafted for.

        It is None if they differ or leave it open.
        """
        if self._own_shapes is None:
            self._own_shapes = set(self._drafted.values())
        return next(iter(self._own_shapes)) if len(self._own_shapes) == 1 else None

    @property
    def is_for_all(self) -> bool:
        """Return whether every sequence of the last request is drafted for."""
        if self._is_for_all is None:
            self._is_for_all = self._batch_rows is not None and all(
                batch_row is None or batch_row.is_left or self.is_for(batch_row.sequence)
                for batch_row in self._batch_rows
            )
        return self._is_for_all

    def is_for(self, sequence: Sequence) -> bool:
        """Return whether a running sequence is drafted for, even if only with roots."""
        return sequence in self._drafted

    def is_new_to_drafter(self, sequence: Sequence) -> bool:
        """Return whether nothing was sent yet of a sequence that is drafted for."""
        return self.attachment is not None and self.is_for(sequence) and self.attachment.sent.length(sequence) == 0

    @property
    def _block_size(self) -> int:
        assert self.attachment is not None
        return self.attachment.sent.block_size

    def shape_of(self, sequence: Sequence) -> Shape:
        """Return the shape of the trees to request for a sequence."""
        if not self.is_for(sequence):
            return NO_DRAFT
        most = sequence.speculation.max_draft_tokens
        if most is None or most >= self.shape.nodes - 1:
            return self.shape
        return Shape(1 + most, min(self.shape.depth, max(most, 1)), self.shape.branches)

    def expected_tokens(self, sequence: Sequence) -> float:
        """Return the tokens that a step with the drafter's tree should yield for a sequence."""
        shape = self.shape_of(sequence)
        if shape == NO_DRAFT or self.controller is None:
            return 1.0
        return self.controller.controller.expected_tokens(shape)

    def draft_s(self, batch: int) -> float:
        """Return the seconds that a step of ``batch`` sequences waits for the drafter's trees."""
        if self.shape == NO_DRAFT or self.controller is None:
            return 0.0
        return self.controller.controller.draft_s(self.shape, batch)

    def step_s(self, shape: Shape, batch: int, costs: DraftCosts) -> float:
        """Return the seconds that a step of ``batch`` sequences should take without prompts."""
        if self.controller is None:
            return costs.plain_step_s(batch)
        return self.controller.controller.step_s(shape, batch)

    # What the drafter is sent.

    def add(self, sequence: Sequence, shape: Shape | None = None) -> None:
        """Draft for a running sequence, from when it joins. The drafter was sent all its tokens by
        then.

        ``shape``: what its request asks for; None: it leaves that to the server.
        """
        self._drafted[sequence] = shape
        self._own_shapes = None
        self._is_for_all = None

    def has_sent(self, sequence: Sequence) -> bool:
        """Return whether the drafter was sent all tokens of a sequence, if it drafts for that."""
        if self.attachment is None or not self.is_for(sequence):
            return True
        return self.attachment.sent.length(sequence) == len(sequence.tokens)

    def reserve_room(self, sequence: Sequence, num_computed: int) -> bool:
        """Reserve room in the next request for ``send_prompt`` of so many computed tokens.

        Returns whether there is room: a request holds one long prefix beside a chunk.
        """
        if self.attachment is None or not self.is_for(sequence):
            return True
        num_new = num_computed + 1 - self.attachment.sent.length(sequence)
        if num_new <= 0:
            return True
        assert self.memory is not None
        counts = [num_new, *self._num_new]
        if sum(counts) - max(counts) > self.memory.layout.prompt_rows:
            return False
        self._num_new = counts
        return True

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended. The drafter has learnt all of it in the run."""
        self._drafted.pop(sequence, None)
        self._own_shapes = None
        self._is_for_all = None
        self._lengths.pop(sequence, None)
        if self.attachment is not None:
            self.attachment.final_updates.forget_known()

    def send_prompt(self, sequence: Sequence, num_hidden: int) -> bool:
        """Send the prompt tokens that the next step computes, and the one after them.

        Returns whether it sends them with ``num_hidden`` hidden states in device memory, those of
        the step's rows of this prompt.
        """
        attachment = self.attachment
        if attachment is None or not self.is_for(sequence):
            return False
        sent, length = attachment.sent.length(sequence), min(sequence.num_computed + 1, len(sequence.tokens))
        if sent >= length:
            return False
        blocks = sequence.block_ids[sent // self._block_size : (length - 1) // self._block_size + 1]
        key = sequence.slot, sequence.generation
        has_hidden = bool(attachment.needs.captured_layers) and 0 < num_hidden <= length - sent
        self._prompts.append(
            DraftRow(
                sequence,
                *key,
                length,
                sequence.tokens[sent:length],
                [],
                blocks,
                (),
                NO_DRAFT,
                False,
                device_hidden=num_hidden if has_hidden else 0,
            )
        )
        attachment.sent.mark(*key, length)
        return has_hidden

    def post(
        self, number: int, batch_rows: tuple[BatchRow | None, ...], prompt_start: int, *, is_last: bool = False
    ) -> None:
        """Request the trees that follow step ``number``, which was launched with these batch rows.

        Does nothing if the drafter has detached, because the run is about to end, or has attached
        again, because it then does not know the run.

        Args:
            prompt_start: the first row of the memory's ``prompt_hidden`` that belongs to the
                prompts sent since the last request.
            is_last: whether the step was read and ends the run.
        """
        if self.attachment is None or not self.is_current:
            self._prompts, self._num_new = [], []
            return
        begins = self._begins(batch_rows)
        if begins:
            self._name(batch_rows, is_read=is_last)
        step = DeviceStep(number, begins, is_last, len(self._records), prompt_start)
        self.attachment.post_device_step(self._request(), step)
        self._prompts, self._num_new = [], []

    def _begins(self, batch_rows: tuple[BatchRow | None, ...]) -> bool:
        """Return whether the request must name all sequences anew: not only because some have ended."""
        known = self._batch_rows
        if known is None or self._prompts or self.shape != self._asked_shape:
            return True
        # Empty batch rows after the last named one change nothing.
        if any(batch_row is not None and not batch_row.is_left for batch_row in batch_rows[len(known) :]):
            return True
        same = batch_rows[: len(known)]
        return same != known and any(
            batch_row is not None and batch_row is not old for batch_row, old in zip(same, known, strict=False)
        )

    def _name(self, batch_rows: tuple[BatchRow | None, ...], *, is_read: bool) -> None:
        """Name the sequences of a step. ``is_read``: whether the host has read the step's tokens."""
        taken = [index for index, batch_row in enumerate(batch_rows) if batch_row is not None and not batch_row.is_left]
        batch_rows = batch_rows[: max(taken, default=-1) + 1]
        self._batch_rows, self._asked_shape, self._is_for_all = batch_rows, self.shape, None
        self._records = np.repeat(_EMPTY, len(batch_rows))
        self._num_blocks = [0] * len(batch_rows)
        assert self.attachment is not None
        for index in taken:
            batch_row = batch_rows[index]
            assert batch_row is not None
            sequence = batch_row.sequence
            length = self.attachment.sent.length(sequence) if self.is_for(sequence) else len(sequence.tokens)
            if is_read:
                # The request itself announces those tokens.
                length = self._lengths.get(sequence, length)
            self._num_blocks[index] = -(-length // self._block_size)
            shape = self.shape_of(sequence)
            row = DraftRow(sequence, sequence.slot, sequence.generation, length, [], [], [], (), shape, False)
            self._records[index] = record_of(row)

    def _request(self) -> DraftRequest:
        """Return the request of the named sequences and of the prompts, without epoch and step."""
        assert self._batch_rows is not None
        num_blocks, block_size, in_flight = self._num_blocks, self._block_size, self._most_in_flight
        blocks: list[int] = []
        ends = [0]
        for index, batch_row in enumerate(self._batch_rows):
            if batch_row is not None and len(batch_row.sequence.tokens) + in_flight > num_blocks[index] * block_size:
                count = self._count_blocks(batch_row.sequence)
                if count > num_blocks[index]:
                    blocks += batch_row.sequence.block_ids[num_blocks[index] : count]
                    num_blocks[index] = count
            ends.append(len(blocks))
        starts = np.zeros((len(RAGGED_COLUMNS), len(ends)), np.int32)
        starts[_BLOCKS] = ends
        ids = np.array(blocks, np.int32)
        batch_rows = DraftRequest(
            0,
            0,
            self._records,
            starts,
            _NO_TOKENS,
            _NO_HIDDEN,
            ids,
            _NO_TOKENS,
        )
        if not self._prompts:
            return batch_rows
        prompts = request_of(0, 0, self._prompts)
        prompt_ends = starts[:, -1:] + prompts.starts[:, 1:]
        return replace(
            prompts,
            rows=np.concatenate([batch_rows.rows, prompts.rows]),
            starts=np.concatenate([starts, prompt_ends], axis=1),
            block_ids=np.concatenate([ids, prompts.block_ids]),
        )

    def _count_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence needs until steps in flight are done.

        More blocks are reserved, but a request may not name all of them, and no KV entries lie
        after the context's end.
        """
        # A sequence that has ended, or is not drafted for, needs no blocks.
        if sequence.table is None or not self.is_for(sequence):
            return 0
        most = min(len(sequence.tokens) + self._most_in_flight, sequence.max_len)
        return min(-(-most // self._block_size), len(sequence.block_ids))

    def end(self, number: int, batch_rows: tuple[BatchRow | None, ...], prompt_start: int) -> None:
        """End the run after step ``number``, which was read and had these batch rows.

        The drafter learns what that step committed and the last prompts, if sequences go on.
        """
        if self.attachment is None or not self.is_current:
            return
        goes_on = self._prompts or any(batch_row is not None and not batch_row.is_left for batch_row in batch_rows)
        if goes_on and number > self.attachment.device_step_number:
            self.post(number, batch_rows, prompt_start, is_last=True)
        for row in reversed(self._prompts):
            # No step was launched that a request could have announced.
            self.attachment.sent.mark(row.slot, row.generation, row.length - len(row.new_tokens))
        self.attachment.device_step_number = number

    # What came of it.

    def observe(
        self, sequence: Sequence, num_nodes: int, num_matched: int, num_tokens: int, *, got_no_row: bool = False
    ) -> tuple[DrafterShare, ...]:
        """Count one walk of a step before its tokens are appended; return the drafter's share.

        The tokens count as sent, because the next request includes them. ``got_no_row``: whether
        the sequence's draft was there, but the batch's rows went to others.
        """
        if self.attachment is None or sequence not in self._drafted:
            return ()
        self._lengths[sequence] = length = len(sequence.tokens)
        self.attachment.sent.mark(sequence.slot, sequence.generation, length + num_tokens)
        if num_nodes <= 1 and not got_no_row:
            return ()
        walks = self._walks.get((num_nodes, num_matched))
        if walks is None:
            share = DrafterShare(self.drafter_number, num_nodes - 1, tuple(range(1, num_matched + 1)))
            walks = self._walks[num_nodes, num_matched] = _Walks((share,))
        walks.num_rows += 1
        return walks.shares if num_nodes > 1 else ()

    def learn(self, shape: Shape) -> None:
        """Learn from the walks that were counted, those of one step. ``shape``: of its trees."""
        if self.drafter is None:
            return
        for (num_nodes, num_matched), walks in self._walks.items():
            (share,), num_rows = walks.shares, walks.num_rows
            depth = min(shape.depth, num_nodes - 1)
            if depth > 0:
                self.drafter.counters.add(share.num_drafted, share.accepted_depths, num_rows)
                self.drafter.record.acceptance.observe(num_matched, depth, num_rows)
                self.drafter.record.watch.observe(num_matched, num_rows)
            if self.controller is not None:
                levels = shape.depth if shape.budget else depth
                self.controller.controller.observe_walk(shape, num_matched, levels, num_rows)
        self._walks = {}
