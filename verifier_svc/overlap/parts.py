"""The parts of an overlapped step, and the graphs that were captured of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

from foretoken.models.device_graph import DeviceGraphs
from verifier_svc.overlap.graphs import OverlapGraphs
from verifier_svc.overlap.kernels import OverlapKernels
from verifier_svc.overlap.sizes import MAX_USUAL_ROWS
from verifier_svc.overlap.stage import Stage, StepSize
from verifier_svc.speculation.candidate_shapes import SHARED_FROM

# Steps of other sizes before their graph is captured while requests wait. Where a batch shrinks or
# grows, most sizes pass sooner.
_EAGER_STEPS = 8


class StepPart(Enum):
    """The parts of a step, in order; the first or the second lays out the rows.

    What comes between two of them, in a step with masks, is in no graph.
    """

    LAY_OUT = "lay_out"
    SHARE_OUT = "share_out"
    PASS = "pass"
    CONCLUDE = "conclude"


class StepParts:
    """Run the parts of steps, by a graph if that pays.

    Args:
        kernels: launches what is around the target's pass.
        graphs: whether to capture any.

    Attributes:
        sizes: the sizes whose graphs run steps without prompts.
    """

    def __init__(self, kernels: OverlapKernels, *, graphs: bool) -> None:
        self._kernels = kernels
        self._graphs = DeviceGraphs(graphs, eager_uses=_EAGER_STEPS)
        self.sizes = OverlapGraphs()

    def clear(self) -> None:
        """Forget all graphs, because memory that they use has moved."""
        self._graphs.clear()
        self.sizes.clear()

    def has_pass(self, size: StepSize) -> bool:
        """Return whether a graph runs the pass of this size, or no pass has one."""
        return not self._graphs.lacks((size, StepPart.PASS))

    def missing(self, size: StepSize) -> list[StepPart]:
        """Return the parts of this size that ``capture`` would capture."""
        return [part for part in _parts(size) if _has_graph(part, size) and self._graphs.lacks((size, part))]

    def capture(self, stage: Stage, num_rows: int) -> None:
        """Capture a stage's missing parts, and launch those that have no graph to compile kernels.

        ``num_rows``: rows of all trees.
        """
        size = stage.size
        missing = self.missing(size)
        for part in _parts(size):
            launch = self._launch_of(part, stage, num_rows)
            if part in missing:
                self._graphs.capture((size, part), launch)
            elif not _has_graph(part, size):
                launch()
        if not size.pass_rows:
            self.sizes.add(size)

    def run(self, stage: Stage, part: StepPart, num_rows: int) -> None:
        """Launch a part of a step. ``num_rows``: rows of all trees."""
        size, launch = stage.size, self._launch_of(part, stage, num_rows)
        if size.rows > MAX_USUAL_ROWS or not _has_graph(part, size):
            # Many rows keep the GPU busy for longer than the host takes to launch them.
            launch()
            return
        key = size, part
        if size.pass_rows:
            self._graphs.run(key, launch)
            return
        if self.sizes.is_due and self._graphs.lacks(key):
            self._graphs.capture(key, launch)
        else:
            self._graphs.run(key, launch)
        if part == StepPart.PASS and self._graphs.enabled and not self._graphs.lacks(key):
            self.sizes.add(size)

    def _launch_of(self, part: StepPart, stage: Stage, num_rows: int) -> Callable[[], None]:
        """Return what launches the kernels of a part; a graph captures this."""
        kernels = self._kernels
        if part == StepPart.LAY_OUT:
            return partial(kernels.lay_out, stage)
        if part == StepPart.SHARE_OUT:
            # After the rows that are shared there may be prompts.
            return partial(kernels.share_out, stage, num_rows if stage.size.pass_rows else stage.size.rows)
        if part == StepPart.PASS:
            return stage.target_pass.launch
        return partial(kernels.conclude, stage)


def _parts(size: StepSize) -> list[StepPart]:
    """Return the parts that steps of this size may have."""
    shares = size.seqs >= SHARED_FROM and size.max_width > 1
    return [part for part in StepPart if part != StepPart.SHARE_OUT or shares]


def _has_graph(part: StepPart, size: StepSize) -> bool:
    """Return whether a graph can run a part. Beside prompts each step lays out other rows."""
    return not size.pass_rows or part in (StepPart.PASS, StepPart.CONCLUDE)
