"""Choose the passes that compute prompts together with the rows of an overlapped step."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import NARROW_BLOCKS, WIDE_BLOCKS, BatchShape, runs_of
from foretoken.models.device_sizes import PassSizes

# Larger passes are bound by arithmetic: two of them take hardly longer than one.
_MOST_ROWS = 2048
# Up to so many rows, the numbers of rows that have a pass: a row costs as much as another, whether
# it is one of a prompt or none.
_ROW_STEPS = ((512, 32), (1024, 64), (_MOST_ROWS, 128))
# Most prompts.
_MOST_PROMPTS = 8
# The fewest batch rows beside which prompts join a step with a long sequence. The attention of
# batch rows has tiles for many trees here, which would keep a few long sequences waiting for longer
# than the prompts' own pass takes.
_LEAST_LONG_ROWS = 8
# By the most blocks of a sequence: rows with logits. A pass computes logits for that many rows,
# also where the step has fewer. Among long sequences there are fewer sizes, because there are
# rarely many of them.
_ROW_COUNTS = {NARROW_BLOCKS: (128, 256, 512, 768, 1024), WIDE_BLOCKS: (128, 512)}


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """Prompt rows for the next step's pass.

    Attributes:
        parts: first row and number of the rows whose hidden states the drafter gets, in order.
        hidden_row: where these go in the drafter's memory.
    """

    batch: ForwardBatch
    parts: Items[tuple[int, int]]
    hidden_row: int


@dataclass(frozen=True, slots=True)
class JoinedSizes:
    """The sizes of passes over the rows of a step and prompts.

    Attributes:
        most: of any pass.
        max_batch_rows: batch rows of a step.
        max_width: a bound on the rows of one batch row.
    """

    most: PassSizes
    max_batch_rows: int
    max_width: int

    def of(self, num_rows: int, num_batch_rows: int, num_blocks: int, prompts: ForwardBatch) -> BatchShape | None:
        """Return the smallest size that holds a step and these prompts.

        None: the prompts need a pass of their own.

        Args:
            num_rows, num_batch_rows, num_blocks: of the step.
        """
        blocks = min(max(num_blocks, prompts.block_tables.shape[1]), self.most.blocks)
        width = next((width for width in _ROW_COUNTS if blocks <= width), None)
        rows = self._rounded(num_rows + prompts.num_rows)
        if width is None or (width > NARROW_BLOCKS and num_batch_rows < _LEAST_LONG_ROWS):
            return None
        if len(runs_of(prompts).seqs) > self._num_prompts or num_rows + prompts.num_rows > rows:
            return None
        sizes = (self._size(rows, count, width) for count in _ROW_COUNTS[width])
        return next((size for size in sizes if size.wanted >= num_rows and size.seqs >= num_batch_rows), None)

    def all(self, *, is_long: bool) -> Iterator[BatchShape]:
        """Yield every size that ``of`` may return.

        ``is_long``: those with block tables wider than the narrowest.
        """
        width = WIDE_BLOCKS if is_long else NARROW_BLOCKS
        seen = set()
        for count in _ROW_COUNTS[width]:
            rows = 0
            while rows < self._rounded(_MOST_ROWS):
                rows = self._rounded(rows + 1)
                size = self._size(rows, count, width)
                if size not in seen:
                    seen.add(size)
                    yield size

    def _rounded(self, rows: int) -> int:
        step = next((step for most, step in _ROW_STEPS if rows <= most), _ROW_STEPS[-1][1])
        return min(-(-rows // step) * step, _MOST_ROWS, self.most.rows)

    @property
    def _num_prompts(self) -> int:
        return min(_MOST_PROMPTS, self.most.seqs)

    def _size(self, rows: int, count: int, width: int) -> BatchShape:
        return BatchShape(
            rows,
            min(count, rows, self.most.wanted),
            min(count, self.max_batch_rows, self.most.seqs),
            self.max_width,
            min(width, self.most.blocks),
            self._num_prompts,
        )
