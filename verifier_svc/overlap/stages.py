"""The stages of overlapped steps, one for each size, over the target pass's present buffers."""

from __future__ import annotations

from foretoken.models.device_batch import BatchShape
from foretoken.models.device_llama import OverlapPass
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap.parts import StepParts
from verifier_svc.overlap.stage import Stage, StepSize
from verifier_svc.sampling.device_walker import DeviceWalker
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT


class StepStages:
    """Make stages and keep them. When the pass's buffers move, all stages and graphs are forgotten.

    Attributes:
        captured_layers: the layers whose hidden states the target captures in the next steps.
    """

    def __init__(self, runner: DeviceRunner, walker: DeviceWalker, parts: StepParts) -> None:
        self._runner, self._walker, self._parts = runner, walker, parts
        self.captured_layers: tuple[int, ...] = ()
        self._stages: dict[StepSize, Stage] = {}
        # The generation of the pass's buffers that stages and graphs use.
        self._generation = -1

    @property
    def have_moved(self) -> bool:
        """Return whether the pass's buffers have moved since the last stage was made."""
        return self._generation != self._runner.generation

    def of_rows(self, rows: int, seqs: int, max_width: int, blocks: int) -> Stage:
        """Return the stage of a step without prompts."""
        target_pass = self._runner.overlap_pass(self.captured_layers, rows, seqs, max_width, blocks)
        batch = target_pass.batch.shape
        size = StepSize(batch.rows, batch.seqs, batch.max_seq_rows, batch.blocks, self.captured_layers)
        return self._of(size, target_pass)

    def of_joined(self, joined: BatchShape) -> Stage:
        """Return the stage of a step whose pass computes prompts."""
        return self._of(self.joined_size(joined), self._runner.joined_pass(self.captured_layers, joined))

    def joined_size(self, joined: BatchShape) -> StepSize:
        """Return the size of a step whose pass computes prompts."""
        return StepSize(
            joined.wanted, joined.seqs, joined.max_seq_rows, joined.blocks, self.captured_layers, joined.rows
        )

    def _of(self, size: StepSize, target_pass: OverlapPass) -> Stage:
        if target_pass.generation != self._generation:
            self._stages.clear()
            self._parts.clear()
            self._generation = target_pass.generation
        stage = self._stages.get(size)
        if stage is None:
            walk = self._walker.new_stage(size.rows, size.seqs, MAX_IN_FLIGHT + 1)
            stage = self._stages[size] = Stage(size, target_pass, walk)
        return stage
