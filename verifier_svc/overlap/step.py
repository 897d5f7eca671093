"""Launch and read overlapped steps on the GPU: a step is launched before the last one was read.

A sequence joins with its whole prompt but the last token computed, takes a *batch row*, and
keeps it to its end. Lengths, last tokens, remaining tokens, trees and results live in device
memory. A step is three graphs, and the GPU never waits for the host. A sequence that has ended
takes no part in later steps. Prompts are computed in a step's pass
(verifier_svc/overlap/joined_prompts.py); then its rows are laid out without a graph.

A step in which a batch row has token masks is launched in two halves: ``launch`` lays out rows and
runs the target's pass, ``bind`` sends the masks and launches sampling and what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch, blank_batch
from foretoken.models.device_batch import NARROW_BLOCKS, BatchShape
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap.batch_rows import BatchRowNeeds, OverlapBatchRows
from verifier_svc.overlap.graphs import OverlapGraphs
from verifier_svc.overlap.in_flight import StepInFlight, StepsInFlight
from verifier_svc.overlap.joined_prompts import JoinedSizes, WaitingPrompts
from verifier_svc.overlap.kernels import OverlapKernels
from verifier_svc.overlap.parts import StepPart, StepParts
from verifier_svc.overlap.sizes import ShapeRows, long_sizes, prompt_passes, usual_sizes
from verifier_svc.overlap.stage import Stage, StepSize
from verifier_svc.overlap.stages import StepStages
from verifier_svc.sampling.allowed_tokens import TreeMasks
from verifier_svc.sampling.device_walker import DeviceWalker
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT
from verifier_svc.scheduling.draft import Draft


class OverlappedStep:
    """Launch steps. Not thread-safe.

    Attributes:
        batch_rows: the batch rows of the next step.
        in_flight: the steps that were launched and not read yet.
        number: the last launched step's number.

    Args:
        memory: the memory for results, trees and prompts' hidden states; see ``plain_memory``.
        order: the stream order with the drafter that uses ``memory``.
        max_batch_rows: most batch rows.
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
        max_batch_rows: int,
        max_prompt_rows: int,
        simulated: float | None,
        graphs: bool,
    ) -> None:
        self._runner, self._walker, self._max_prompt_rows = runner, walker, max_prompt_rows
        self.memory, self._order = memory, order
        self._is_cuda = runner.planes.device.type == "cuda"
        self.batch_rows = OverlapBatchRows(max_batch_rows, runner.planes.device)
        self._kernels = OverlapKernels(runner, walker, memory, self.batch_rows.state, simulated)
        self._parts = StepParts(self._kernels, graphs=graphs and self._is_cuda)
        self._stages = StepStages(runner, walker, self._parts)
        # The stage whose rows were laid out last. None: the next step lays out its rows anew.
        self._stage: Stage | None = None
        nodes = memory.layout.nodes
        # Prompts that wait for the next step's pass.
        self._joined_sizes = JoinedSizes(runner.sizes, max_batch_rows, nodes, nodes)
        self._waiting: WaitingPrompts | None = None
        self.in_flight = StepsInFlight(is_simulated=simulated is not None)
        self.number = 0

    @property
    def sizes(self) -> OverlapGraphs:
        """Return the sizes whose graphs run steps."""
        return self._parts.sizes

    @property
    def generation(self) -> int:
        """Return a number that grows when the pass's buffers move, which ends all graphs."""
        return self._runner.generation

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that one step commits for one sequence."""
        return self.memory.layout.tokens

    @torch.inference_mode()
    def begin(self, captured_layers: tuple[int, ...], number: int) -> None:
        """Start with empty batch rows after step ``number``. No step may be in flight.

        ``captured_layers``: the layers whose hidden states the target captures.
        """
        assert not self.in_flight and self._waiting is None
        self._stages.captured_layers, self.number = captured_layers, number
        self.batch_rows.begin(number)

    @torch.inference_mode()
    def warm_up(self, captured_layers: tuple[int, ...]) -> None:
        """Compile the kernels around the pass before the first request, with empty batch rows."""
        assert not self.in_flight
        self._stages.captured_layers = captured_layers
        nodes = self.memory.layout.nodes
        stage = self._stages.of_rows(nodes, 1, nodes, 1)
        starts = np.full(stage.size.seqs + 1, nodes, np.int32)
        starts[0] = 0
        self._clear(stage, starts)
        self.batch_rows.compile()
        self._kernels.lay_out(stage)
        self._kernels.conclude(stage)
        self._kernels.conclude(stage, self._walker.masks.send(stage.size.rows, []))
        self._stage = None

    @property
    def has_long_sequences(self) -> bool:
        """Return whether a sequence may need wider block tables than the narrowest.

        The blocks of its tree do not count.
        """
        runner = self._runner
        room = (runner.sizes.blocks - 1) * runner.block_size - self.memory.layout.nodes
        return room > NARROW_BLOCKS * runner.block_size

    @torch.inference_mode()
    def captures(
        self, captured_layers: tuple[int, ...], shapes: Items[ShapeRows], *, has_found: bool, is_long: bool
    ) -> Iterator[None]:
        """Capture the graphs of usual sizes, one for each item; no step may be in flight meanwhile.

        Args:
            captured_layers: as for ``begin``.
            shapes: those in which steps draft.
            has_found: whether some sequences of a step may have trees from the host.
            is_long: whether the block tables are wider than the narrowest.
        """
        runner, num_batch_rows, blocks = self._runner, len(self.batch_rows.rows), NARROW_BLOCKS + 1 if is_long else 1
        max_rows = min(self._max_prompt_rows, runner.most_prompt_rows)
        for rows, seqs in prompt_passes(max_rows, num_batch_rows, is_long=is_long):
            runner.forward(blank_batch(rows, seqs, blocks, runner.block_size), captured_layers)
            yield
        sizes_of = long_sizes if is_long else usual_sizes
        for rows, seqs, width in sizes_of(num_batch_rows, self.memory.layout.nodes, shapes, has_found=has_found):
            self._stages.captured_layers = captured_layers
            stage = self._stages.of_rows(rows, seqs, width, blocks)
            if self._capture(stage, np.minimum(np.arange(len(stage.rows.row_starts), dtype=np.int32) * width, rows)):
                yield
        self._joined_sizes = self._joined_sizes.for_shapes(shapes, has_found=has_found)
        for size in self._joined_sizes.all(is_long=is_long):
            self._stages.captured_layers = captured_layers
            stage = self._stages.of_joined(size)
            if self._capture(stage, np.zeros(size.seqs + 1, np.int32)):
                yield

    def _capture(self, stage: Stage, starts: np.ndarray) -> bool:
        """Capture a stage's graphs with empty batch rows. Return False if it has them all."""
        self._stage = None
        if not self._parts.missing(stage.size):
            return False
        self._clear(stage, starts)
        self._parts.capture(stage, self.batch_rows.divided.num_rows)
        return True

    def _clear(self, stage: Stage, row_starts: np.ndarray, prompts: ForwardBatch | None = None) -> None:
        """Fill a stage's input where no kernel writes it."""
        stage.target_pass.batch.clear(row_starts, prompts)
        stage.fill_walk(row_starts, self.batch_rows.batch_slots(stage.size.seqs))

    def prefill(self, batch: ForwardBatch, parts: Items[tuple[int, int]]) -> int:
        """Let the next step's pass compute prompt tokens, without logits.

        If that pass has no room, a pass before it computes them.

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
            self._runner.forward(prompts.batch, self._stages.captured_layers)
            self._keep_hidden(prompts, self._runner.hidden_states)

    def _keep_hidden(self, prompts: WaitingPrompts, hidden: torch.Tensor | None) -> None:
        """Copy ``hidden``, the hidden states of the prompts' rows, to the drafter's memory."""
        if not self.memory.layout.hidden_width or hidden is None:
            return
        at = prompts.hidden_row
        for start, count in prompts.parts:
            self.memory.prompt_hidden[at : at + count].copy_(hidden[start : start + count])
            at += count

    @torch.inference_mode()
    def launch(self, *, is_drafted: bool, found: Mapping[int, Draft]) -> bool:
        """Launch the next step. Without batch rows it is empty: it only gets its number.

        If a batch row has masks, only the first half is launched. The caller has to ``bind`` it.
        Returns whether prompts that have waited are in its pass.

        Args:
            is_drafted: wait on the GPU for the trees that follow the last step; they may still be
                missing.
            found: trees of batch rows, in place of the drafter's. All tokens before them are read.
        """
        assert len(self.in_flight) < MAX_IN_FLIGHT and self.in_flight.is_bound
        stage = self._prepare(found)
        if found:
            self._kernels.send_found(found, self.number)
        if is_drafted:
            self._order.await_draft(self.number)
        self.number += 1
        launched = StepInFlight(self.number, tuple(self.batch_rows.rows), stage, found)
        self.in_flight.add(launched)
        prompts, self._waiting = self._waiting, None
        if stage is None:
            self._kernels.finish()
            self._complete(launched)
            return False
        is_masked = any(row is not None and row.is_masked for row in self.batch_rows.rows)
        if not is_masked and prompts is None:
            self.sizes.count_step()
        divided = self.batch_rows.divided
        self._parts.run(stage, StepPart.SHARE_OUT if divided.are_rows_shared else StepPart.LAY_OUT, divided.num_rows)
        if is_masked:
            stage.starts.fetch()
            stage.tokens.fetch()
            stage.parents.fetch()
        self._parts.run(stage, StepPart.PASS, divided.num_rows)
        if prompts is not None:
            hidden = stage.target_pass.hidden_states
            self._keep_hidden(prompts, None if hidden is None else hidden[divided.num_rows :])
            # The next step has none of these rows.
            self.batch_rows.forget_layout()
        if not is_masked:
            self._parts.run(stage, StepPart.CONCLUDE, divided.num_rows)
            self._complete(launched)
        return prompts is not None

    @torch.inference_mode()
    def bind(self, masks: Mapping[int, TreeMasks]) -> None:
        """Launch the second half of the last step: sampling with these masks, and what follows.

        ``masks``: by batch row, for all batch rows of ``trees``.
        """
        launched = self.in_flight.last
        stage = launched.stage
        assert stage is not None
        starts = stage.starts.values()
        sent = self._walker.masks.send(stage.size.rows, [(int(starts[index]), each) for index, each in masks.items()])
        # A few kernels, launched while the pass runs: a graph would save nothing, and its capture
        # halts every stream.
        self._kernels.conclude(stage, sent)
        self._complete(launched)

    def _complete(self, launched: StepInFlight) -> None:
        """Signal a step's end and fetch its results, after all its kernels were launched."""
        launched.is_bound = True
        self._order.signal_step(launched.number)
        stage = launched.stage
        if stage is None:
            if self._is_cuda:
                launched.reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
                launched.reached.record()
            return
        wanted = {
            index: batch_row.sequence.sampling.logprobs
            for index, batch_row in enumerate(launched.batch_rows)
            if batch_row is not None and batch_row.sequence.sampling.logprobs is not None
        }
        if wanted:
            launched.logprob_rows = list(wanted)
            # No walk emits more tokens than its sequence has rows.
            depth = min(self.max_tokens, max(self.batch_rows.divided.widths[index] for index in wanted))
            launched.logprobs = self._kernels.logprobs(stage, launched.logprob_rows, depth, max(wanted.values()))
        stage.walk.found.record()

    def release(self) -> None:
        """Let steps in flight go on without the trees that they wait for."""
        self._order.release_draft(self.number)

    def _prepare(self, found: Mapping[int, Draft]) -> Stage | None:
        """Update the device's batch rows and block tables; return the next step's stage."""
        batch_rows, stage = self.batch_rows, self._stage
        needs = batch_rows.needs(found)
        if self._waiting is not None:
            size = self._joined_size(needs, self._waiting)
            if size is not None:
                return self._lay_out_rows(needs, size, self._waiting.batch)
            self.launch_prompts()
        if needs.most_blocks == 0:
            return None
        is_kept = batch_rows.are_laid_out_for(needs) and not self.sizes.is_wasteful
        if not is_kept or stage is None or needs.most_blocks > stage.size.blocks or self._stages.have_moved:
            return self._lay_out_rows(needs)
        if needs.has_new_blocks:
            batch_rows.send_tables(stage.tables, stage.size.seqs, stage.size.blocks)
        return stage

    def _joined_size(self, needs: BatchRowNeeds, prompts: WaitingPrompts) -> BatchShape | None:
        """Return the size of a pass over the next step's rows and prompts.

        None: there is no graph for it, or nobody has a batch row.
        """
        if needs.most_blocks == 0:
            return None
        num_batch_rows, width = self.batch_rows.last + 1, max(needs.widths)
        size = self._joined_sizes.of(needs.num_rows, num_batch_rows, needs.most_blocks, width, prompts.batch)
        is_captured = size is not None and self._parts.has_pass(self._stages.joined_size(size))
        return size if is_captured and not self._stages.have_moved else None

    def _lay_out_rows(
        self, needs: BatchRowNeeds, joined_size: BatchShape | None = None, prompts: ForwardBatch | None = None
    ) -> Stage:
        """Divide the rows anew among the batch rows.

        Steps in flight keep their own stages' results.

        Args:
            joined_size: of the pass if it computes prompts.
            prompts: these prompts.
        """
        batch_rows, num_rows = self.batch_rows, needs.num_rows
        batch_rows.divide(needs)
        last = batch_rows.last
        widths = needs.widths[: last + 1]
        # Trees from the host have any size; with one bound for all there are few graphs.
        is_wide = any(
            row is not None and row.width < width for row, width in zip(batch_rows.rows, widths, strict=False)
        )
        most = self.memory.layout.nodes if is_wide else max(widths)
        if joined_size is None:
            needed = StepSize(num_rows, last + 1, most, needs.most_blocks, self._stages.captured_layers)
            size = self.sizes.choose(needed) or needed
            stage = self._stages.of_rows(*size[:4])
        else:
            stage = self._stages.of_joined(joined_size)
        self._stage = stage
        starts = np.full(stage.size.seqs + 1, num_rows, np.int32)
        # Where rows are shared, a kernel divides them in each step.
        starts[: last + 1] = np.minimum(np.cumsum([0, *widths[:-1]]), num_rows)
        self._clear(stage, starts, prompts)
        if needs.are_rows_shared:
            stage.widths.wait()
            stage.widths.host["widths"][:] = 0
            stage.widths.host["widths"][: last + 1] = widths
            stage.widths.send()
        self._walker.send_rules(batch_rows.joined)
        batch_rows.send_joined(self.number)
        batch_rows.send_tables(stage.tables, stage.size.seqs, stage.size.blocks, is_new=True)
        batch_rows.mark_laid_out()
        return stage


def plain_memory(max_batch_rows: int, max_nodes: int, device: torch.device) -> OverlapMemory:
    """Return the memory for steps without a drafter on the device.

    ``max_nodes``: of a tree from the host.
    """
    layout = OverlapLayout(
        batch_rows=max_batch_rows, tokens=max_nodes, nodes=max_nodes, hidden_width=0, hidden_dtype=torch.float32
    )
    return OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)
