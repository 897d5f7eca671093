"""Choose the passes that compute prompts together with the rows of an overlapped step."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import pairwise

from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import NARROW_BLOCKS, WIDE_BLOCKS, BatchShape, runs_of
from foretoken.models.device_sizes import PassSizes
from verifier_svc.overlap.sizes import ShapeRows
from verifier_svc.speculation.candidate_shapes import MOST_LARGE_TREE_ROWS

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
_ROW_COUNTS = {NARROW_BLOCKS: (128, 256, 512, 768, 1024), WIDE_BLOCKS: (256, 512)}


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
        small_width: the same, where a step has a long sequence or more rows than large trees may
            have together. Attention's tiles are for this bound; larger ones take longer.
    """

    most: PassSizes
    max_batch_rows: int
    max_width: int
    small_width: int

    def for_shapes(self, shapes: Items[ShapeRows], *, has_found: bool) -> JoinedSizes:
        """Return the sizes for steps that draft in these shapes.

        ``has_found``: whether some sequences may have trees from the host, which are of any size.
        """
        small = max((shape.most for shape in shapes if not shape.is_for_few), default=self.max_width)
        return replace(self, small_width=self.max_width if has_found else min(small, self.max_width))

    def of(
        self, num_rows: int, num_batch_rows: int, num_blocks: int, most_width: int, prompts: ForwardBatch
    ) -> BatchShape | None:
        """Return the smallest size that holds a step and these prompts.

        None: the prompts need a pass of their own.

        Args:
            num_rows, num_batch_rows, num_blocks: of the step.
            most_width: most rows of one of its batch rows.
        """
        blocks = min(max(num_blocks, prompts.block_tables.shape[1]), self.most.blocks)
        width = next((width for width in _ROW_COUNTS if blocks <= width), None)
        rows = self._rounded(num_rows + prompts.num_rows)
        if width is None or (width > NARROW_BLOCKS and num_batch_rows < _LEAST_LONG_ROWS):
            return None
        if len(runs_of(prompts).seqs) > self._num_prompts or num_rows + prompts.num_rows > rows:
            return None
        sizes = (self._size(rows, count, width) for count in _ROW_COUNTS[width])
        step = num_rows, num_batch_rows, most_width
        return next((size for size in sizes if all(map(operator.ge, size[1:4], step))), None)

    def all(self, *, is_long: bool) -> Iterator[BatchShape]:
        """Yield every size that ``of`` may return.

        ``is_long``: those with block tables wider than the narrowest.
        """
        width = WIDE_BLOCKS if is_long else NARROW_BLOCKS
        for before, count in pairwise((0, *_ROW_COUNTS[width])):
            if before >= self.most.wanted:
                return
            # The count before holds what has no more rows, unless batch rows that are free count.
            rows = before if before >= self._num_batch_rows else 0
            while rows < self._rounded(_MOST_ROWS):
                rows = self._rounded(rows + 1)
                yield self._size(rows, count, width)

    def _rounded(self, rows: int) -> int:
        step = next((step for most, step in _ROW_STEPS if rows <= most), _ROW_STEPS[-1][1])
        return min(-(-rows // step) * step, _MOST_ROWS, self.most.rows)

    @property
    def _num_prompts(self) -> int:
        return min(_MOST_PROMPTS, self.most.seqs)

    @property
    def _num_batch_rows(self) -> int:
        return min(self.max_batch_rows, self.most.seqs)

    def _size(self, rows: int, count: int, width: int) -> BatchShape:
        return BatchShape(
            rows,
            min(count, rows, self.most.wanted),
            min(count, self._num_batch_rows),
            self.max_width if width == NARROW_BLOCKS and count <= MOST_LARGE_TREE_ROWS else self.small_width,
            min(width, self.most.blocks),
            self._num_prompts,
        )
