"""Launch and read overlapped steps on the GPU: a step is launched before the last one was read.

A sequence joins with its whole prompt but the last token computed, takes a *seat* (batch row), and
keeps it to its end. Lengths, last tokens, remaining tokens, trees and results live in device
memory. A step is one graph, and the GPU never waits for the host. A sequence that has ended takes
no part in later steps.

A step in which a seat has token masks is launched in two halves: ``launch`` lays out rows and runs
the target's pass, ``bind`` sends the masks and launches sampling and what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from foretoken_kernels.gpu.forced_walk import force_walk
from foretoken_kernels.gpu.kv_commit import kv_commit
from foretoken_kernels.gpu.resident_results import advance_seats, finish_step, gather_hidden
from foretoken_kernels.gpu.resident_rows import lay_out_rows
from foretoken_kernels.gpu.resident_seats import join_seats
from foretoken_kernels.gpu.shared_rows import share_rows
from foretoken_kernels.resident_state import NO_NODE, DraftedTrees, Joining, Seats, StepResults, StepRows, new_seats

from foretoken.models.batch import ForwardBatch, blank_batch
from foretoken.models.device_batch import bucket, seq_bucket
from foretoken.models.device_batches import MAX_PROMPT_GRAPH_ROWS, PROMPT_SEQS, prompt_bucket
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_llama import ResidentPass
from foretoken.models.pinned_buffers import FetchBuffer, PinnedBuffers, SendRing
from foretoken.resident import ResidentLayout, ResidentMemory, StreamOrder
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.sampling.allowed_tokens import TreeMasks
from verifier_svc.sampling.device_logprobs import LogprobNumbers, logprob_numbers
from verifier_svc.sampling.device_masks import SentMasks
from verifier_svc.sampling.device_walker import DeviceWalker, WalkStage, walk_results
from verifier_svc.sampling.verify import WalkResult, followed
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT, Seat, SeatResult, SeatTree
from verifier_svc.speculation.candidate_shapes import SHARED_FROM

# Most block tables that may be in transfer at once.
_TABLES_IN_FLIGHT = 4
# Numbers of sequences, and rows of a step, whose graphs are captured before the first request.
_SEAT_COUNTS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 513, 16))
MAX_USUAL_ROWS = 1024
# Steps of other sizes before their graph is captured while requests wait. Where a batch shrinks or grows, most sizes
# pass sooner.
_EAGER_STEPS = 8


class _Shape(NamedTuple):
    """The sizes that a step's graph is captured for. ``is_shared``: whether the GPU divides the rows."""

    rows: int
    seqs: int
    max_width: int
    blocks: int
    features: tuple[int, ...]
    is_shared: bool


class _Stage:
    """The buffers of one shape."""

    def __init__(self, resident: ResidentPass, walk: WalkStage, *, is_shared: bool) -> None:
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
        # Most rows of each seat. None: rows are not shared.
        sizes = {"widths": ((resident.batch.shape.seqs,), torch.int32)}
        self.widths = PinnedBuffers(sizes, arrays.row_starts.device) if is_shared else None
        # The first row of each seat, and the trees that the rows got.
        self.starts = FetchBuffer(arrays.row_starts)
        self.tokens, self.parents = FetchBuffer(asked["tokens"]), FetchBuffer(asked["parents"])


@dataclass(slots=True)
class _Launched:
    """A step that was not read yet.

    Attributes:
        number: the step's.
        stage, shape: None for an empty step, whose end is ``reached``.
        is_bound: whether the second half was launched too.
        logprobs: those of all tokens that the seats ``logprob_seats`` may have got, seat by seat.
        found: the trees that came from the host, by seat.
    """

    number: int
    seats: tuple[Seat | None, ...]
    stage: _Stage | None
    shape: _Shape | None
    found: Mapping[int, Draft]
    is_bound: bool = False
    reached: Any = None
    logprob_seats: list[int] = field(default_factory=list)
    logprobs: LogprobNumbers | None = None


class ResidentStep:  # large: seats, launches and results of one step share all its buffers
    """Seat sequences, launch steps, and read them. Not thread-safe.

    Args:
        memory: the memory for results, trees and prompts' hidden states; see ``plain_memory``.
        order: the stream order with the drafter that uses ``memory``.
        max_seats: most seats.
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
        self._is_cuda = device.type == "cuda"
        self._state: Seats = new_seats(max_seats, device)
        self._joining = PinnedBuffers({name: ((max_seats,), torch.int32) for name in Joining._fields}, device)
        self._owed = torch.zeros(max_seats, dtype=torch.float32, device=device)
        self._drafted = DraftedTrees(memory.draft_stamp, memory.num_nodes, memory.draft_tokens, memory.draft_parents)
        nodes = memory.layout.nodes
        sizes = {"stamp": (1,), "num_nodes": (max_seats,), "tokens": (max_seats, nodes), "parents": (max_seats, nodes)}
        self._found = PinnedBuffers({name: (size, torch.int32) for name, size in sizes.items()}, device)
        self._outcome = StepResults(
            memory.stamp, memory.counts, memory.lengths, memory.num_left, memory.new_tokens, memory.hidden
        )
        self._stages: dict[_Shape, _Stage] = {}
        self._graphs = DeviceGraphs(graphs and self._is_cuda, eager_uses=_EAGER_STEPS)
        # The generation of the pass's buffers that stages and graphs use.
        self._generation = -1
        self._features: tuple[int, ...] = ()
        # The seats of the next step, and the block tables that the device has of them.
        self._seats: list[Seat | None] = [None] * max_seats
        self._tables = np.zeros((max_seats, 0), np.int32)
        self._num_blocks = [0] * max_seats
        # Rows of a seat, on average, where the best nodes of all get them; 0: each node has a row.
        self._budget = 0
        # What has changed since the last launch: seats that were taken, and whether the rows must
        # be divided anew; the most rows of each seat and of all, as they were divided last.
        self._joined: list[int] = []
        self._widths: list[int] = []
        self._num_rows = 0
        self._is_laid_out = False
        self._shape: _Shape | None = None
        self._in_flight: deque[_Launched] = deque()
        # The number of the last launched step.
        self.number = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def seats(self) -> Items[Seat | None]:
        """Return the seats of the next step."""
        return self._seats

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that one step commits for one sequence."""
        return self.memory.layout.tokens

    @torch.inference_mode()
    def begin(self, features: tuple[int, ...], number: int) -> None:
        """Start with empty seats after step ``number``. No step may be in flight.

        ``features``: the layers whose hidden states the target captures.
        """
        assert not self._in_flight
        self._features, self.number = features, number
        self._seats = [None] * len(self._seats)
        self._num_blocks = [0] * len(self._seats)
        self._joined = []
        self._is_laid_out = False
        self._state.step.fill_(number)

    @torch.inference_mode()
    def warm_up(self, features: tuple[int, ...]) -> None:
        """Compile the kernels around the pass before the first request, with empty seats."""
        assert not self._in_flight
        self._features = features
        nodes = self.memory.layout.nodes
        stage = self._stage(nodes, 1, nodes, 1, is_shared=False)
        assert self._shape is not None
        starts = np.full(self._shape.seqs + 1, nodes, np.int32)
        starts[0] = 0
        stage.resident.batch.clear(starts)
        self._fill_walk(stage, starts)
        join_seats(self._state, Joining(**self._joining.device))
        self._lay_out(stage, self._shape.max_width)
        self._conclude(stage, self._shape.max_width)
        self._conclude(stage, self._shape.max_width, self._walker.masks.send(self._shape.rows, []))
        self._is_laid_out = False

    @torch.inference_mode()
    def captures(self, features: tuple[int, ...], sizes: Items[tuple[int, int]], *, has_found: bool) -> Iterator[None]:
        """Capture the graphs of usual sizes, one for each item; no step may be in flight meanwhile.

        Args:
            features: as for ``begin``.
            sizes: rows of a sequence in a step, on average and at most.
            has_found: whether some sequences of a step may have trees from the host.
        """
        # Prompts of one sequence, of a few, and of many.
        for seqs in PROMPT_SEQS:
            rows = prompt_bucket(seqs)
            while rows <= min(MAX_PROMPT_GRAPH_ROWS, self._runner.most_rows):
                self._runner.forward(blank_batch(rows, min(seqs, len(self._seats))), features)
                yield
                rows = prompt_bucket(rows + 1)
        for rows, seqs, width, is_shared in self._usual_sizes(sizes, has_found=has_found):
            self._features = features
            stage = self._stage(rows, seqs, width, 1, is_shared=is_shared)
            shape = self._shape
            assert shape is not None
            self._shape, self._is_laid_out = None, False
            if not self._graphs.lacks(shape):
                continue
            starts = np.minimum(np.arange(shape.seqs + 1, dtype=np.int32) * width, rows)
            stage.resident.batch.clear(starts)
            self._fill_walk(stage, starts)
            self._graphs.capture(shape, partial(self._launch_kernels, stage, shape.max_width))
            yield

    def _usual_sizes(self, sizes: Items[tuple[int, int]], *, has_found: bool) -> Iterator[tuple[int, int, int, bool]]:
        """Yield rows, sequences, the most rows of one sequence, and whether they share rows, as for ``captures``."""
        for count in _SEAT_COUNTS:
            for mean, most in sizes:
                is_shared = mean < most
                if is_shared and count < SHARED_FROM:
                    continue
                if count <= len(self._seats) and count * mean <= MAX_USUAL_ROWS:
                    yield count * mean, count, most, is_shared
        count, nodes = 1, self.memory.layout.nodes
        while has_found and count <= seq_bucket(len(self._seats)):
            # Any number of the sequences has a tree of any size.
            seqs = min(count, len(self._seats))
            rows = count // 2 + 2
            while rows <= min(seqs * nodes, MAX_USUAL_ROWS):
                yield rows, seqs, nodes, False
                rows = bucket(rows) + 1
            count *= 2

    # Seats.

    def free_seat(self) -> int:
        """Return the lowest free seat. There is one for each batch slot."""
        return self._seats.index(None)

    def join(self, index: int, seat: Seat) -> None:
        """Seat a sequence in a free seat, from the next step on. Its first tree is its root."""
        assert self._seats[index] is None
        self._seats[index] = seat
        self._num_blocks[index] = 0
        self._joined.append(index)
        self._is_laid_out = False

    def leave(self, index: int) -> None:
        """Free the seat of a sequence that has ended. No later step has rows for it."""
        self._seats[index] = None
        self._is_laid_out = False
        if index in self._joined:
            self._joined.remove(index)

    def resize(self, index: int, width: int) -> None:
        """Change the most nodes of a seat's next trees."""
        seat = self._seats[index]
        assert seat is not None
        if seat.width != width:
            seat.width = width
            self._is_laid_out = False

    def share_rows(self, budget: int) -> None:
        """Give seats this many rows on average in the next steps; the best nodes of all get them. 0: every node."""
        if budget != self._budget:
            self._budget = budget
            self._is_laid_out = False

    def num_rows(self, seat: Seat) -> int:
        """Return the rows of a seat in a step, on average, without a tree from the host."""
        return min(seat.width, self._budget) if self._budget else seat.width

    # Launches.

    @torch.inference_mode()
    def prefill(self, batch: ForwardBatch) -> None:
        """Launch a pass over prompt tokens, without logits."""
        self._runner.forward(batch, self._features)

    @torch.inference_mode()
    def keep_hidden(self, parts: Items[tuple[int, int]]) -> int:
        """Copy hidden states of the last prefill pass, one part after the other, for the drafter.

        Returns the row of ``memory.prompt_hidden`` where the first one is.

        Args:
            parts: first row and number of rows in the pass.
        """
        layout = self.memory.layout
        # The drafter has read this half: the last step in flight waits for its trees.
        first = at = layout.prompt_rows * (self.number % 2)
        if layout.hidden_width:
            for start, count in parts:
                self.memory.prompt_hidden[at : at + count].copy_(self._runner.features[start : start + count])
                at += count
        return first

    @torch.inference_mode()
    def launch(self, *, is_drafted: bool, found: Mapping[int, Draft]) -> None:
        """Launch the next step. Without seats it is empty: it only gets its number.

        If a seat has masks, only the first half is launched, and the caller has to ``bind`` it.

        Args:
            is_drafted: wait on the GPU for the trees that follow the last step; they may still be
                missing.
            found: trees of seats, in place of the drafter's. All tokens before them have been read.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT and self.is_bound
        stage = self._prepare(found)
        if found:
            self._send_found(found)
        if is_drafted:
            self._order.await_draft(self.number)
        self.number += 1
        launched = _Launched(self.number, tuple(self._seats), stage, self._shape, found)
        self._in_flight.append(launched)
        if stage is not None and any(seat is not None and seat.is_masked for seat in self._seats):
            assert self._shape is not None
            self._lay_out(stage, self._shape.max_width)
            stage.starts.fetch()
            stage.tokens.fetch()
            stage.parents.fetch()
            pass_alone = stage.resident.launch if self._shape.rows > MAX_USUAL_ROWS else stage.resident.run
            pass_alone()
            return
        if stage is None:
            finish_step(self._state, self._outcome)
        else:
            self._run(stage)
        self._complete(launched)

    @property
    def is_bound(self) -> bool:
        """Return whether the last step was launched as a whole."""
        return not self._in_flight or self._in_flight[-1].is_bound

    def has_trees(self) -> bool:
        """Return whether ``trees`` of the step that is not bound have arrived."""
        stage = self._in_flight[-1].stage
        assert stage is not None
        return stage.parents.is_ready()

    def trees(self) -> dict[int, SeatTree]:
        """Return the trees of the seats with masks, by seat, without those that have ended."""
        launched = self._in_flight[-1]
        stage = launched.stage
        assert stage is not None
        tokens, parents, starts = stage.tokens.values(), stage.parents.values(), stage.starts.values()
        found = {}
        for index, seat in enumerate(launched.seats):
            if seat is None or not seat.is_masked:
                continue
            rows = slice(starts[index], starts[index + 1])
            count = int((tokens[rows] != NO_NODE).sum())
            if count:
                found[index] = SeatTree(seat, tokens[rows][:count], parents[rows][:count])
        return found

    @torch.inference_mode()
    def bind(self, masks: Mapping[int, TreeMasks]) -> None:
        """Launch the second half of the last step: sampling with these masks, and what follows.

        ``masks``: by seat, for all seats of ``trees``.
        """
        launched = self._in_flight[-1]
        stage, shape = launched.stage, launched.shape
        assert stage is not None and shape is not None
        starts = stage.starts.values()
        sent = self._walker.masks.send(shape.rows, [(int(starts[index]), each) for index, each in masks.items()])
        self._run_graph((shape, sent.key), shape, partial(self._conclude, stage, shape.max_width, sent))
        self._complete(launched)

    def _complete(self, launched: _Launched) -> None:
        """Signal a step's end and fetch its results, after all its kernels were launched."""
        launched.is_bound = True
        self._order.signal_step(launched.number)
        stage = launched.stage
        if stage is None:
            if self._is_cuda:
                launched.reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
                launched.reached.record()
            return
        for index, seat in enumerate(launched.seats):
            if seat is not None and seat.sequence.sampling.logprobs is not None:
                launched.logprob_seats.append(index)
        if launched.logprob_seats:
            launched.logprobs = self._launch_logprobs(stage, launched)
        stage.walk.found.record()

    def release(self) -> None:
        """Let steps in flight go on without the trees that they wait for."""
        self._order.release_draft(self.number)

    def is_done(self) -> bool:
        """Return whether the oldest step in flight, which is bound, is done."""
        oldest = self._in_flight[0]
        if oldest.stage is not None:
            return oldest.stage.walk.found.is_ready()
        return oldest.reached is None or bool(oldest.reached.query())

    def wait(self) -> None:
        """Wait until the oldest step in flight is done, without a break."""
        oldest = self._in_flight[0]
        if oldest.stage is not None:
            oldest.stage.walk.found.wait()
        elif oldest.reached is not None:
            oldest.reached.synchronize()

    def receive(self) -> list[SeatResult]:
        """Return the results of the oldest step in flight, which must be done.

        Samplers of sequences with masks advance by their results.
        """
        launched = self._in_flight.popleft()
        if launched.stage is None:
            return []
        found = launched.stage.walk.found.take()
        taken = [(index, seat) for index, seat in enumerate(launched.seats) if seat is not None]
        drafts = launched.found
        sources = [(index, drafts[index].sources if index in drafts else seat.number) for index, seat in taken]
        walks = walk_results(found, sources)
        if launched.logprobs is not None:
            places = {index: place for place, (index, _) in enumerate(taken)}
            for at, index in enumerate(launched.logprob_seats):
                place = places[index]
                walk, most = walks[place], taken[place][1].sequence.sampling.logprobs
                assert most is not None
                depth = len(launched.logprobs.logprobs) // len(launched.logprob_seats)
                rows = range(at * depth, at * depth + len(walk.tokens))
                entries = launched.logprobs.results(walk.tokens, [most] * len(walk.tokens), rows)
                walks[place] = walk._replace(logprobs=entries)
        num_nodes = found["num_nodes"].tolist()
        for place, (index, seat) in enumerate(taken):
            if seat.is_masked and num_nodes[index] and not seat.is_left:
                walks[place] = self._followed(seat, walks[place])
        return [
            SeatResult(seat, walk, num_nodes[index], drafts.get(index))
            for (index, seat), walk in zip(taken, walks, strict=True)
        ]

    def _followed(self, seat: Seat, walk: WalkResult) -> WalkResult:
        """Advance a sampler with masks by a walk, and return what to commit."""
        sampler = seat.sequence.sampler
        if self._simulated is None:
            return followed(sampler, walk)
        # A simulated text need not match: each step has the first one's masks.
        sampler.num_output_tokens += len(walk.tokens)
        return walk

    def _launch_logprobs(self, stage: _Stage, launched: _Launched) -> LogprobNumbers:
        """Launch the logprobs of the tokens that the seats got, as many as a step can give.

        The next pass overwrites the logits. Which tokens are real is known with the results.
        """
        device, walk = self._state.slots.device, stage.walk.result
        # No walk emits more tokens than its seat has rows.
        depth = min(self.max_tokens, max(self._widths[index] for index in launched.logprob_seats))
        on_host = torch.tensor(launched.logprob_seats, dtype=torch.int64)
        seats = (on_host.pin_memory() if self._is_cuda else on_host).to(device, non_blocking=True)
        logits = stage.resident.logits
        rows = stage.rows.row_starts[seats, None] + walk.nodes[seats, :depth]
        tokens = walk.tokens[seats, :depth]
        wanted = [launched.seats[index] for index in launched.logprob_seats]
        numbers = logprob_numbers(
            logits,
            rows.long().clamp(0, len(logits) - 1).flatten(),
            tokens.long().clamp(0, logits.shape[1] - 1).flatten(),
            max(seat.sequence.sampling.logprobs or 0 for seat in wanted if seat is not None),
        )
        return numbers.to_host()

    def _prepare(self, found: Mapping[int, Draft]) -> _Stage | None:
        """Bring the device up to date with seats and block tables; return the next step's stage."""
        longest = num_rows = 0
        grown = False
        widths = [0] * len(self._seats)
        for index, seat in enumerate(self._seats):
            if seat is None:
                continue
            draft = found.get(index)
            widths[index] = seat.width if draft is None else max(seat.width, draft.tree.num_nodes)
            num_rows += self.num_rows(seat) if draft is None else widths[index]
            count = len(seat.sequence.block_ids)
            longest = max(longest, count)
            grown |= count > self._num_blocks[index]
        if longest == 0:
            return None
        shape = self._shape
        is_laid_out = self._is_laid_out and widths == self._widths and num_rows == self._num_rows
        if not is_laid_out or shape is None or longest > shape.blocks or self._has_moved():
            self._widths, self._num_rows = widths, num_rows
            return self._lay_out_seats(longest)
        if grown:
            self._send_tables(shape)
        return self._stages[shape]

    def _has_moved(self) -> bool:
        return self._generation != self._runner.generation

    def _lay_out_seats(self, longest: int) -> _Stage:
        """Divide the rows anew among the seats. Steps in flight keep their own stages' results."""
        last = max(index for index, seat in enumerate(self._seats) if seat is not None)
        widths = self._widths[: last + 1]
        # Trees from the host have any size; with one bound for all there are few graphs.
        is_wide = any(seat is not None and seat.width < width for seat, width in zip(self._seats, widths, strict=False))
        num_rows, most = self._num_rows, self.memory.layout.nodes if is_wide else max(widths)
        stage = self._stage(num_rows, last + 1, most, longest, is_shared=num_rows < sum(widths))
        shape = self._shape
        assert shape is not None
        starts = np.full(shape.seqs + 1, num_rows, np.int32)
        # Where rows are shared, a kernel divides them in each step.
        starts[: last + 1] = np.minimum(np.cumsum([0, *widths[:-1]]), num_rows)
        stage.resident.batch.clear(starts)
        if stage.widths is not None:
            stage.widths.wait()
            stage.widths.host["widths"][:] = 0
            stage.widths.host["widths"][: last + 1] = widths
            stage.widths.send()
        self._walker.seat([seat.sequence for index in self._joined if (seat := self._seats[index]) is not None])
        self._fill_walk(stage, starts)
        self._send_joining()
        self._num_blocks = [0] * len(self._seats)
        self._send_tables(shape)
        self._is_laid_out = True
        return stage

    def _stage(self, rows: int, seqs: int, max_width: int, blocks: int, *, is_shared: bool) -> _Stage:
        resident = self._runner.resident_pass(self._features, rows, seqs, max_width, blocks)
        batch = resident.batch.shape
        shape = _Shape(batch.rows, batch.seqs, batch.max_seq_rows, batch.blocks, self._features, is_shared)
        if resident.generation != self._generation:
            self._stages.clear()
            self._graphs.clear()
            self._generation = resident.generation
        stage = self._stages.get(shape)
        if stage is None:
            walk = self._walker.new_stage(batch.rows, batch.seqs, MAX_IN_FLIGHT + 1)
            stage = _Stage(resident, walk, is_shared=is_shared)
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
        slots = [0 if seat is None else seat.sequence.slot for seat in self._seats[: len(host["slots"])]]
        host["slots"][:] = 0
        host["slots"][: len(slots)] = slots
        host["max_new"][:] = 1
        asked.send()

    def _send_joining(self) -> None:
        """Tell the device of the sequences that join."""
        if not self._joined:
            return
        joining = self._joining
        joining.wait()
        joining.host["joins"][:] = 0
        for index in self._joined:
            seat = self._seats[index]
            assert seat is not None
            sequence = seat.sequence
            values = (
                1,
                sequence.slot,
                len(sequence.tokens),
                sequence.max_new_tokens,
                sequence.num_output_tokens,
                sequence.tokens[-1],
                self.number,
            )
            for name, value in zip(Joining._fields, values, strict=True):
                joining.host[name][index] = value
        joining.send()
        join_seats(self._state, Joining(**joining.device))
        self._joined = []

    def _send_found(self, found: Mapping[int, Draft]) -> None:
        """Send trees for the next step."""
        self._found.wait()
        host = self._found.host
        host["stamp"][0] = self.number
        host["num_nodes"][:] = 0
        for index, draft in found.items():
            num_nodes = draft.tree.num_nodes
            host["num_nodes"][index] = num_nodes
            host["tokens"][index, :num_nodes] = draft.tree.tokens
            host["parents"][index, :num_nodes] = draft.tree.parents
        self._found.send()

    def _send_tables(self, shape: _Shape) -> None:
        """Send block tables with the sequences' new blocks, for the steps launched after this."""
        if self._tables.shape[1] < shape.blocks:
            grown = np.zeros((len(self._seats), shape.blocks), np.int32)
            grown[:, : self._tables.shape[1]] = self._tables
            self._tables = grown
        for index, seat in enumerate(self._seats):
            if seat is None:
                continue
            blocks, known = seat.sequence.block_ids, self._num_blocks[index]
            if len(blocks) > known:
                self._tables[index, known : len(blocks)] = blocks[known:]
                self._num_blocks[index] = len(blocks)
        self._stages[shape].tables.send(np.ascontiguousarray(self._tables[: shape.seqs, : shape.blocks]))

    def _run(self, stage: _Stage) -> None:
        """Run a step, by its graph if that pays."""
        shape = self._shape
        assert shape is not None
        self._run_graph(shape, shape, partial(self._launch_kernels, stage, shape.max_width))

    def _run_graph(self, key: Hashable, shape: _Shape, launch: Callable[[], None]) -> None:
        """Launch a step of this shape, or its second half, by a graph if that pays."""
        if shape.rows > MAX_USUAL_ROWS:
            # It keeps the GPU busy for longer than the host takes to launch it.
            launch()
        else:
            self._graphs.run(key, launch)

    def _launch_kernels(self, stage: _Stage, max_width: int) -> None:
        """Launch all kernels of one step; a graph captures this."""
        self._lay_out(stage, max_width)
        stage.resident.launch()
        self._conclude(stage, max_width)

    def _lay_out(self, stage: _Stage, max_width: int) -> None:
        found = DraftedTrees(**self._found.device)
        if stage.widths is not None:
            share_rows(
                self._state,
                self._drafted,
                found,
                self.memory.draft_scores,
                stage.widths.device["widths"],
                stage.rows.row_starts,
                stage.walk.asked.device["row_starts"],
                num_rows=len(stage.rows.token_ids),
                max_width=max_width,
            )
        lay_out_rows(
            self._state,
            self._drafted,
            found,
            stage.resident.batch.arrays.block_tables,
            stage.rows,
            block_size=self._runner.block_size,
            num_slots=self._runner.num_blocks * self._runner.block_size,
            vocab_size=self._runner.config.vocab_size,
            max_width=max_width,
            max_depth=self.max_tokens - 1,
        )

    def _conclude(self, stage: _Stage, max_width: int, masks: SentMasks | None = None) -> None:
        """Launch the kernels that follow the pass."""
        walk = stage.walk.result
        self._walker.sample_and_walk(stage.walk, stage.resident.logits, masks)
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


def plain_memory(max_seats: int, max_nodes: int, device: torch.device) -> ResidentMemory:
    """Return the memory for steps without a drafter on the device. ``max_nodes``: of a tree from the host."""
    layout = ResidentLayout(
        seats=max_seats, tokens=max_nodes, nodes=max_nodes, hidden_width=0, hidden_dtype=torch.float32
    )
    return ResidentMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)
