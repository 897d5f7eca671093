"""The device memory of overlapped drafts of one shape, and their launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.gpu import draft_tree_state as column
from foretoken_kernels.gpu.draft_intake import stamp_draft, take_step
from foretoken_kernels.gpu.draft_intake_state import (
    NO_LENGTH,
    DraftBatchState,
    IntakeRows,
    TakenStep,
)
from foretoken_kernels.gpu.draft_tree_state import NUM_COLUMNS, DraftOutput
from foretoken_kernels.gpu.embedding import copy_rows
from foretoken_kernels.overlap_state import StepResults

from drafter_svc.device.batch_rows import BatchRows
from drafter_svc.device.levels import DeviceLevels, TreePlaces, TreeShape, write_requests
from foretoken.models.device_batch import DeviceArrays
from foretoken.models.device_journal import DeviceJournal
from foretoken.models.pinned_buffers import PinnedBuffers
from foretoken.overlap_memory import OverlapMemory
from foretoken.tree import Int32

# Steps that the device may have taken and the host has not read.
MAX_UNREAD_STEPS = 8
# The number of a draft that follows no step.
NO_STEP = -1
# An entry of a block table that names no block.
_NO_BLOCK = -1


class NewBlocks(NamedTuple):
    """New blocks of one sequence, from logical block ``first`` on."""

    batch_row: int
    first: int
    block_ids: list[int]


class DraftStage:
    """The memory of one shape's graph.

    Args:
        tree_blocks: blocks of one tree; they follow the sequence's blocks in its table.
        root_hidden: [at least the shape's trees, hidden_size]; all stages share it, because graphs
            run one at a time.

    Attributes:
        shape: as given.
        capacity: blocks of a sequence at most.
        journal: what the device took from each step, for the host to read later.
    """

    def __init__(
        self,
        shape: TreeShape,
        memory: OverlapMemory,
        levels: DeviceLevels,
        tree_blocks: int,
        root_hidden: torch.Tensor,
    ) -> None:
        batch_rows, tokens = shape.trees, memory.layout.tokens
        device, rows = levels.device, batch_rows * tokens
        self.shape, self.capacity = shape, shape.blocks - tree_blocks
        self._levels = levels
        self._results = StepResults(
            memory.stamp,
            memory.counts[:batch_rows],
            memory.lengths[:batch_rows],
            memory.num_left[:batch_rows],
            memory.new_tokens[:batch_rows],
            memory.hidden[:rows],
        )
        self._draft_stamp = memory.draft_stamp
        # What the host sends when the batch rows are named anew. From then on the device keeps the
        # number, and LENGTH, MAX_NODES and ROOT_TOKEN of the requests.
        self._begun = PinnedBuffers(
            {
                "requests": ((batch_rows, NUM_COLUMNS), torch.int32),
                "tree_starts": ((batch_rows,), torch.int32),
                "context_starts": ((1, batch_rows), torch.int32),
                "max_nodes": ((batch_rows,), torch.int32),
                "number": ((1,), torch.int32),
            },
            device,
        )
        # Until the batch rows are named anew, blocks are only added, after all that a kernel in
        # flight reads. A copy that is still on its way may take them along, so the host need not
        # wait for it. A sequence that has ended keeps blocks that others have by then: no step has
        # tokens of it any more, so nothing is written there for it.
        self._tables = PinnedBuffers({"block_tables": ((batch_rows, shape.blocks), torch.int32)}, device)
        self.journal = DeviceJournal(
            {
                "counts": (batch_rows,),
                "lengths": (batch_rows,),
                "is_written": (batch_rows,),
                "tokens": (batch_rows, tokens),
            },
            MAX_UNREAD_STEPS,
            device,
        )
        begun, tables = self._begun.device, self._tables.device["block_tables"]
        self._state = DraftBatchState(begun["number"], begun["max_nodes"], begun["requests"], tables)
        self._taken = TakenStep(**self.journal.device)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rows = IntakeRows(ints(rows), ints(rows), ints(rows), ints(rows), ints(batch_rows))
        self._arrays = DeviceArrays(
            masks=torch.zeros((rows, 1), dtype=torch.int64, device=device),
            **self._rows._asdict(),
            row_starts=torch.arange(batch_rows + 1, dtype=torch.int32, device=device) * tokens,
            tree_starts=begun["tree_starts"],
            context_starts=begun["context_starts"][0],
            block_tables=tables,
            max_seq_rows=tokens,
        )
        self._root_hidden = root_hidden[:batch_rows]
        places = TreePlaces(begun["requests"], tables, begun["tree_starts"], begun["context_starts"])
        output = DraftOutput(
            memory.draft_tokens[:batch_rows],
            memory.draft_parents[:batch_rows],
            memory.draft_scores[:batch_rows],
            memory.num_nodes[:batch_rows],
        )
        self._level_memory = levels.memory(shape, places, output)

    def send(self, batch: BatchRows, requested: kernel.Trees, scratch: Int32, number: int) -> None:
        """Send what is known of the batch rows before step ``number``.

        Args:
            requested: their tree requests.
            scratch: int32 [at least the shape's trees, blocks]; the blocks of their trees.
        """
        count, capacity = len(batch), self.capacity
        self._begun.wait()
        self._tables.wait()
        host, tables = self._begun.host, self._tables.host["block_tables"]
        requests, max_nodes, context_starts = host["requests"], host["max_nodes"], host["context_starts"][0]
        write_requests(requests, requested, np.arange(count, dtype=np.int32))
        requests[:, column.MAX_NODES] = max_nodes[:] = 0
        requests[:, column.LENGTH] = NO_LENGTH
        requests[:, column.FIRST_KV_SLOT] = host["tree_starts"][:] = capacity * self._levels.block_size
        context_starts[:] = 0
        host["number"][0] = number
        tables[:, :capacity] = _NO_BLOCK
        tables[:, capacity:] = scratch[: len(tables)]
        known = [(index, sequence) for index, sequence in enumerate(batch.sequences) if sequence is not None]
        if known:
            indices = [index for index, _ in known]
            requests[indices, column.LENGTH] = [sequence.length for _, sequence in known]
            requests[indices, column.ROOT_TOKEN] = [sequence.tokens[sequence.length - 1] for _, sequence in known]
        is_drafted = batch.is_drafted
        max_nodes[:count] = np.where(is_drafted, np.maximum(requested.shapes[:count, kernel.MAX_NODES], 1), 0)
        for index, sequence in known:
            if is_drafted[index]:
                num_blocks = batch.num_blocks[index]
                context_starts[index] = sequence.valid_start
                tables[index, :num_blocks] = sequence.table[:num_blocks]
        self._begun.send()
        self._tables.send()

    def send_blocks(self, added: Iterable[NewBlocks]) -> None:
        """Send blocks that continue the tables."""
        tables = self._tables.host["block_tables"]
        for batch_row, first, block_ids in added:
            tables[batch_row, first : first + len(block_ids)] = block_ids
        self._tables.send()

    def launch(self) -> None:
        """Launch the whole of one draft; this is what is captured."""
        levels = self._levels
        take_step(
            self._results,
            self._state,
            self._rows,
            self._taken,
            num_blocks=self.capacity,
            block_size=levels.block_size,
            num_kv_slots=levels.num_kv_slots,
        )
        output = levels.model.extend(self._arrays, self._results.hidden)
        if levels.model.hidden_size:
            copy_rows(output.hidden, self._root_hidden, self._rows.logit_rows)
        levels.launch(self._level_memory, output.logits, self._root_hidden)
        stamp_draft(self._state.number, self._draft_stamp)
