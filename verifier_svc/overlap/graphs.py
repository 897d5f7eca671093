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
from verifier_svc.overlap.stage import StepSize

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
        self._captured: set[StepSize] = set()
        # By the sizes that a graph of their own would have: the smallest captured one that holds
        # them, None if none does, and the spare rows of all their steps.
        self._chosen: dict[StepSize, StepSize | None] = {}
        self._spare_rows: dict[StepSize, float] = defaultdict(float)
        # The size of the next steps, and the spare rows of each, as they count.
        self._needed: StepSize | None = None
        self._num_spare = 0.0

    def add(self, size: StepSize) -> None:
        """Note that a size was captured."""
        if size not in self._captured:
            self._captured.add(size)
            self._chosen.clear()
            self._spare_rows.pop(_own(size), None)

    def clear(self) -> None:
        """Forget all graphs."""
        self._captured.clear()
        self._chosen.clear()
        self._spare_rows.clear()
        self._needed, self._num_spare = None, 0.0

    def choose(self, needed: StepSize) -> StepSize | None:
        """Return the smallest captured size that holds the next steps, which are of this size.

        None: there is none, or its spare rows have cost more than a capture, so ``is_due``.
        """
        own = self._needed = _own(needed)
        self._num_spare = 0.0
        if self.is_due:
            return None
        if own not in self._chosen:
            holding = [size for size in self._captured if _holds(size, needed)]
            # Attention is slower with wider block tables.
            self._chosen[own] = min(holding, key=lambda size: (size.blocks, *size[:3]), default=None)
        chosen = self._chosen[own]
        if chosen is not None:
            num_spare = max(chosen.rows - own.rows, 0)
            self._num_spare = num_spare if num_spare > _FEW_SPARE_ROWS * own.rows else num_spare / _FEW_COUNT
            if own.blocks <= NARROW_BLOCKS < chosen.blocks:
                self._num_spare += _WIDE_TABLE_ROWS
        return chosen

    def count_step(self) -> None:
        """Count a step of the size that was needed last."""
        if self._needed is not None and self._num_spare:
            self._spare_rows[self._needed] += self._num_spare

    @property
    def is_wasteful(self) -> bool:
        """Return whether the next steps run in a larger size although theirs should get a graph."""
        return self._num_spare > 0 and self.is_due

    @property
    def is_due(self) -> bool:
        """Return whether the size that was needed last should get its own graph."""
        return self._needed is not None and self._spare_rows[self._needed] > _MOST_SPARE_ROWS


def _own(needed: StepSize) -> StepSize:
    """Return the size that a graph for these steps alone would have."""
    rows, seqs, max_width, blocks = captured_sizes(*needed[:4])
    return needed._replace(rows=rows, seqs=seqs, max_width=max_width, blocks=blocks)


def _holds(size: StepSize, needed: StepSize) -> bool:
    """Return whether a graph of one size can run steps of another."""
    return (
        size.rows >= needed.rows
        and size.seqs >= needed.seqs
        and size.max_width >= needed.max_width
        and size.blocks >= needed.blocks
        and size.captured_layers == needed.captured_layers
    )
