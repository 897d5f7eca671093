"""Run overlapped decode steps on the GPU: the host launches a step before it has read the last one.

A *run* is a series of such steps over the same sequences, each in its *seat* (batch row). Lengths,
last tokens, remaining tokens, trees and results live in device memory. A step is one graph, and the
GPU never waits for the host. A sequence that has ended takes no part in later steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from foretoken_kernels.gpu.forced_walk import force_walk
from foretoken_kernels.gpu.kv_commit import kv_commit
from foretoken_kernels.gpu.resident_results import advance_seats, finish_step, gather_hidden
from foretoken_kernels.gpu.resident_rows import lay_out_rows
from foretoken_kernels.resident_state import DraftedTrees, Seats, StepResults, StepRows, new_seats

from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_llama import ResidentPass
from foretoken.models.pinned_buffers import SendRing
from foretoken.resident import ResidentLayout, ResidentMemory, StreamOrder
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.sampling.device_walker import DeviceWalker, WalkStage, walk_result
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT, Seat, SeatResult

# Most block tables that may be in transfer at once.
_TABLES_IN_FLIGHT = 4


class _Shape(NamedTuple):
    """The sizes that a run's graphs are captured for."""

    rows: int
    seqs: int
    max_width: int
    blocks: int
    features: tuple[int, ...]


class _Stage:
    """The buffers of one shape."""

    def __init__(self, resident: ResidentPass, walk: WalkStage) -> None:
        self.resident, self.walk = resident, walk
        arrays, asked = resident.batch.arrays, walk.asked.device
        self.rows = StepRows(
            row_starts=arrays.row_starts,
            token_ids=arrays.token_ids,
            positions=arrays.positions,
            slot_mapping=arrays.slot_mapping,
            context_lens=arrays.context_lens,
            masks=arrays.masks,
            tree_starts=arrays.tree_starts,
            row_seqs=asked["row_seqs"],
            tokens=asked["tokens"],
            parents=asked["parents"],
            sample_positions=asked["positions"],
            num_outputs=asked["num_outputs"],
            max_new=asked["max_new"],
            num_nodes=walk.found.device["num_nodes"],
        )
        self.tables = SendRing(arrays.block_tables, _TABLES_IN_FLIGHT)


class ResidentStep:
    """Launch and read overlapped steps. Not thread-safe.

    Args:
        memory: the memory for results and trees; see ``plain_memory``.
        order: the stream order with the drafter that uses ``memory``.
        max_seats: most seats of a run.
        simulated: mean tokens of a step with a tree, for benchmarks only. None: the target decides.
        graphs: whether to capture launches as graphs.
    """

    def __init__(
        self,
        runner: DeviceRunner,
        walker: DeviceWalker,
        memory: ResidentMemory,
        order: StreamOrder,
        *,
        max_seats: int,
        simulated: float | None,
        graphs: bool,
    ) -> None:
        self._runner, self._walker = runner, walker
        self.memory, self._order = memory, order
        self._simulated = simulated
        device = runner.planes.device
        self._device = device
        self._state: Seats = new_seats(max_seats, device)
        self._owed = torch.zeros(max_seats, dtype=torch.float32, device=device)
        self._trees = DraftedTrees(memory.draft_stamp, memory.num_nodes, memory.draft_tokens, memory.draft_parents)
        self._outcome = StepResults(
            memory.stamp, memory.counts, memory.lengths, memory.num_left, memory.new_tokens, memory.hidden
        )
        self._stages: dict[_Shape, _Stage] = {}
        self._graphs = DeviceGraphs(graphs and device.type == "cuda")
        # The generation of the pass's buffers that stages and graphs use.
        self._generation = -1
        # The current run's seats, shape and block counts.
        self._seats: list[Seat] = []
        self._shape: _Shape | None = None
        self._num_blocks: list[int] = []
        # The numbers of the last launched step and of the last one that was read.
        self.number = 0
        self._num_read = 0

    @property
    def num_in_flight(self) -> int:
        return self.number - self._num_read

    @property
    def seats(self) -> Items[Seat]:
        """Return the current run's seats."""
        return self._seats

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that one step commits for one sequence."""
        return self.memory.layout.tokens

    @torch.inference_mode()
    def begin(self, seats: Items[Seat], features: tuple[int, ...], number: int) -> None:
        """Start a new run after step ``number``. No step may be in flight.

        ``features``: the layers whose hidden states the target captures.
        """
        assert self.num_in_flight == 0
        self.number = self._num_read = number
        widths = [seat.width for seat in seats]
        blocks = max(len(seat.sequence.block_ids) for seat in seats)
        resident = self._runner.resident_pass(features, sum(widths), len(seats), max(widths), blocks)
        stage = self._stage(resident, features)
        assert self._shape is not None
        self._seats, self._num_blocks = list(seats), [0] * len(seats)
        starts = np.full(self._shape.seqs + 1, sum(widths), np.int32)
        starts[: len(seats)] = np.cumsum([0, *widths[:-1]])
        resident.batch.clear(starts)
        self._walker.seat([seat.sequence for seat in seats])
        self._fill_walk(stage, starts)
        self._fill_state()
        self._fill_trees()
        self.send_tables()

    @torch.inference_mode()
    def warm_up(self, features: tuple[int, ...]) -> None:
        """Compile the kernels around the pass before the first request, with empty seats."""
        assert self.num_in_flight == 0
        nodes = self.memory.layout.nodes
        resident = self._runner.resident_pass(features, nodes, 1, nodes, 1)
        stage = self._stage(resident, features)
        assert self._shape is not None
        starts = np.full(self._shape.seqs + 1, nodes, np.int32)
        starts[0] = 0
        self._seats = []
        resident.batch.clear(starts)
        self._fill_walk(stage, starts)
        self._fill_state()
        self._lay_out(stage, self._shape.max_width)
        self._conclude(stage, self._shape.max_width)

    def _stage(self, resident: ResidentPass, features: tuple[int, ...]) -> _Stage:
        batch = resident.batch.shape
        shape = _Shape(batch.rows, batch.seqs, batch.max_seq_rows, batch.blocks, features)
        if resident.generation != self._generation:
            self._stages.clear()
            self._graphs.clear()
            self._generation = resident.generation
        stage = self._stages.get(shape)
        if stage is None:
            stage = _Stage(resident, self._walker.new_stage(batch.rows, batch.seqs, MAX_IN_FLIGHT + 1))
            self._stages[shape] = stage
        self._shape = shape
        return stage

    def _fill_walk(self, stage: _Stage, row_starts: np.ndarray) -> None:
        """Fill the walk's input where no kernel writes it. Padding rows belong to no sequence."""
        asked = stage.walk.asked
        asked.wait()
        host = asked.host
        for name in ("row_seqs", "parents", "tokens"):
            host[name][:] = -1
        host["row_starts"][:] = row_starts
        host["slots"][:] = 0
        host["slots"][: len(self._seats)] = [seat.sequence.slot for seat in self._seats]
        host["max_new"][:] = 1
        asked.send()

    def _fill_state(self) -> None:
        state = np.zeros((5, len(self._state.slots)), np.int32)
        for index, seat in enumerate(self._seats):
            sequence = seat.sequence
            state[:, index] = (
                sequence.slot,
                len(sequence.tokens),
                sequence.max_new_tokens,
                sequence.num_output_tokens,
                sequence.tokens[-1],
            )
        for column, values in zip(self._state[:5], torch.from_numpy(state).to(self._device), strict=True):
            column.copy_(values)
        self._state.step.fill_(self.number)

    def _fill_trees(self) -> None:
        """Write the first step's trees, stamped with the last step's number, as a drafter would."""
        memory = self.memory
        num_seats, nodes = memory.draft_tokens.shape
        counts = np.ones(num_seats, np.int32)
        both = np.zeros((2, num_seats, nodes), np.int32)
        for index, seat in enumerate(self._seats):
            if seat.tree is not None:
                counts[index] = seat.tree.num_nodes
                both[:, index, : seat.tree.num_nodes] = seat.tree.tokens, seat.tree.parents
        memory.num_nodes.copy_(torch.from_numpy(counts))
        on_device = torch.from_numpy(both).to(self._device)
        memory.draft_tokens.copy_(on_device[0])
        memory.draft_parents.copy_(on_device[1])
        memory.draft_stamp.copy_(self._state.step)

    def has_room(self, num_blocks: int) -> bool:
        """Return whether the run's block tables hold ``num_blocks`` blocks of one sequence."""
        assert self._shape is not None
        return num_blocks <= self._shape.blocks

    @torch.inference_mode()
    def send_tables(self) -> None:
        """Send block tables with the sequences' new blocks, for the steps launched after this."""
        assert self._shape is not None
        counts = [0 if seat.is_left else len(seat.sequence.block_ids) for seat in self._seats]
        if all(new <= old for new, old in zip(counts, self._num_blocks, strict=True)):
            return
        tables = np.zeros((self._shape.seqs, self._shape.blocks), np.int32)
        for index, (seat, count) in enumerate(zip(self._seats, counts, strict=True)):
            if count:
                tables[index, :count] = seat.sequence.block_ids
        self._num_blocks = counts
        self._stages[self._shape].tables.send(tables)

    @torch.inference_mode()
    def launch(self, *, is_drafted: bool) -> None:
        """Launch the next step.

        ``is_drafted``: wait on the GPU for the trees that follow the last step; they may still be
        missing.
        """
        assert self._shape is not None and self.num_in_flight < MAX_IN_FLIGHT
        stage = self._stages[self._shape]
        if is_drafted:
            self._order.await_draft(self.number)
        self._graphs.run(self._shape, partial(self._launch_kernels, stage, self._shape.max_width))
        self.number += 1
        self._order.signal_step(self.number)
        stage.walk.found.record()

    def release(self) -> None:
        """Let steps in flight go on without the trees that they wait for."""
        self._order.release_draft(self.number)

    def is_done(self) -> bool:
        """Return whether the oldest step in flight is done."""
        assert self._shape is not None
        return self._stages[self._shape].walk.found.is_ready()

    def receive(self) -> list[SeatResult]:
        """Return the results by seat of the oldest step in flight, which must be done."""
        assert self._shape is not None
        found = self._stages[self._shape].walk.found.take()
        self._num_read += 1
        return [
            SeatResult(walk_result(found, index, seat.number), int(found["num_nodes"][index]))
            for index, seat in enumerate(self._seats)
        ]

    def _launch_kernels(self, stage: _Stage, max_width: int) -> None:
        """Launch all kernels of one step; a graph captures this."""
        self._lay_out(stage, max_width)
        stage.resident.launch()
        self._conclude(stage, max_width)

    def _lay_out(self, stage: _Stage, max_width: int) -> None:
        lay_out_rows(
            self._state,
            self._trees,
            stage.resident.batch.arrays.block_tables,
            stage.rows,
            block_size=self._runner.block_size,
            num_slots=self._runner.num_blocks * self._runner.block_size,
            vocab_size=self._runner.config.vocab_size,
            max_width=max_width,
            max_depth=self.max_tokens - 1,
        )

    def _conclude(self, stage: _Stage, max_width: int) -> None:
        """Launch the kernels that follow the pass."""
        walk = stage.walk.result
        self._walker.sample_and_walk(stage.walk, stage.resident.logits)
        if self._simulated is not None:
            force_walk(stage.rows, walk, self._owed, self._simulated, max_width)
        advance_seats(self._state, stage.rows, walk, self._outcome)
        if max_width > 1:
            kv_commit(
                self._runner.planes,
                walk.accepted,
                walk.num_accepted,
                stage.rows.tree_starts,
                stage.resident.batch.arrays.block_tables,
                self._runner.block_size,
            )
        if stage.resident.features is not None and self.memory.layout.hidden_width:
            gather_hidden(stage.resident.features, stage.rows, walk, self._outcome)
        finish_step(self._state, self._outcome)


def plain_memory(max_seats: int, device: torch.device) -> ResidentMemory:
    """Return the memory for runs without a drafter."""
    layout = ResidentLayout(seats=max_seats, tokens=1, nodes=1, hidden_width=0, hidden_dtype=torch.float32)
    return ResidentMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)
