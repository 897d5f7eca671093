"""Drafts from device memory: a step's tokens go from the verifier's kernels to the drafter's, and
the trees back.

The host enqueues a draft before the step's tokens exist, as one CUDA graph: intake, the pass over
new tokens, the levels of the trees, their stamp. It reads some requests later what was committed,
and then brings its rows up to date. Passes over prompts run between the step and that graph.

Here a *run* lasts from a request that names the seats to the next one that does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from numpy.typing import NDArray

from drafter_svc.device.batch_rows import BatchRows
from drafter_svc.device.device_wait import DeviceWait
from drafter_svc.device.draft_stage import NO_STEP, DraftStage, NewBlocks
from drafter_svc.device.draft_stages import DraftStages
from drafter_svc.device.levels import DeviceLevels, FoundTrees, batch_of
from drafter_svc.device.prompt_writer import PromptWriter
from drafter_svc.device.usual_captures import UsualCaptures
from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DeviceStep, DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.device_sizes import PassSizes
from foretoken.overlap_memory import OverlapMemory, StreamOrder
from foretoken.tree import Int32


class OverlappedDraft:  # large: one run's batch rows, passes and journal
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
        memory: OverlapMemory,
        order: StreamOrder,
        figures: PassFigures,
    ) -> None:
        layout, width = memory.layout, levels.model.hidden_width
        if layout.batch_rows > target.max_slots or layout.batch_rows * layout.tokens > pass_sizes.rows:
            raise PreconditionError(
                f"a step of {layout.batch_rows} sequences, {layout.tokens} tokens each, is more than the drafter's "
                f"{target.max_slots} slots and {pass_sizes.rows} rows"
            )
        if (width and layout.hidden_width != width) or levels.model.num_depths > 1:
            raise PreconditionError(
                f"hidden states of {layout.hidden_width} values; the drafter wants {width}, for one module of "
                f"{levels.model.num_depths}"
            )
        if memory.stamp.device != torch.empty(0, device=levels.device).device:
            raise PreconditionError(f"memory on {memory.stamp.device}, and a drafter on {levels.device}")
        self._levels, self._target, self._rows = levels, target, rows
        self._wait = DeviceWait(order, levels.device)
        self._memory, self._order, self._figures = memory, order, figures
        self._stages = DraftStages(
            levels, target, memory, max_blocks=rows.max_blocks, scratch=scratch, graphs=pass_sizes.graphs
        )
        # The trees of the last step of a run, for its reply.
        self._found = OverlapMemory.mirror(layout, pinned=levels.device.type == "cuda")
        self._prompts = PromptWriter(levels, target, pass_sizes, rows, memory, self._wait, figures)
        self._usual = UsualCaptures(self._stages, target)
        # None: no request has named the seats, or the run has ended.
        self._run: BatchRows | None = None
        # None: the run has no seats.
        self._stage: DraftStage | None = None
        # The sequences that had a seat in the last request.
        self._seated: frozenset[int] = frozenset()
        self._number = NO_STEP

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftBatch:
        """Enqueue the draft after a step, whose results may not be there yet.

        Waits for the draft before if the seats are named anew, and for the last draft of a run. If
        a run's first request is missing, its trees are roots.

        Raises:
            ValueError: no run can have such a request.
        """
        step = self._checked(request)
        if step.begins:
            self.finish()
            self._begin(request, step)
        elif self._run is None or step.number != self._number + 1 or step.num_batch_rows != len(self._run):
            self.finish()
            self._order.signal_draft(step.number)
            return self._roots(request)
        else:
            self._number = step.number
            self._read_ready()
            if len(request.block_ids):
                self._append_blocks(request)
        run = self._run
        assert run is not None
        self._launch(step.number, is_last=step.is_last)
        self._figures.rows += request.num_rows
        self._figures.drafted_rows += int(np.count_nonzero(run.is_drafted & run.wants_tree))
        if step.is_last:
            self.finish()
            return self._reply(request, step.num_batch_rows)
        return self._roots(request)

    def finish(self) -> None:
        """End the run, if there is one, and wait for all that it enqueued.

        All rows are up to date after that.
        """
        self._read_all()
        self._prompts.check(self._number)
        if self._run is not None:
            self._seated = frozenset(sequence.number for sequence in self._run.sequences if sequence)
        self._stage, self._run = None, None

    def release(self, slots: Sequence[int]) -> None:
        """Stop drafting for these slots.

        A run ends without the verifier if nothing is left of it.
        """
        run, prompt_slots = self._run, self._prompts.slots
        if run is None:
            return
        released = [index for index, slot in enumerate(run.slots) if slot in slots]
        for index in released:
            self._empty(run, index)
        waiting = {slot for slot in prompt_slots if slot not in slots}
        is_touched = bool(released) or len(waiting) < len(prompt_slots)
        if is_touched and not waiting and not any(run.sequences):
            self._order.release_step(self._number)
            self.finish()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels, over memory that nobody uses yet.

        What is written there is stamped as no step's.
        """
        self._stages.warm_up()
        self._prompts.warm_up()

    @property
    def is_prepared(self) -> bool:
        """Whether ``prepare`` has nothing left to do."""
        return self._usual.are_done

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one more graph of a usual draft, if no run is begun. Return whether it did."""
        return self._run is None and self._usual.capture()

    def _checked(self, request: DraftRequest) -> DeviceStep:
        step, layout = request.device_step, self._memory.layout
        num_rows = request.num_rows
        if step is None or not 0 <= step.num_batch_rows <= min(num_rows, layout.batch_rows):
            raise ValueError(f"{num_rows} rows are no step of {layout.batch_rows} sequences")
        if step.num_batch_rows == num_rows:
            return step
        if not step.begins:
            raise ValueError("prompt rows in a request that does not name the seats anew")
        first, last = step.prompt_start, step.prompt_start + int(request.device_hidden[step.num_batch_rows :].sum())
        if not 0 <= first <= last <= 2 * layout.prompt_rows:
            raise ValueError(f"hidden states {first} to {last}; there are {2 * layout.prompt_rows}")
        return step

    def _begin(self, request: DraftRequest, step: DeviceStep) -> None:
        self._number = step.number
        if step.num_batch_rows < request.num_rows:
            self._prompts.learn(request, step)
        seats = request.rows[: step.num_batch_rows]
        self._stages.request_trees(seats)
        self._run = self._named(seats, request)
        if step.num_batch_rows:
            self._stage = self._stages.set_up(self._run, step.number)

    def _named(self, seats: NDArray[np.void], request: DraftRequest) -> BatchRows:
        """Return a run of these seats, with the sequences that are known."""
        names = ("slots", "generations", "salts", "lengths")
        slots, generations, salts, lengths = (seats[name].tolist() for name in names)
        run, rows, size = BatchRows(slots), self._rows, self._target.block_size
        run.wants_tree = self._stages.requested.shapes[: len(slots), kernel.MAX_DEPTH] > 0
        starts, block_ids = request.block_starts.tolist(), request.block_ids.tolist()
        for index, length in enumerate(lengths):
            sequence = rows.find(slots[index], generations[index], salts[index])
            if sequence is None:
                continue
            known, is_seated = sequence.length, sequence.number in self._seated
            if known < length or (known > length and not is_seated):
                continue
            run.sequences[index] = sequence
            run.is_drafted[index] = is_drafted = rows.can_go_on(sequence)
            first, ids = rows.num_blocks(length), block_ids[starts[index] : starts[index + 1]]
            if ids and not rows.append_blocks(sequence, first, ids):
                self._drop(run, index)
                continue
            run.num_blocks[index] = num_blocks = max(first + len(ids), rows.num_blocks(known))
            if is_drafted:
                # The block that it has begun, too, if it has.
                rows.claim_blocks(sequence, known // size, num_blocks)
        return run

    @staticmethod
    def _empty(run: BatchRows, index: int) -> None:
        run.sequences[index], run.is_drafted[index] = None, False

    def _drop(self, run: BatchRows, index: int) -> None:
        """Drop a sequence that was sent contradictory data. Its kernels soon find no blocks."""
        sequence = run.sequences[index]
        if sequence is not None:
            self._rows.drop(sequence)
        self._empty(run, index)

    def _append_blocks(self, request: DraftRequest) -> None:
        run, stage, rows = self._run, self._stage, self._rows
        assert run is not None
        starts, block_ids = request.block_starts, request.block_ids.tolist()
        added: list[NewBlocks] = []
        for index in np.flatnonzero(starts[1:] > starts[:-1]).tolist():
            sequence, first = run.sequences[index], run.num_blocks[index]
            if sequence is None:
                continue
            ids = block_ids[starts[index] : starts[index + 1]]
            if not rows.append_blocks(sequence, first, ids):
                self._drop(run, index)
                continue
            run.num_blocks[index] += len(ids)
            if run.is_drafted[index]:
                rows.claim_blocks(sequence, first, run.num_blocks[index])
                added.append(NewBlocks(index, first, ids))
        if stage is None or not added:
            return
        if any(run.num_blocks[batch_row] > stage.capacity for batch_row, _, _ in added):
            # Seldom: the tables' sizes double.
            self._read_all()
            self._stage = self._stages.set_up(run, self._number)
            return
        stage.send_blocks(added)

    def _launch(self, number: int, *, is_last: bool) -> None:
        stage = self._stage
        self._order.await_step(number)
        self._prompts.write(number)
        if stage is None:
            self._memory.draft_stamp.fill_(number)
        else:
            if self._stages.graphs.captures(stage.shape):
                # A capture waits for the device.
                self._wait.until_idle(self._number)
            self._stages.graphs.run(stage.shape, stage.launch)
        self._order.signal_draft(number)
        if is_last:
            # The record that follows is waited for.
            self._found.drafts.copy_(self._memory.drafts, non_blocking=True)
        if stage is not None:
            if len(stage.journal) == stage.journal.depth:
                self._read_next()
            stage.journal.record()

    def _read_ready(self) -> None:
        while self._stage is not None and len(self._stage.journal) and self._stage.journal.is_ready():
            self._read_next()
        self._prompts.check_ready(self._number)

    def _read_all(self) -> None:
        while self._stage is not None and len(self._stage.journal):
            self._read_next()

    def _read_next(self) -> None:
        """Bring the rows up to date with the oldest step that is unread."""
        run, stage = self._run, self._stage
        assert run is not None and stage is not None
        self._wait.until(stage.journal.is_ready, self._number)
        taken = stage.journal.take()
        count = len(run)
        # The others have ended, or the step is lost, and there is a gap.
        has_tokens = taken["counts"][:count] > 0
        run.wants_tree &= has_tokens
        counts, lengths, written = (taken[name].tolist() for name in ("counts", "lengths", "is_written"))
        size = self._target.block_size
        for index in np.flatnonzero(has_tokens).tolist():
            sequence, num_tokens, is_written = run.sequences[index], counts[index], bool(written[index])
            if sequence is None:
                continue
            goes_on = (
                lengths[index] == sequence.length + num_tokens
                and lengths[index] <= run.num_blocks[index] * size
                and is_written == run.is_drafted[index]
            )
            tokens = taken["tokens"][index, :num_tokens].tolist()
            if not goes_on or not self._rows.advance(sequence, tokens, is_written=is_written):
                self._drop(run, index)
            elif is_written:
                self._figures.extend_tokens += num_tokens

    @staticmethod
    def _roots(request: DraftRequest) -> DraftBatch:
        return batch_of(request, np.zeros(request.num_rows, np.int32), np.empty(0, np.int32), None)

    def _reply(self, request: DraftRequest, num_seats: int) -> DraftBatch:
        """Return the trees of the run's last step; call ``finish`` first."""
        if num_seats == 0:
            return self._roots(request)
        last, roots = self._found, np.zeros(request.num_rows, np.int32)
        parts = (last.draft_tokens, last.draft_parents, last.draft_scores, last.num_nodes)
        found = FoundTrees(*(part[:num_seats].numpy() for part in parts))
        roots[:num_seats] = found.tokens[:, 0]
        return batch_of(request, roots, np.arange(num_seats, dtype=np.int32), found)
