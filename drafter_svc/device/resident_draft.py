"""Drafts from device memory: a step's tokens go from the verifier's kernels to the drafter's, and the trees back.

The host enqueues a draft before the step's tokens exist, as one CUDA graph: intake, the pass over new tokens, the
levels of the trees, their stamp. What was committed it reads some requests later, and then brings its rows up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.gpu import draft_tree_state as column
from foretoken_kernels.gpu.draft_intake import stamp_draft, take_step
from foretoken_kernels.gpu.draft_intake_state import (
    NO_LENGTH,
    DraftSeats,
    IntakeRows,
    TakenStep,
)
from foretoken_kernels.gpu.draft_tree_state import NUM_COLUMNS, DraftOutput
from foretoken_kernels.gpu.embedding import copy_rows
from foretoken_kernels.resident_state import NO_SLOT, StepResults

from drafter_svc.device.levels import DeviceLevels, FoundTrees, TreePlaces, TreeShape, batch_of, write_requests
from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.growth import set_tree_requests
from drafter_svc.trees.rows import DraftRows, DraftSequence, SentRow, sent_rows
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.device_batch import DeviceArrays, seq_bucket, table_bucket
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_journal import DeviceJournal
from foretoken.models.device_sizes import PassSizes
from foretoken.models.pinned_buffers import PinnedBuffers
from foretoken.resident import ResidentMemory, StreamOrder
from foretoken.tree import Int32

# Steps that may be on their way, and unread.
_STEPS = 8
# A table has room for so many blocks more than a run's longest sequence has, or it would soon be too narrow.
_ROOM_BLOCKS = 16
# Of a table: as many blocks as ordinary requests' tables have a multiple of, or the kernels were compiled once more.
_TABLE_STEP = 16
# Seconds after which a step that does not come is given up. A verifier may compile kernels first.
_PATIENCE_S = 10.0
# Of no step.
_NO_STEP = -1


class _Seat:
    """One row of a run.

    Attributes:
        sequence: None: nothing is known of it, and nothing is learnt.
        is_drafted: whether its entries are written; if not, its tokens are learnt alone.
        num_blocks: that are named.
        wants_tree: whether more than its root is asked for.
    """

    __slots__ = ("is_drafted", "num_blocks", "sequence", "slot", "wants_tree")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.sequence: DraftSequence | None = None
        self.is_drafted = False
        self.num_blocks = 0
        self.wants_tree = False


class _Sizes(NamedTuple):
    """Of the stages of one memory: seats are those of the shape."""

    tokens: int
    tree_blocks: int


class _Stage:
    """The memory of one shape's graph. ``capacity``: blocks of a sequence; those of its tree stand behind them."""

    def __init__(self, shape: TreeShape, sizes: _Sizes, memory: ResidentMemory, levels: DeviceLevels) -> None:
        seats, tokens = shape.trees, sizes.tokens
        device, rows = levels.device, shape.trees * sizes.tokens
        self.capacity = shape.blocks - sizes.tree_blocks
        self.results = StepResults(
            memory.stamp,
            memory.counts[:seats],
            memory.lengths[:seats],
            memory.num_left[:seats],
            memory.new_tokens[:seats],
            memory.hidden[:rows],
        )
        self.draft_stamp = memory.draft_stamp
        # What a run begins with. LENGTH, MAX_NODES and ROOT_TOKEN, and the number, are the device's from then on.
        self.begun = PinnedBuffers(
            {
                "requests": ((seats, NUM_COLUMNS), torch.int32),
                "tree_starts": ((seats,), torch.int32),
                "context_starts": ((1, seats), torch.int32),
                "max_nodes": ((seats,), torch.int32),
                "number": ((1,), torch.int32),
            },
            device,
        )
        # Within a run entries are only added, behind all that a kernel in flight reads: a copy that is still on its way
        # may take them along, so the host need not wait for it. A sequence that has ended keeps those of blocks that
        # others have by then: no step tells of tokens of it any more, so nothing is written there for it.
        self.tables = PinnedBuffers({"block_tables": ((seats, shape.blocks), torch.int32)}, device)
        self.journal = DeviceJournal(
            {"counts": (seats,), "lengths": (seats,), "is_written": (seats,), "tokens": (seats, tokens)}, _STEPS, device
        )
        begun, tables = self.begun.device, self.tables.device["block_tables"]
        self.seats = DraftSeats(begun["number"], begun["max_nodes"], begun["requests"], tables)
        self.taken = TakenStep(**self.journal.device)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.rows = IntakeRows(ints(rows), ints(rows), ints(rows), ints(rows), ints(seats))
        self.arrays = DeviceArrays(
            masks=torch.zeros((rows, 1), dtype=torch.int64, device=device),
            **self.rows._asdict(),
            row_starts=torch.arange(seats + 1, dtype=torch.int32, device=device) * tokens,
            tree_starts=begun["tree_starts"],
            context_starts=begun["context_starts"][0],
            block_tables=tables,
            max_seq_rows=tokens,
        )
        self.root_hidden = torch.zeros((seats, max(levels.model.hidden_size, 1)), dtype=levels.dtype, device=device)
        places = TreePlaces(begun["requests"], tables, begun["tree_starts"], begun["context_starts"])
        output = DraftOutput(
            memory.draft_tokens[:seats],
            memory.draft_parents[:seats],
            memory.draft_scores[:seats],
            memory.num_nodes[:seats],
        )
        self.levels = levels.memory(shape, places, output)


class ResidentDraft:
    """The runs of one attachment over one memory; one at a time.

    Args:
        pass_sizes: the largest passes of the model; ``graphs``: whether drafts are captured.
        scratch: int32 [slots, blocks]; of the model's cache, for the trees.

    Raises:
        PreconditionError: the memory is not of the target's sizes, or not where the model is.
    """

    def __init__(
        self,
        levels: DeviceLevels,
        target: TargetInfo,
        pass_sizes: PassSizes,
        rows: DraftRows,
        scratch: Int32,
        memory: ResidentMemory,
        order: StreamOrder,
        figures: PassFigures,
    ) -> None:
        layout, width = memory.layout, levels.model.feature_width
        if layout.seats > target.max_slots or layout.seats * layout.tokens > pass_sizes.rows:
            raise PreconditionError(
                f"a step of {layout.seats} sequences, {layout.tokens} tokens each, is more than the drafter's "
                f"{target.max_slots} slots and {pass_sizes.rows} rows"
            )
        if (width and layout.hidden_width != width) or levels.model.num_depths > 1:
            raise PreconditionError(
                f"hidden states of {layout.hidden_width} values; the drafter wants {width}, for one module of "
                f"{levels.model.num_depths}"
            )
        if memory.stamp.device != torch.empty(0, device=levels.device).device:
            raise PreconditionError(f"memory on {memory.stamp.device}, and a drafter on {levels.device}")
        self._levels, self._target, self._rows, self._scratch = levels, target, rows, scratch
        self._memory, self._order, self._figures = memory, order, figures
        self._sizes = _Sizes(layout.tokens, scratch.shape[1])
        # The trees of the last step of a run, for its reply.
        self._found = ResidentMemory.mirror(layout, pinned=levels.device.type == "cuda")
        self._tree_requests = kernel.new_trees(layout.seats, 2, 1)
        self._stages: dict[TreeShape, _Stage] = {}
        self._graphs = DeviceGraphs(pass_sizes.graphs and levels.device.type == "cuda")
        # Of the run of the moment.
        self._stage: _Stage | None = None
        self._shape: TreeShape | None = None
        self._seats: list[_Seat] = []
        self._number = _NO_STEP

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftBatch:
        """Enqueue the draft after a step, whose results may not be there yet.

        Waits only for a run's last draft. If a run's first request is missing, its trees are roots.

        Raises:
            ValueError: no run can have such a request.
        """
        step = request.resident
        if step is None or request.num_rows > self._memory.layout.seats:
            raise ValueError(f"{request.num_rows} rows are no step of {self._memory.layout.seats} sequences")
        if step.begins:
            self.finish()
            self._number = step.number
            self._begin(request)
        elif self._stage is None or step.number != self._number + 1 or request.num_rows != len(self._seats):
            self.finish()
            self._order.signal_draft(step.number)
            return batch_of(request, np.zeros(request.num_rows, np.int32), np.empty(0, np.int32), None)
        else:
            self._number = step.number
            self._read_ready()
            if len(request.block_ids):
                self._append_blocks(sent_rows(request))
        self._launch(step.number, is_last=step.is_last)
        self._figures.rows += request.num_rows
        self._figures.drafted_rows += sum(seat.is_drafted and seat.wants_tree for seat in self._seats)
        if step.is_last:
            self.finish()
            return self._reply(request)
        return batch_of(request, np.zeros(request.num_rows, np.int32), np.empty(0, np.int32), None)

    def finish(self) -> None:
        """End the run, if there is one, and wait for all that it enqueued: rows are up to date behind it."""
        self._read_all()
        self._stage, self._shape, self._seats = None, None, []

    def release(self, slots: Sequence[int]) -> None:
        """Stop drafting for these slots. A run without seats ends without the verifier."""
        released = [seat for seat in self._seats if seat.slot in slots]
        for seat in released:
            seat.sequence, seat.is_drafted = None, False
        if released and not any(seat.sequence for seat in self._seats):
            self._order.release_step(self._number)
            self.finish()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels, over memory that nobody uses yet: what is written there is stamped as no step's."""
        # Chains: wider trees share the kernels of ordinary requests.
        shapes = self._tree_requests.shapes
        shapes[:] = 0
        shapes[:, [kernel.MAX_DEPTH, kernel.MAX_BRANCHES]] = max(self._memory.layout.tokens - 1, 1), 1
        count = 1
        while count <= self._memory.layout.seats:
            self._seats = [_Seat(slot) for slot in range(count)]
            self._set_up(_NO_STEP)
            assert self._stage is not None
            self._launch_kernels(self._stage)
            count *= 2
        self._stages.clear()
        self._stage, self._shape, self._seats = None, None, []

    def _begin(self, request: DraftRequest) -> None:
        set_tree_requests(self._tree_requests, request, min(self._target.max_nodes, self._memory.layout.nodes))
        sent = sent_rows(request)
        self._seats = [_Seat(row.slot) for row in sent]
        for seat, row in zip(self._seats, sent, strict=True):
            seat.wants_tree = bool(self._tree_requests.shapes[row.row, kernel.MAX_DEPTH] > 0)
            sequence = self._rows.known(row)
            if sequence is None:
                continue
            seat.sequence, seat.is_drafted = sequence, self._rows.can_go_on(sequence)
            seat.num_blocks = self._rows.num_blocks(row.length)
            if seat.is_drafted:
                # The block that it has begun, if it has.
                self._rows.claim_blocks(sequence, row.length // self._target.block_size, seat.num_blocks)
            self._name_blocks(seat, row.block_ids)
        self._set_up(self._number)

    def _name_blocks(self, seat: _Seat, block_ids: list[int]) -> None:
        first, sequence = seat.num_blocks, seat.sequence
        if sequence is None or not block_ids:
            return
        if not self._rows.append_blocks(sequence, first, block_ids):
            self._drop(seat)
            return
        seat.num_blocks += len(block_ids)
        if seat.is_drafted:
            self._rows.claim_blocks(sequence, first, seat.num_blocks)

    def _drop(self, seat: _Seat) -> None:
        """Drop a sequence that was sent contradictory data. Its kernels soon find no blocks."""
        self._rows.release(seat.slot)
        seat.sequence, seat.is_drafted = None, False

    def _append_blocks(self, sent: list[SentRow]) -> None:
        stage = self._stage
        assert stage is not None
        grown: list[tuple[int, int]] = []
        for index, row in enumerate(sent):
            seat = self._seats[index]
            first = seat.num_blocks
            self._name_blocks(seat, row.block_ids)
            if seat.is_drafted and seat.num_blocks > first:
                grown.append((index, first))
        if any(self._seats[index].num_blocks > stage.capacity for index, _ in grown):
            # Seldom: the tables' sizes double. From here on it is another run.
            self._read_all()
            self._set_up(self._number)
        elif grown:
            tables = stage.tables.host["block_tables"]
            for index, first in grown:
                seat = self._seats[index]
                assert seat.sequence is not None
                tables[index, first : seat.num_blocks] = seat.sequence.table[first : seat.num_blocks]
            stage.tables.send()

    def _set_up(self, number: int) -> None:
        """Bring over what is known of the seats, as of before step ``number``."""
        seats, layout, size = self._seats, self._memory.layout, self._target.block_size
        all_rows = np.arange(len(seats), dtype=np.int32)
        named = max((seat.num_blocks for seat in seats), default=0)
        least = min(table_bucket(named + _ROOM_BLOCKS), self._rows.max_blocks) + self._sizes.tree_blocks
        blocks = -(-least // _TABLE_STEP) * _TABLE_STEP
        self._shape = TreeShape.of(
            self._tree_requests,
            all_rows,
            trees=min(seq_bucket(len(seats)), layout.seats),
            nodes=layout.nodes,
            blocks=blocks,
        )
        if self._shape not in self._stages:
            self._stages[self._shape] = _Stage(self._shape, self._sizes, self._memory, self._levels)
        self._stage = stage = self._stages[self._shape]
        capacity = stage.capacity
        stage.begun.wait()
        stage.tables.wait()
        host, tables = stage.begun.host, stage.tables.host["block_tables"]
        requests, max_nodes = host["requests"], host["max_nodes"]
        write_requests(requests, self._tree_requests, all_rows)
        requests[:, column.MAX_NODES] = max_nodes[:] = 0
        requests[:, column.LENGTH] = NO_LENGTH
        requests[:, column.FIRST_SLOT] = host["tree_starts"][:] = capacity * size
        host["context_starts"][:] = 0
        host["number"][0] = number
        tables[:] = NO_SLOT
        tables[:, capacity:] = self._scratch[: len(tables)]
        for index, seat in enumerate(seats):
            sequence = seat.sequence
            if sequence is None:
                continue
            requests[index, column.LENGTH] = sequence.length
            requests[index, column.ROOT_TOKEN] = sequence.tokens[sequence.length - 1]
            if seat.is_drafted:
                max_nodes[index] = max(int(self._tree_requests.shapes[index, kernel.MAX_NODES]), 1)
                host["context_starts"][0, index] = sequence.valid_start
                tables[index, : seat.num_blocks] = sequence.table[: seat.num_blocks]
        stage.begun.send()
        stage.tables.send()

    def _launch(self, number: int, *, is_last: bool) -> None:
        stage, shape = self._stage, self._shape
        assert stage is not None
        self._order.await_step(number)
        if self._graphs.captures(shape):
            # A capture waits for the device, which may wait for a verifier that is gone.
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record()
            self._wait(reached.query)
        self._graphs.run(shape, lambda: self._launch_kernels(stage))
        self._order.signal_draft(number)
        if is_last:
            # The record behind it is waited for.
            self._found.drafts.copy_(self._memory.drafts, non_blocking=True)
        if len(stage.journal) == stage.journal.depth:
            self._read_next()
        stage.journal.record()

    def _launch_kernels(self, stage: _Stage) -> None:
        """The whole of one draft; captured."""
        levels = self._levels
        take_step(
            stage.results,
            stage.seats,
            stage.rows,
            stage.taken,
            num_blocks=stage.capacity,
            block_size=self._target.block_size,
            num_slots=levels.num_slots,
        )
        output = levels.model.extend(stage.arrays, stage.results.hidden)
        if levels.model.hidden_size:
            copy_rows(output.hidden, stage.root_hidden, stage.rows.logit_rows)
        levels.launch(stage.levels, output.logits, stage.root_hidden)
        stamp_draft(stage.seats.number, stage.draft_stamp)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Until the device has got there; past the deadline without the verifier."""
        deadline = monotonic() + _PATIENCE_S
        while not is_done():
            if monotonic() > deadline:
                self._order.release_step(self._number)

    def _read_ready(self) -> None:
        while self._stage is not None and len(self._stage.journal) and self._stage.journal.is_ready():
            self._read_next()

    def _read_all(self) -> None:
        while self._stage is not None and len(self._stage.journal):
            self._read_next()

    def _read_next(self) -> None:
        """Bring the rows up to date with the oldest step that is unread."""
        assert self._stage is not None
        journal = self._stage.journal
        self._wait(journal.is_ready)
        taken = journal.take()
        counts, lengths = taken["counts"].tolist(), taken["lengths"].tolist()
        for index, seat in enumerate(self._seats):
            sequence, count = seat.sequence, counts[index]
            # It has ended, or the step is lost, and there is a gap.
            seat.wants_tree = seat.wants_tree and count > 0
            if sequence is None or count == 0:
                continue
            is_written = bool(taken["is_written"][index])
            goes_on = (
                lengths[index] == sequence.length + count
                and lengths[index] <= seat.num_blocks * self._target.block_size
                and is_written == seat.is_drafted
            )
            tokens = taken["tokens"][index, :count].tolist()
            if not goes_on or not self._rows.advance(sequence, tokens, is_written=is_written):
                self._drop(seat)
            elif is_written:
                self._figures.extend_tokens += count

    def _reply(self, request: DraftRequest) -> DraftBatch:
        """The trees of the run's last step; behind ``finish``."""
        last, count = self._found, request.num_rows
        parts = (last.draft_tokens, last.draft_parents, last.draft_scores, last.num_nodes)
        found = FoundTrees(*(part[:count].numpy() for part in parts))
        return batch_of(request, found.tokens[:, 0], np.arange(count, dtype=np.int32), found)
