"""Choose the captured graph that runs an overlapped step.

It is the step's own, or a larger one whose spare rows stay empty.

A step without a graph keeps the GPU waiting: the host needs 20 to 30 ms to launch its kernels one
by one, where a graph of a few hundred rows runs for less than 10. Not all sizes are captured. When
most batch rows of a full batch have emptied, the step has few rows among many batch rows, and what
was captured for so many batch rows has more rows.
"""

from __future__ import annotations

from collections import defaultdict

from foretoken.models.device_batch import NARROW_BLOCKS, captured_sizes
from verifier_svc.overlap.stage import StepShape

# Spare rows after which a size gets its own graph. A capture takes some 100 ms, a row up to 20 us.
_MOST_SPARE_ROWS = 5000
# Where there are fewer for each row of a step, they slow it down by less than anyone sees, but
# everyone sees a capture: so many of them count as one.
_FEW_SPARE_ROWS, _FEW_COUNT = 1 / 8, 10
# Rows that take as long as attention loses with a wide block table where a narrow one would do.
_WIDE_TABLE_ROWS = 3


class OverlapGraphs:
    """The sizes that were captured. Only the engine thread uses it."""

    def __init__(self) -> None:
        self._captured: set[StepShape] = set()
        # By the sizes that a graph of their own would have: the smallest captured one that holds
        # them, None if none does, and the spare rows of all their steps.
        self._chosen: dict[StepShape, StepShape | None] = {}
        self._spare_rows: dict[StepShape, float] = defaultdict(float)
        # The size of the next steps, and the spare rows of each, as they count.
        self._asked: StepShape | None = None
        self._num_spare = 0.0

    def add(self, shape: StepShape) -> None:
        """Note that a size was captured."""
        if shape not in self._captured:
            self._captured.add(shape)
            self._chosen.clear()
            self._spare_rows.pop(_own(shape), None)

    def clear(self) -> None:
        """Forget all graphs."""
        self._captured.clear()
        self._chosen.clear()
        self._spare_rows.clear()
        self._asked, self._num_spare = None, 0.0

    def choose(self, asked: StepShape) -> StepShape | None:
        """Return the smallest captured size that holds the next steps, which are of this size.

        None: there is none, or its spare rows have cost more than a capture, so ``is_due``.
        """
        own = self._asked = _own(asked)
        self._num_spare = 0.0
        if self.is_due:
            return None
        if own not in self._chosen:
            holding = [shape for shape in self._captured if _holds(shape, asked)]
            # Attention is slower with wider block tables.
            self._chosen[own] = min(holding, key=lambda shape: (shape.blocks, *shape[:3]), default=None)
        chosen = self._chosen[own]
        if chosen is not None:
            num_spare = max(chosen.rows - own.rows, 0)
            self._num_spare = num_spare if num_spare > _FEW_SPARE_ROWS * own.rows else num_spare / _FEW_COUNT
            if own.blocks <= NARROW_BLOCKS < chosen.blocks:
                self._num_spare += _WIDE_TABLE_ROWS
        return chosen

    def count_step(self) -> None:
        """Count a step of the size that was asked for last."""
        if self._asked is not None and self._num_spare:
            self._spare_rows[self._asked] += self._num_spare

    @property
    def is_wasteful(self) -> bool:
        """Return whether the next steps run in a larger size although theirs should get a graph."""
        return self._num_spare > 0 and self.is_due

    @property
    def is_due(self) -> bool:
        """Return whether the size that was asked for last should get its own graph."""
        return self._asked is not None and self._spare_rows[self._asked] > _MOST_SPARE_ROWS


def _own(asked: StepShape) -> StepShape:
    """Return the size that a graph for these steps alone would have."""
    rows, seqs, max_width, blocks = captured_sizes(*asked[:4])
    return asked._replace(rows=rows, seqs=seqs, max_width=max_width, blocks=blocks)


def _holds(shape: StepShape, asked: StepShape) -> bool:
    """Return whether a graph of one size can run steps of another."""
    return (
        shape.rows >= asked.rows
        and shape.seqs >= asked.seqs
        and shape.max_width >= asked.max_width
        and shape.blocks >= asked.blocks
        and shape.captured_layers == asked.captured_layers
    )
