"""Prompts that are computed in the same pass as the rows of an overlapped step: which passes have room for them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import BatchShape, runs_of, table_bucket
from foretoken.models.device_batches import MAX_PROMPT_GRAPH_ROWS, prompt_bucket
from foretoken.models.device_sizes import PassSizes

# Larger passes are bound by arithmetic: two of them take hardly longer than one.
_MOST_ROWS = MAX_PROMPT_GRAPH_ROWS
# Rows with logits: a pass computes logits for that many rows, also where the step has fewer.
_ROW_COUNTS = (128, 256, 512, 768, 1024)
# Most prompts.
_MOST_PROMPTS = 8
# Most blocks of a sequence. The narrowest block tables have room for so many.
_MOST_BLOCKS = table_bucket(1)


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
        max_seats: seats of a step.
        max_width: a bound on the rows of one seat.
    """

    most: PassSizes
    max_seats: int
    max_width: int

    def of(self, num_rows: int, num_seats: int, num_blocks: int, prompts: ForwardBatch) -> BatchShape | None:
        """Return the smallest size that holds a step and these prompts; None: they need a pass of their own.

        Args:
            num_rows, num_seats, num_blocks: of the step.
        """
        num_blocks = max(num_blocks, prompts.block_tables.shape[1])
        if num_blocks > min(_MOST_BLOCKS, self.most.blocks) or len(runs_of(prompts).seqs) > self._num_prompts:
            return None
        rows = self._rounded(num_rows + prompts.num_rows)
        if num_rows + prompts.num_rows > rows:
            return None
        sizes = (self._size(rows, count) for count in _ROW_COUNTS)
        return next((size for size in sizes if size.wanted >= num_rows and size.seqs >= num_seats), None)

    def all(self) -> Iterator[BatchShape]:
        """Yield every size that ``of`` may return, the narrowest first."""
        seen = set()
        for count in _ROW_COUNTS:
            rows = 0
            while rows < self._rounded(_MOST_ROWS):
                rows = self._rounded(rows + 1)
                size = self._size(rows, count)
                if size not in seen:
                    seen.add(size)
                    yield size

    def _rounded(self, rows: int) -> int:
        return min(prompt_bucket(rows), _MOST_ROWS, self.most.rows)

    @property
    def _num_prompts(self) -> int:
        return min(_MOST_PROMPTS, self.most.seqs)

    def _size(self, rows: int, count: int) -> BatchShape:
        return BatchShape(
            rows,
            min(count, rows, self.most.wanted),
            min(count, self.max_seats, self.most.seqs),
            self.max_width,
            min(_MOST_BLOCKS, self.most.blocks),
            self._num_prompts,
        )
