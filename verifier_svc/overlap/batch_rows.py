"""The batch rows of the next overlapped step, and what the device knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from foretoken_kernels.gpu.overlap_joins import join_batch
from foretoken_kernels.overlap_state import BatchState, Joining, new_batch_state

from foretoken.models.pinned_buffers import PinnedBuffers, SendRing
from verifier_svc.scheduling.batch_row import BatchRow
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence


class BatchRowNeeds(NamedTuple):
    """What the batch rows need in the next step.

    Attributes:
        widths: most rows of each batch row; 0 for a free one.
        num_rows: rows of all batch rows.
        most_blocks: blocks of the longest sequence; 0 without sequences.
        has_new_blocks: whether a sequence has blocks that the device was not sent.
    """

    widths: list[int]
    num_rows: int
    most_blocks: int
    has_new_blocks: bool

    @property
    def are_rows_shared(self) -> bool:
        """Return whether there are fewer rows than the batch rows could use."""
        return self.num_rows < sum(self.widths)


class OverlapBatchRows:
    """The batch rows of the next step.

    A change takes effect on the device when the next step is launched.

    Attributes:
        state: what the kernels keep of each batch row, in device memory.
        divided: what the rows were divided for last.
    """

    def __init__(self, max_batch_rows: int, device: torch.device) -> None:
        self.state: BatchState = new_batch_state(max_batch_rows, device)
        self._joining = PinnedBuffers({name: ((max_batch_rows,), torch.int32) for name in Joining._fields}, device)
        # The batch rows of the next step, and the block tables that the device has of them.
        self._rows: list[BatchRow | None] = [None] * max_batch_rows
        self._tables = np.zeros((max_batch_rows, 0), np.int32)
        self._num_blocks = [0] * max_batch_rows
        # Rows of a batch row, on average, where the best nodes of all get them; 0: one a node.
        self._budget = 0
        # What has changed since the last launch: batch rows that were taken, and whether the rows
        # must be divided anew.
        self._joined: list[int] = []
        self._is_laid_out = False
        self.divided = BatchRowNeeds([], 0, 0, False)

    @property
    def rows(self) -> Items[BatchRow | None]:
        """Return the batch rows, None for free ones."""
        return self._rows

    @property
    def last(self) -> int:
        """Return the number of the last batch row that is taken. There must be one."""
        return max(index for index, batch_row in enumerate(self._rows) if batch_row is not None)

    @property
    def joined(self) -> list[Sequence]:
        """Return the sequences that have joined since the last launch."""
        return [batch_row.sequence for index in self._joined if (batch_row := self._rows[index]) is not None]

    def begin(self, number: int) -> None:
        """Free all batch rows after step ``number``."""
        self._rows = [None] * len(self._rows)
        self._num_blocks = [0] * len(self._rows)
        self._joined = []
        self._is_laid_out = False
        self.state.step.fill_(number)

    def batch_slots(self, count: int) -> list[int]:
        """Return the batch slots of the first ``count`` batch rows; 0 for free ones."""
        return [0 if batch_row is None else batch_row.sequence.batch_slot for batch_row in self._rows[:count]]

    def free_row(self) -> int:
        """Return the lowest free batch row. There is one for each batch slot."""
        return self._rows.index(None)

    def join(self, index: int, batch_row: BatchRow) -> None:
        """Give a sequence a free batch row, from the next step on. Its first tree is its root."""
        assert self._rows[index] is None
        self._rows[index] = batch_row
        self._num_blocks[index] = 0
        self._joined.append(index)
        self._is_laid_out = False

    def leave(self, index: int) -> None:
        """Free the batch row of a sequence that has ended. No later step has rows for it."""
        self._rows[index] = None
        self._is_laid_out = False
        if index in self._joined:
            self._joined.remove(index)

    def resize(self, index: int, width: int) -> None:
        """Change the most nodes of a batch row's next trees."""
        batch_row = self._rows[index]
        assert batch_row is not None
        if batch_row.width != width:
            batch_row.width = width
            self._is_laid_out = False

    def share_rows(self, budget: int) -> None:
        """Give batch rows this many rows on average; the best nodes of all get them.

        0: every node gets a row.
        """
        if budget != self._budget:
            self._budget = budget
            self._is_laid_out = False

    def needs(self, found: Mapping[int, Draft]) -> BatchRowNeeds:
        """Return what the batch rows need in the next step.

        ``found``: trees from the host, by batch row.
        """
        longest = num_rows = 0
        grown = False
        widths = [0] * len(self._rows)
        for index, batch_row in enumerate(self._rows):
            if batch_row is None:
                continue
            draft = found.get(index)
            widths[index] = batch_row.width if draft is None else max(batch_row.width, draft.tree.num_nodes)
            num_rows += batch_row.num_rows(self._budget) if draft is None else widths[index]
            count = len(batch_row.sequence.block_ids)
            longest = max(longest, count)
            grown |= count > self._num_blocks[index]
        return BatchRowNeeds(widths, num_rows, longest, grown)

    def are_laid_out_for(self, needs: BatchRowNeeds) -> bool:
        """Return whether the rows are divided as the next step needs them."""
        return self._is_laid_out and needs[:2] == self.divided[:2]

    def divide(self, needs: BatchRowNeeds) -> None:
        """Note how the rows are divided in the next step."""
        self.divided = needs

    def forget_layout(self) -> None:
        """Divide the rows anew in the next step."""
        self._is_laid_out = False

    def mark_laid_out(self) -> None:
        """Note that the device has the batch rows and rows of the next step."""
        self._is_laid_out = True

    def compile(self) -> None:
        """Launch the kernel of ``send_joined`` with nobody who joins."""
        join_batch(self.state, Joining(**self._joining.device))

    def send_joined(self, number: int) -> None:
        """Send the sequences that join after step ``number`` to the device."""
        if not self._joined:
            return
        joining = self._joining
        joining.wait()
        joining.host["joins"][:] = 0
        for index in self._joined:
            batch_row = self._rows[index]
            assert batch_row is not None
            sequence = batch_row.sequence
            values = (
                1,
                sequence.batch_slot,
                len(sequence.tokens),
                sequence.max_new_tokens,
                sequence.num_output_tokens,
                sequence.tokens[-1],
                number,
            )
            for name, value in zip(Joining._fields, values, strict=True):
                joining.host[name][index] = value
        joining.send()
        join_batch(self.state, Joining(**joining.device))
        self._joined = []

    def send_tables(self, out: SendRing, seqs: int, blocks: int, *, is_new: bool = False) -> None:
        """Send block tables with the sequences' new blocks, for the steps launched after this.

        Args:
            out: takes int32 [seqs, blocks].
            is_new: ``out`` has got none of them yet.
        """
        if is_new:
            self._num_blocks = [0] * len(self._rows)
        if self._tables.shape[1] < blocks:
            grown = np.zeros((len(self._rows), blocks), np.int32)
            grown[:, : self._tables.shape[1]] = self._tables
            self._tables = grown
        for index, batch_row in enumerate(self._rows):
            if batch_row is None:
                continue
            block_ids, known = batch_row.sequence.block_ids, self._num_blocks[index]
            if len(block_ids) > known:
                self._tables[index, known : len(block_ids)] = block_ids[known:]
                self._num_blocks[index] = len(block_ids)
        out.send(np.ascontiguousarray(self._tables[:seqs, :blocks]))
