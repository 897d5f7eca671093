"""Request the drafts of overlapped steps, and record what the drafter was sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foretoken.drafting import RAGGED_COLUMNS, ROW_DTYPE, DeviceStep, DraftRequest
from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.request import NO_DRAFT, DraftRow, record_of, request_of
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT, BatchRow
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.overlap_drafting import OverlapDrafting

# The row of DraftRequest.starts that says where each row's blocks begin.
_BLOCKS = list(RAGGED_COLUMNS).index("block_ids")
_NO_TOKENS = np.zeros(0, np.int32)
_NO_HIDDEN = np.zeros((0, 0), np.float32)
# An empty batch row: no batch slot, no tokens, nothing asked.
_EMPTY = np.zeros(1, ROW_DTYPE)
_EMPTY["batch_slots"], _EMPTY["max_nodes"], _EMPTY["max_depths"], _EMPTY["max_branches"] = -1, *NO_DRAFT[:3]


class OverlapRequests:
    """The requests of one run to its drafter; without a drafter, there are none.

    Only the engine thread uses it.
    """

    def __init__(self, drafting: OverlapDrafting) -> None:
        self._drafting, self._attachment = drafting, drafting.attachment
        memory = drafting.memory
        # Most tokens that steps in flight may add to a sequence, and most prompt rows of a request.
        self._most_in_flight = MAX_IN_FLIGHT * memory.layout.tokens if memory is not None else 0
        self._most_prompt_rows = memory.layout.prompt_rows if memory is not None else 0
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

    @property
    def has_prompts(self) -> bool:
        """Return whether the next request sends prompts."""
        return bool(self._prompts)

    @property
    def is_for_all(self) -> bool:
        """Return whether every sequence of the last request is drafted for."""
        if self._is_for_all is None:
            self._is_for_all = self._batch_rows is not None and all(
                batch_row is None or batch_row.is_left or self._drafting.is_for(batch_row.sequence)
                for batch_row in self._batch_rows
            )
        return self._is_for_all

    def is_new_to_drafter(self, sequence: Sequence) -> bool:
        """Return whether nothing was sent yet of a sequence that is drafted for."""
        attachment = self._attachment_for(sequence)
        return attachment is not None and attachment.sent.length(sequence) == 0

    def _attachment_for(self, sequence: Sequence) -> Attachment | None:
        """Return the drafter's attachment if it drafts for a sequence."""
        return self._attachment if self._drafting.is_for(sequence) else None

    @property
    def _block_size(self) -> int:
        assert self._attachment is not None
        return self._attachment.sent.block_size

    def has_sent(self, sequence: Sequence) -> bool:
        """Return whether the drafter was sent all tokens of a sequence, if it drafts for that."""
        attachment = self._attachment_for(sequence)
        return attachment is None or attachment.sent.length(sequence) == len(sequence.tokens)

    def reserve_room(self, sequence: Sequence, num_computed: int) -> bool:
        """Reserve room in the next request for ``send_prompt`` of so many computed tokens.

        Returns whether there is room: a request holds one long prefix beside a chunk.
        """
        attachment = self._attachment_for(sequence)
        if attachment is None:
            return True
        num_new = num_computed + 1 - attachment.sent.length(sequence)
        if num_new <= 0:
            return True
        counts = [num_new, *self._num_new]
        if sum(counts) - max(counts) > self._most_prompt_rows:
            return False
        self._num_new = counts
        return True

    def send_prompt(self, sequence: Sequence, num_hidden: int) -> bool:
        """Send the prompt tokens that the next step computes, and the one after them.

        Returns whether it sends them with ``num_hidden`` hidden states in device memory: the states
        of the step's rows of this prompt.
        """
        attachment = self._attachment_for(sequence)
        if attachment is None:
            return False
        sent, length = attachment.sent.length(sequence), min(sequence.num_computed + 1, len(sequence.tokens))
        if sent >= length:
            return False
        blocks = sequence.block_ids[sent // self._block_size : (length - 1) // self._block_size + 1]
        key = sequence.batch_slot, sequence.generation
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
        if self._attachment is None or not self._drafting.is_current:
            self._prompts, self._num_new = [], []
            return
        begins = self._begins(batch_rows)
        if begins:
            self._name(batch_rows, is_read=is_last)
        step = DeviceStep(number, begins, is_last, len(self._records), prompt_start)
        self._attachment.post_device_step(self._request(), step)
        self._prompts, self._num_new = [], []

    def _begins(self, batch_rows: tuple[BatchRow | None, ...]) -> bool:
        """Return whether the request must name all sequences anew.

        That some have ended is no reason by itself.
        """
        known = self._batch_rows
        if known is None or self._prompts or self._drafting.shape != self._asked_shape:
            return True
        # Empty batch rows after the last named one change nothing.
        if any(batch_row is not None and not batch_row.is_left for batch_row in batch_rows[len(known) :]):
            return True
        same = batch_rows[: len(known)]
        return same != known and any(
            batch_row is not None and batch_row is not old for batch_row, old in zip(same, known, strict=False)
        )

    def _name(self, batch_rows: tuple[BatchRow | None, ...], *, is_read: bool) -> None:
        """Name the sequences of a step.

        ``is_read``: whether the host has read the step's tokens.
        """
        taken = [index for index, batch_row in enumerate(batch_rows) if batch_row is not None and not batch_row.is_left]
        batch_rows = batch_rows[: max(taken, default=-1) + 1]
        self._batch_rows, self._asked_shape, self._is_for_all = batch_rows, self._drafting.shape, None
        self._records = np.repeat(_EMPTY, len(batch_rows))
        self._num_blocks = [0] * len(batch_rows)
        assert self._attachment is not None
        for index in taken:
            batch_row = batch_rows[index]
            assert batch_row is not None
            sequence = batch_row.sequence
            length = self._attachment.sent.length(sequence) if self._drafting.is_for(sequence) else len(sequence.tokens)
            if is_read:
                # The request itself announces those tokens.
                length = self._lengths.get(sequence, length)
            self._num_blocks[index] = -(-length // self._block_size)
            shape = self._drafting.shape_of(sequence)
            row = DraftRow(sequence, sequence.batch_slot, sequence.generation, length, [], [], [], (), shape, False)
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
        if sequence.table is None or not self._drafting.is_for(sequence):
            return 0
        most = min(len(sequence.tokens) + self._most_in_flight, sequence.max_len)
        return min(-(-most // self._block_size), len(sequence.block_ids))

    def end(self, number: int, batch_rows: tuple[BatchRow | None, ...], prompt_start: int) -> None:
        """End the run after step ``number``, which was read and had these batch rows.

        The drafter learns what that step committed and the last prompts, if sequences go on.
        """
        if self._attachment is None or not self._drafting.is_current:
            return
        goes_on = self._prompts or any(batch_row is not None and not batch_row.is_left for batch_row in batch_rows)
        if goes_on and number > self._attachment.device_step_number:
            self.post(number, batch_rows, prompt_start, is_last=True)
        for row in reversed(self._prompts):
            # No step was launched that a request could have announced.
            self._attachment.sent.mark(row.batch_slot, row.generation, row.length - len(row.new_tokens))
        self._attachment.device_step_number = number

    def count_tokens(self, sequence: Sequence, num_tokens: int) -> bool:
        """Count a step's tokens as sent before they are appended: the next request includes them.

        Returns whether the sequence is drafted for; others are not counted.
        """
        if self._attachment is None or not self._drafting.is_for(sequence):
            return False
        self._lengths[sequence] = length = len(sequence.tokens)
        self._attachment.sent.mark(sequence.batch_slot, sequence.generation, length + num_tokens)
        return True

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended. The drafter has learned all of it in the run."""
        self._is_for_all = None
        self._lengths.pop(sequence, None)
        if self._attachment is not None:
            self._attachment.final_updates.forget_known()
