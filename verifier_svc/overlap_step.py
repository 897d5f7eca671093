"""Launch and read overlapped steps on the GPU: a step is launched before the last one was read.

A sequence joins with its whole prompt but the last token computed, takes a *seat* (batch row), and
keeps it to its end. Lengths, last tokens, remaining tokens, trees and results live in device
memory. A step is three graphs, and the GPU never waits for the host. A sequence that has ended takes
no part in later steps. Prompts are computed in a step's pass (verifier_svc/joined_prompts.py); then
its rows are laid out without a graph.

A step in which a seat has token masks is launched in two halves: ``launch`` lays out rows and runs
the target's pass, ``bind`` sends the masks and launches sampling and what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from foretoken_kernels.overlap_state import NO_NODE

from foretoken.models.batch import ForwardBatch, blank_batch
from foretoken.models.device_batch import NARROW_BLOCKS, BatchShape
from foretoken.models.device_llama import OverlapPass
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from verifier_svc.joined_prompts import JoinedSizes, WaitingPrompts
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap_graphs import OverlapGraphs
from verifier_svc.overlap_kernels import OverlapKernels
from verifier_svc.overlap_parts import StepPart, StepParts
from verifier_svc.overlap_seats import SeatNeeds, StepSeats
from verifier_svc.overlap_sizes import ShapeRows, long_sizes, prompt_passes, usual_sizes
from verifier_svc.overlap_stage import Stage, StepShape
from verifier_svc.sampling.allowed_tokens import TreeMasks
from verifier_svc.sampling.device_logprobs import LogprobNumbers
from verifier_svc.sampling.device_walker import DeviceWalker, walk_results
from verifier_svc.sampling.verify import WalkResult, followed
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT, BatchRow, BatchRowResult, BatchRowTree
from verifier_svc.scheduling.draft import Draft


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
    seats: tuple[BatchRow | None, ...]
    stage: Stage | None
    shape: StepShape | None
    found: Mapping[int, Draft]
    is_bound: bool = False
    reached: Any = None
    logprob_seats: list[int] = field(default_factory=list)
    logprobs: LogprobNumbers | None = None


class ResidentStep:  # large: seats, launches and results of one step share all its buffers
    """Seat sequences, launch steps, and read them. Not thread-safe.

    Attributes:
        seating: who has a seat in the next step.

    Args:
        memory: the memory for results, trees and prompts' hidden states; see ``plain_memory``.
        order: the stream order with the drafter that uses ``memory``.
        max_seats: most seats.
        max_prompt_rows: most prompt tokens in a step.
        simulated: mean tokens of a step with a tree, for benchmarks only. None: the target decides.
        graphs: whether to capture launches as graphs.
    """

    def __init__(
        self,
        runner: DeviceRunner,
        walker: DeviceWalker,
        memory: OverlapMemory,
        order: StreamOrder,
        *,
        max_seats: int,
        max_prompt_rows: int,
        simulated: float | None,
        graphs: bool,
    ) -> None:
        self._runner, self._walker, self._max_prompt_rows = runner, walker, max_prompt_rows
        self.memory, self._order = memory, order
        self._simulated = simulated
        self._is_cuda = runner.planes.device.type == "cuda"
        self.seating = StepSeats(max_seats, runner.planes.device)
        self._kernels = OverlapKernels(runner, walker, memory, self.seating.state, simulated)
        self._stages: dict[StepShape, Stage] = {}
        self._parts = StepParts(graphs=graphs and self._is_cuda)
        # The generation of the pass's buffers that stages and graphs use.
        self._generation = -1
        self._features: tuple[int, ...] = ()
        self._shape: StepShape | None = None
        # Prompts that wait for the next step's pass.
        self._joined_sizes = JoinedSizes(runner.sizes, max_seats, memory.layout.nodes)
        self._waiting: WaitingPrompts | None = None
        self._in_flight: deque[_Launched] = deque()
        # The number of the last launched step.
        self.number = 0

    @property
    def sizes(self) -> OverlapGraphs:
        """Return the sizes whose graphs run steps."""
        return self._parts.sizes

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def generation(self) -> int:
        """Return a number that grows when the pass's buffers move, which ends all graphs."""
        return self._runner.generation

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that one step commits for one sequence."""
        return self.memory.layout.tokens

    @torch.inference_mode()
    def begin(self, features: tuple[int, ...], number: int) -> None:
        """Start with empty seats after step ``number``. No step may be in flight.

        ``features``: the layers whose hidden states the target captures.
        """
        assert not self._in_flight and self._waiting is None
        self._features, self.number = features, number
        self.seating.begin(number)

    @torch.inference_mode()
    def warm_up(self, features: tuple[int, ...]) -> None:
        """Compile the kernels around the pass before the first request, with empty seats."""
        assert not self._in_flight
        self._features = features
        nodes = self.memory.layout.nodes
        stage = self._stage(nodes, 1, nodes, 1)
        assert self._shape is not None
        starts = np.full(self._shape.seqs + 1, nodes, np.int32)
        starts[0] = 0
        stage.resident.batch.clear(starts)
        self._fill_walk(stage, starts)
        self.seating.compile()
        self._kernels.lay_out(stage, self._shape)
        self._kernels.conclude(stage, self._shape.max_width)
        self._kernels.conclude(stage, self._shape.max_width, self._walker.masks.send(self._shape.rows, []))
        self.seating.forget_layout()

    @property
    def has_long_sequences(self) -> bool:
        """Return whether a sequence may need wider block tables than the narrowest, apart from its tree's blocks."""
        runner = self._runner
        room = (runner.sizes.blocks - 1) * runner.block_size - self.memory.layout.nodes
        return room > NARROW_BLOCKS * runner.block_size

    @torch.inference_mode()
    def captures(
        self, features: tuple[int, ...], shapes: Items[ShapeRows], *, has_found: bool, is_long: bool
    ) -> Iterator[None]:
        """Capture the graphs of usual sizes, one for each item; no step may be in flight meanwhile.

        Args:
            features: as for ``begin``.
            shapes: those in which steps draft.
            has_found: whether some sequences of a step may have trees from the host.
            is_long: whether the block tables are wider than the narrowest.
        """
        runner, num_seats, blocks = self._runner, len(self.seating.seats), NARROW_BLOCKS + 1 if is_long else 1
        max_rows = min(self._max_prompt_rows, runner.most_prompt_rows)
        for rows, seqs in prompt_passes(max_rows, num_seats, is_long=is_long):
            runner.forward(blank_batch(rows, seqs, blocks, runner.block_size), features)
            yield
        sizes_of = long_sizes if is_long else usual_sizes
        for rows, seqs, width in sizes_of(num_seats, self.memory.layout.nodes, shapes, has_found=has_found):
            self._features = features
            stage = self._stage(rows, seqs, width, blocks)
            if self._capture(stage, np.minimum(np.arange(len(stage.rows.row_starts), dtype=np.int32) * width, rows)):
                yield
        for size in self._joined_sizes.all(is_long=is_long):
            self._features = features
            stage = self._joined_stage(size)
            if self._capture(stage, np.zeros(size.seqs + 1, np.int32)):
                yield

    def _capture(self, stage: Stage, starts: np.ndarray) -> bool:
        """Capture the graphs of a stage that was made last, with empty seats. Return False if it has them."""
        shape = self._shape
        assert shape is not None
        self._shape = None
        self.seating.forget_layout()
        if not self._parts.missing(shape):
            return False
        stage.resident.batch.clear(starts)
        self._fill_walk(stage, starts)
        self._parts.capture(shape, {part: self._launch_of(part, stage, shape) for part in StepPart})
        return True

    def prefill(self, batch: ForwardBatch, parts: Items[tuple[int, int]]) -> int:
        """Let the next step's pass compute prompt tokens, without logits, or one before it if that has no room.

        Hidden states are copied for the drafter, one part after the other.
        Returns the row of ``memory.prompt_hidden`` where the first one is, after the next step.

        Args:
            parts: first row and number of rows in the pass.
        """
        assert self._waiting is None
        # The drafter has read this half: the last step in flight waits for its trees.
        self._waiting = WaitingPrompts(batch, parts, self.memory.layout.prompt_rows * (self.number % 2))
        return self._waiting.hidden_row

    @torch.inference_mode()
    def launch_prompts(self) -> None:
        """Launch a pass over the prompts of ``prefill`` alone, before the next step."""
        prompts, self._waiting = self._waiting, None
        if prompts is not None:
            self._runner.forward(prompts.batch, self._features)
            self._keep_hidden(prompts, self._runner.hidden_states)

    def _keep_hidden(self, prompts: WaitingPrompts, features: torch.Tensor | None) -> None:
        """Copy ``features``, the hidden states of the prompts' rows, to the drafter's memory."""
        if not self.memory.layout.hidden_width or features is None:
            return
        at = prompts.hidden_row
        for start, count in prompts.parts:
            self.memory.prompt_hidden[at : at + count].copy_(features[start : start + count])
            at += count

    @torch.inference_mode()
    def launch(self, *, is_drafted: bool, found: Mapping[int, Draft]) -> bool:
        """Launch the next step. Without seats it is empty: it only gets its number.

        If a seat has masks, only the first half is launched, and the caller has to ``bind`` it.
        Returns whether prompts that have waited are in its pass.

        Args:
            is_drafted: wait on the GPU for the trees that follow the last step; they may still be
                missing.
            found: trees of seats, in place of the drafter's. All tokens before them have been read.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT and self.is_bound
        stage = self._prepare(found)
        if found:
            self._kernels.send_found(found, self.number)
        if is_drafted:
            self._order.await_draft(self.number)
        self.number += 1
        launched = _Launched(self.number, tuple(self.seating.seats), stage, self._shape, found)
        self._in_flight.append(launched)
        prompts, self._waiting = self._waiting, None
        if stage is None:
            self._kernels.finish()
            self._complete(launched)
            return False
        is_masked = any(seat is not None and seat.is_masked for seat in self.seating.seats)
        if not is_masked and prompts is None:
            self.sizes.count_step()
        self._run(StepPart.SHARE_OUT if self.seating.divided.are_rows_shared else StepPart.LAY_OUT, stage)
        if is_masked:
            stage.starts.fetch()
            stage.tokens.fetch()
            stage.parents.fetch()
        self._run(StepPart.PASS, stage)
        if prompts is not None:
            features = stage.resident.hidden_states
            self._keep_hidden(prompts, None if features is None else features[self.seating.divided.num_rows :])
            # The next step has none of these rows.
            self.seating.forget_layout()
        if not is_masked:
            self._run(StepPart.CONCLUDE, stage)
            self._complete(launched)
        return prompts is not None

    @property
    def is_bound(self) -> bool:
        """Return whether the last step was launched as a whole."""
        return not self._in_flight or self._in_flight[-1].is_bound

    def has_trees(self) -> bool:
        """Return whether ``trees`` of the step that is not bound have arrived."""
        stage = self._in_flight[-1].stage
        assert stage is not None
        return stage.parents.is_ready()

    def trees(self) -> dict[int, BatchRowTree]:
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
                found[index] = BatchRowTree(seat, tokens[rows][:count], parents[rows][:count])
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
        # A few kernels, launched while the pass runs: a graph would save nothing, and its capture halts every stream.
        self._kernels.conclude(stage, shape.max_width, sent)
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

    def receive(self) -> list[BatchRowResult]:
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
            BatchRowResult(seat, walk, num_nodes[index], drafts.get(index))
            for (index, seat), walk in zip(taken, walks, strict=True)
        ]

    def _followed(self, seat: BatchRow, walk: WalkResult) -> WalkResult:
        """Advance a sampler with masks by a walk, and return what to commit."""
        sampler = seat.sequence.sampler
        if self._simulated is None:
            return followed(sampler, walk)
        # A simulated text need not match: each step has the first one's masks.
        sampler.num_output_tokens += len(walk.tokens)
        return walk

    def _launch_logprobs(self, stage: Stage, launched: _Launched) -> LogprobNumbers:
        """Launch the logprobs of the tokens that the seats got, as many as a step can give."""
        wanted = [launched.seats[index] for index in launched.logprob_seats]
        # No walk emits more tokens than its seat has rows.
        depth = min(self.max_tokens, max(self.seating.divided.widths[index] for index in launched.logprob_seats))
        most = max(seat.sequence.sampling.logprobs or 0 for seat in wanted if seat is not None)
        return self._kernels.logprobs(stage, launched.logprob_seats, depth, most)

    def _prepare(self, found: Mapping[int, Draft]) -> Stage | None:
        """Bring the device up to date with seats and block tables; return the next step's stage."""
        seating, shape = self.seating, self._shape
        needs = seating.needs(found)
        if self._waiting is not None:
            size = self._joined_size(needs, self._waiting)
            if size is not None:
                return self._lay_out_seats(needs, size, self._waiting.batch)
            self.launch_prompts()
        if needs.most_blocks == 0:
            return None
        is_kept = seating.are_laid_out_for(needs) and not self.sizes.is_wasteful
        if not is_kept or shape is None or needs.most_blocks > shape.blocks or self._has_moved():
            return self._lay_out_seats(needs)
        stage = self._stages[shape]
        if needs.has_new_blocks:
            seating.send_tables(stage.tables, shape.seqs, shape.blocks)
        return stage

    def _joined_size(self, needs: SeatNeeds, prompts: WaitingPrompts) -> BatchShape | None:
        """Return the size of a pass over the next step's rows and prompts.

        None: there is no graph for it, or nobody has a seat.
        """
        if needs.most_blocks == 0:
            return None
        size = self._joined_sizes.of(needs.num_rows, self.seating.last + 1, needs.most_blocks, prompts.batch)
        is_captured = size is not None and self._parts.has_pass(self._joined_shape(size))
        return size if is_captured and not self._has_moved() else None

    def _has_moved(self) -> bool:
        return self._generation != self._runner.generation

    def _lay_out_seats(
        self, needs: SeatNeeds, joined_size: BatchShape | None = None, prompts: ForwardBatch | None = None
    ) -> Stage:
        """Divide the rows anew among the seats. Steps in flight keep their own stages' results.

        Args:
            joined_size: of the pass if it computes prompts.
            prompts: these prompts.
        """
        seating, num_rows = self.seating, needs.num_rows
        seating.divide(needs)
        last = seating.last
        widths = needs.widths[: last + 1]
        # Trees from the host have any size; with one bound for all there are few graphs.
        is_wide = any(
            seat is not None and seat.width < width for seat, width in zip(seating.seats, widths, strict=False)
        )
        most = self.memory.layout.nodes if is_wide else max(widths)
        if joined_size is None:
            asked = StepShape(num_rows, last + 1, most, needs.most_blocks, self._features)
            size = self.sizes.choose(asked) or asked
            stage = self._stage(*size[:4])
        else:
            stage = self._joined_stage(joined_size)
        shape = self._shape
        assert shape is not None
        starts = np.full(shape.seqs + 1, num_rows, np.int32)
        # Where rows are shared, a kernel divides them in each step.
        starts[: last + 1] = np.minimum(np.cumsum([0, *widths[:-1]]), num_rows)
        stage.resident.batch.clear(starts, prompts)
        if needs.are_rows_shared:
            stage.widths.wait()
            stage.widths.host["widths"][:] = 0
            stage.widths.host["widths"][: last + 1] = widths
            stage.widths.send()
        self._walker.send_rules(seating.joined)
        self._fill_walk(stage, starts)
        seating.send_joined(self.number)
        seating.send_tables(stage.tables, shape.seqs, shape.blocks, is_new=True)
        seating.mark_laid_out()
        return stage

    def _stage(self, rows: int, seqs: int, max_width: int, blocks: int) -> Stage:
        resident = self._runner.overlap_pass(self._features, rows, seqs, max_width, blocks)
        batch = resident.batch.shape
        shape = StepShape(batch.rows, batch.seqs, batch.max_seq_rows, batch.blocks, self._features)
        return self._stage_of(shape, resident)

    def _joined_stage(self, size: BatchShape) -> Stage:
        return self._stage_of(self._joined_shape(size), self._runner.joined_pass(self._features, size))

    def _joined_shape(self, size: BatchShape) -> StepShape:
        return StepShape(size.wanted, size.seqs, size.max_seq_rows, size.blocks, self._features, size.rows)

    def _stage_of(self, shape: StepShape, resident: OverlapPass) -> Stage:
        """Return the stage of a shape, which becomes that of the next step."""
        if resident.generation != self._generation:
            self._stages.clear()
            self._parts.clear()
            self._generation = resident.generation
        stage = self._stages.get(shape)
        if stage is None:
            walk = self._walker.new_stage(shape.rows, shape.seqs, MAX_IN_FLIGHT + 1)
            stage = Stage(resident, walk)
            self._stages[shape] = stage
        self._shape = shape
        return stage

    def _fill_walk(self, stage: Stage, row_starts: np.ndarray) -> None:
        """Fill the walk's input where no kernel writes it. Padding rows belong to no sequence."""
        asked = stage.walk.asked
        asked.wait()
        host = asked.host
        for name in ("row_seqs", "parents", "tokens"):
            host[name][:] = -1
        host["row_starts"][:] = row_starts
        slots = [0 if seat is None else seat.sequence.slot for seat in self.seating.seats[: len(host["slots"])]]
        host["slots"][:] = 0
        host["slots"][: len(slots)] = slots
        host["max_new"][:] = 1
        asked.send()

    def _run(self, part: StepPart, stage: Stage) -> None:
        shape = self._shape
        assert shape is not None
        self._parts.run(shape, part, self._launch_of(part, stage, shape))

    def _launch_of(self, part: StepPart, stage: Stage, shape: StepShape) -> Callable[[], None]:
        """Return what launches the kernels of a part; a graph captures this."""
        kernels = self._kernels
        if part == StepPart.LAY_OUT:
            return partial(kernels.lay_out, stage, shape)
        if part == StepPart.SHARE_OUT:
            # Behind the rows that are shared there may be prompts.
            num_rows = self.seating.divided.num_rows if shape.pass_rows else shape.rows
            return partial(kernels.share_out, stage, shape, num_rows)
        if part == StepPart.PASS:
            return stage.resident.launch
        return partial(kernels.conclude, stage, shape.max_width)


def plain_memory(max_seats: int, max_nodes: int, device: torch.device) -> OverlapMemory:
    """Return the memory for steps without a drafter on the device. ``max_nodes``: of a tree from the host."""
    layout = OverlapLayout(
        batch_rows=max_seats, tokens=max_nodes, nodes=max_nodes, hidden_width=0, hidden_dtype=torch.float32
    )
    return OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)
