"""Draft from device memory.

A step's tokens go from the verifier's kernels to the drafter's, and the trees back.

The host enqueues a draft before the step's tokens exist, as one CUDA graph: intake, the pass over
new tokens, the levels of the trees, their stamp. It reads what was committed some requests later,
and then brings its rows up to date. Passes over prompts run between the step and that graph.

Here a *run* lasts from a request that names the batch rows to the next one that does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafter_svc.device.device_wait import DeviceWait
from drafter_svc.device.draft_run import DraftRun
from drafter_svc.device.draft_stages import DraftStages
from drafter_svc.device.levels import DeviceLevels, FoundTrees, batch_of
from drafter_svc.device.prompt_writer import PromptWriter
from drafter_svc.device.usual_captures import UsualCaptures
from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DeviceStep, DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.device_sizes import PassSizes
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from foretoken.tree import Int32


class OverlappedDraft:
    """The runs of one attachment over one memory; one at a time.

    Args:
        pass_sizes: the largest passes of the model; ``graphs``: whether drafts are captured.
        scratch: int32 [batch_slots, blocks]; of the model's cache, for the trees.

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
        _check_memory(memory, levels, target, pass_sizes)
        self._rows, self._memory, self._order, self._figures = rows, memory, order, figures
        self._wait = DeviceWait(order, levels.device)
        self._stages = DraftStages(
            levels, target, memory, max_blocks=rows.max_blocks, scratch=scratch, graphs=pass_sizes.graphs
        )
        self._prompts = PromptWriter(levels, target, pass_sizes, rows, memory, self._wait, figures)
        self._usual = UsualCaptures(self._stages, target)
        # The trees of the last step of a run, for its reply.
        self._found = OverlapMemory.mirror(memory.layout, pinned=levels.device.type == "cuda")
        # None: no request has named the batch rows, or the run has ended.
        self._run: DraftRun | None = None
        # The sequences that had a batch row at the end of the last run.
        self._last_sequences: frozenset[int] = frozenset()

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftBatch:
        """Enqueue the draft after a step, whose results may not be there yet.

        Waits for the last draft if the batch rows are named anew, and for this draft if it is the
        last one of a run. If a run's first request is missing, its trees are roots.

        Raises:
            ValueError: no run can have such a request.
        """
        step, run = _checked_step(request, self._memory.layout), self._run
        if step.begins:
            run = self._begin(request, step)
        elif run is None or not run.is_followed_by(step):
            self.finish()
            self._order.signal_draft(step.number)
            return _roots(request)
        else:
            run.number = step.number
            run.read_ready()
            self._prompts.check_ready(step.number)
            if len(request.block_ids):
                run.append_blocks(request)
        self._launch(run, is_last=step.is_last)
        self._figures.rows += request.num_rows
        self._figures.drafted_rows += run.batch.num_drafted
        if step.is_last:
            self.finish()
            return self._reply(request, step.num_batch_rows)
        return _roots(request)

    def finish(self) -> None:
        """End the run, if there is one, and wait for all that it enqueued.

        All rows are up to date after that.
        """
        run = self._run
        if run is None:
            return
        run.read_all()
        self._prompts.check(run.number)
        self._last_sequences = frozenset(sequence.number for sequence in run.batch.sequences if sequence)
        self._run = None

    def release(self, batch_slots: Sequence[int]) -> None:
        """Stop drafting for these batch slots.

        A run ends without the verifier if nothing is left of it.
        """
        run, prompt_batch_slots = self._run, self._prompts.batch_slots
        if run is None:
            return
        released = [index for index, batch_slot in enumerate(run.batch.batch_slots) if batch_slot in batch_slots]
        for index in released:
            run.batch.empty(index)
        waiting = {batch_slot for batch_slot in prompt_batch_slots if batch_slot not in batch_slots}
        is_touched = bool(released) or len(waiting) < len(prompt_batch_slots)
        if is_touched and not waiting and not any(run.batch.sequences):
            self._order.release_step(run.number)
            self.finish()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels by running them in memory that nobody uses yet.

        What they write belongs to no step.
        """
        self._stages.warm_up()
        self._prompts.warm_up()

    @property
    def is_prepared(self) -> bool:
        """Return whether ``prepare`` has nothing left to do."""
        return self._usual.are_done

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one more graph of a usual draft, if no run is begun. Return whether it did."""
        return self._run is None and self._usual.capture()

    def _begin(self, request: DraftRequest, step: DeviceStep) -> DraftRun:
        """End the run before, and begin another one."""
        self.finish()
        if step.num_batch_rows < request.num_rows:
            self._prompts.learn(request, step)
        run = DraftRun(request, step, self._stages, self._rows, self._wait, self._figures, self._last_sequences)
        self._run = run
        return run

    def _launch(self, run: DraftRun, *, is_last: bool) -> None:
        self._order.await_step(run.number)
        self._prompts.write(run.number)
        run.launch()
        self._order.signal_draft(run.number)
        if is_last:
            # The host waits for the record that follows.
            self._found.drafts.copy_(self._memory.drafts, non_blocking=True)
        run.record()

    def _reply(self, request: DraftRequest, num_batch_rows: int) -> DraftBatch:
        """Return the trees of the run's last step; call ``finish`` first."""
        if num_batch_rows == 0:
            return _roots(request)
        last, roots = self._found, np.zeros(request.num_rows, np.int32)
        parts = (last.draft_tokens, last.draft_parents, last.draft_scores, last.num_nodes)
        found = FoundTrees(*(part[:num_batch_rows].numpy() for part in parts))
        roots[:num_batch_rows] = found.tokens[:, 0]
        return batch_of(request, roots, np.arange(num_batch_rows, dtype=np.int32), found)


def _check_memory(memory: OverlapMemory, levels: DeviceLevels, target: TargetInfo, pass_sizes: PassSizes) -> None:
    """Raise PreconditionError if overlapped drafts cannot use this memory."""
    layout, width = memory.layout, levels.model.hidden_width
    if layout.batch_rows > target.max_batch_slots or layout.batch_rows * layout.tokens > pass_sizes.rows:
        raise PreconditionError(
            f"a step of {layout.batch_rows} sequences, {layout.tokens} tokens each, is more than the drafter's "
            f"{target.max_batch_slots} batch slots and {pass_sizes.rows} rows"
        )
    if (width and layout.hidden_width != width) or levels.model.num_depths > 1:
        raise PreconditionError(
            f"hidden states of {layout.hidden_width} values; the drafter wants {width}, for one module of "
            f"{levels.model.num_depths}"
        )
    if memory.stamp.device != torch.empty(0, device=levels.device).device:
        raise PreconditionError(f"memory on {memory.stamp.device}, and a drafter on {levels.device}")


def _checked_step(request: DraftRequest, layout: OverlapLayout) -> DeviceStep:
    """Return the step of a request. Raise ValueError if no run can have it."""
    step, num_rows = request.device_step, request.num_rows
    if step is None or not 0 <= step.num_batch_rows <= min(num_rows, layout.batch_rows):
        raise ValueError(f"{num_rows} rows are no step of {layout.batch_rows} sequences")
    if step.num_batch_rows == num_rows:
        return step
    if not step.begins:
        raise ValueError("prompt rows in a request that does not name the batch rows anew")
    first, last = step.prompt_start, step.prompt_start + int(request.device_hidden[step.num_batch_rows :].sum())
    if not 0 <= first <= last <= 2 * layout.prompt_rows:
        raise ValueError(f"hidden states {first} to {last}; there are {2 * layout.prompt_rows}")
    return step


def _roots(request: DraftRequest) -> DraftBatch:
    """Return a reply without trees."""
    return batch_of(request, np.zeros(request.num_rows, np.int32), np.empty(0, np.int32), None)
