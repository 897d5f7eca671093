"""The batches that passes on a GPU run over.

They have sizes, and arrays that captured graphs read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import (
    BatchShape,
    DeviceArrays,
    DeviceBatch,
    Runs,
    bucket,
    captured_sizes,
    table_bucket,
)
from foretoken.models.device_sizes import PassSizes
from foretoken.tree import MASK_WORD_BITS

# A pass of more rows that wants the logits of some, but not of all, has no graph: hardly two have
# one size.
MAX_MIXED_GRAPH_ROWS = 128
# Captured sizes of passes over prompts alone, which have no logits. A short one takes less time
# than the host needs to launch its kernels. There are few sizes: most prompts are in a step's pass.
MAX_PROMPT_GRAPH_ROWS = 2048
_FEW_PROMPT_ROWS, _PROMPT_STEP = 64, 128
PROMPT_SEQS = (1, 8, 64)


class Uploaded(NamedTuple):
    """A batch on the device.

    ``graph_shape``: what a graph of it is captured for; None: it needs no graph.
    """

    arrays: DeviceArrays
    graph_shape: BatchShape | None


class DeviceBatches:
    """The batches of one model's passes.

    Args:
        graphs: whether any pass of a batch from the host has a graph.
        prompt_graph_rows: rows of the largest prompt pass that has one.
    """

    def __init__(
        self,
        sizes: PassSizes,
        block_size: int,
        device: torch.device,
        *,
        graphs: bool,
        prompt_graph_rows: int = MAX_PROMPT_GRAPH_ROWS,
    ) -> None:
        self._sizes, self._block_size, self._device = sizes, block_size, device
        self._graphs, self._most_prompt_rows = graphs, prompt_graph_rows
        self._batches: dict[BatchShape, DeviceBatch] = {}

    def upload(
        self,
        batch: ForwardBatch,
        runs: Runs,
        *,
        is_new: bool = False,
        is_captured: Callable[[BatchShape], bool] = lambda shape: True,
    ) -> Uploaded:
        """Copy a batch to the device, filled up to a captured size if its pass has a graph.

        Args:
            is_new: copy it to new arrays, for a pass without a graph; arrays that a graph reads may
                still be in use.
            is_captured: says whether there is a graph of this size. Prompts alone run in a larger
                one rather than that all streams wait for a capture.

        Raises:
            ValueError: the batch is larger than the largest pass.
        """
        sizes, wanted, seqs = self._sizes, len(batch.logit_rows), len(runs.seqs)
        if batch.num_rows > sizes.rows or wanted > sizes.wanted or seqs > sizes.seqs:
            raise ValueError(f"a batch of {batch.num_rows} rows, {wanted} of them wanted, is more than {sizes}")
        most = int((runs.starts[1:] - runs.starts[:-1]).max())
        # A table may be wider than its sequence needs: a draft model's has room for the longest.
        longest = int(batch.context_lens.max()) + MASK_WORD_BITS * sizes.mask_words
        blocks = min(batch.block_tables.shape[1], -(-longest // self._block_size))
        has_graph = not is_new and self._has_graph(batch)
        if has_graph:
            if wanted:
                shape = self._graph_shape(batch.num_rows, wanted, seqs, most, blocks)
            else:
                shapes = self._prompt_shapes(batch.num_rows, seqs, blocks)
                shape = next(filter(is_captured, shapes), shapes[0])
            uploaded = self._of_shape(shape)
        else:
            # Nothing remembers these addresses.
            shape = BatchShape(batch.num_rows, wanted, seqs, most, min(table_bucket(blocks), sizes.blocks))
            uploaded = DeviceBatch(shape, sizes.mask_words, self._device)
        uploaded.upload(batch, runs)
        return Uploaded(uploaded.arrays, shape if has_graph else None)

    def batch_of(self, rows: int, seqs: int, max_seq_rows: int, blocks: int) -> DeviceBatch:
        """Return a batch for kernels to fill: so many rows of so many sequences.

        All of the rows are wanted.

        Raises ValueError for more than the largest pass.
        """
        self._check(BatchShape(rows, rows, seqs, max_seq_rows, blocks))
        return self._of_shape(self._graph_shape(rows, rows, seqs, max_seq_rows, blocks))

    def joined_batch(self, shape: BatchShape) -> DeviceBatch:
        """Return the batch of this size for kernels to fill, with prompts behind its first rows.

        Raises ValueError for more than the largest pass.
        """
        self._check(shape)
        return self._of_shape(shape)

    @property
    def most_prompt_rows(self) -> int:
        """Return the rows of the largest prompt pass that has a graph."""
        return self._most_prompt_rows

    def _check(self, shape: BatchShape) -> None:
        """Raise ValueError for more than the largest pass."""
        sizes = self._sizes
        is_larger = shape.rows > sizes.rows or shape.wanted > sizes.wanted or shape.seqs > sizes.seqs
        if is_larger or shape.prompts > sizes.seqs or shape.blocks > sizes.blocks:
            raise ValueError(f"a batch of {shape} is more than {sizes}")

    def _of_shape(self, shape: BatchShape) -> DeviceBatch:
        if shape not in self._batches:
            self._batches[shape] = DeviceBatch(shape, self._sizes.mask_words, self._device)
        return self._batches[shape]

    def _graph_shape(self, rows: int, wanted: int, seqs: int, most: int, blocks: int) -> BatchShape:
        """Return the smallest captured size that holds a batch with logits."""
        sizes = self._sizes
        rows, seqs, most, blocks = captured_sizes(rows, seqs, most, blocks)
        return BatchShape(
            min(rows, sizes.rows),
            min(bucket(wanted), sizes.wanted),
            min(seqs, sizes.seqs),
            most,
            min(blocks, sizes.blocks),
        )

    def _prompt_shapes(self, rows: int, seqs: int, blocks: int) -> list[BatchShape]:
        """Return the captured sizes that hold a batch without logits, the smallest first."""
        sizes = self._sizes
        rows, blocks = min(prompt_bucket(rows), sizes.rows), min(table_bucket(blocks), sizes.blocks)
        counts = [min(count, sizes.seqs) for count in PROMPT_SEQS if count >= seqs] or [sizes.seqs]
        return [BatchShape(rows, 0, count, 1 << (rows - 1).bit_length(), blocks) for count in counts]

    def _has_graph(self, batch: ForwardBatch) -> bool:
        """Return whether a batch of this kind comes again.

        Decode steps of any size come again, and prompt chunks in steps of some rows.
        """
        rows, wanted = batch.num_rows, len(batch.logit_rows)
        if not wanted:
            return self._graphs and rows <= self._most_prompt_rows
        return self._graphs and (rows <= MAX_MIXED_GRAPH_ROWS or wanted == rows)


def prompt_bucket(rows: int) -> int:
    """Return the smallest captured size of a prompt pass that holds so many rows."""
    return _FEW_PROMPT_ROWS if rows <= _FEW_PROMPT_ROWS else -(-rows // _PROMPT_STEP) * _PROMPT_STEP
