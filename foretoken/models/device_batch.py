"""The arrays of a batch in device memory, at addresses that captured graphs know.

One copy sends them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch
from foretoken.models.pinned_buffers import PinnedBuffers

# The KV slot of padding rows: no kernel writes to it.
NO_KV_SLOT = -1
# The arrays with a number for each row that a ForwardBatch also has.
_ROW_ARRAYS = ("token_ids", "positions", "kv_slots", "context_lens")
# Prefix of the arrays' names that become PromptArrays.
_PROMPT = "prompt_"


class BatchShape(NamedTuple):
    """The sizes that a graph is captured for; a batch is padded to them.

    Attributes:
        seqs: runs of rows of one sequence.
        max_seq_rows: a bound on the rows of one run.
        blocks: width of the block tables.
        prompts: runs of prompts behind these runs, which have a launch of attention
            of their own; 0: there is none.
    """

    rows: int
    wanted: int
    seqs: int
    max_seq_rows: int
    blocks: int
    prompts: int = 0


class Runs(NamedTuple):
    """The rows of a batch as runs of one sequence each; a sequence may have several runs.

    Attributes:
        starts: int64 [runs + 1]; first row of each run, then the number of rows.
        seqs: int32 [runs]; indices into the batch's block tables.
    """

    starts: NDArray[np.int64]
    seqs: NDArray[np.int32]


def runs_of(batch: ForwardBatch) -> Runs:
    """Return the runs of rows of a batch."""
    seqs = batch.row_seqs
    is_bound = np.ones(len(seqs) + 1, np.bool_)
    np.not_equal(seqs[1:], seqs[:-1], out=is_bound[1:-1])
    starts = is_bound.nonzero()[0]
    return Runs(starts, seqs[starts[:-1]])


class PromptArrays(NamedTuple):
    """The runs of prompts in a batch that decodes, too; int32.

    Attributes:
        row_starts: [prompts + 1]; as in DeviceArrays, and rows of the same arrays.
        tree_starts, context_starts: [prompts].
        block_tables: [prompts, max_blocks].
        max_seq_rows: a bound on the rows of one run.
    """

    row_starts: torch.Tensor
    tree_starts: torch.Tensor
    context_starts: torch.Tensor
    block_tables: torch.Tensor
    max_seq_rows: int


class DeviceArrays(NamedTuple):
    """A ForwardBatch as kernels read it; int32 unless said otherwise.

    Attributes:
        masks: int64 [rows, words]; the bits of ForwardBatch.masks.
        token_ids, positions, kv_slots, context_lens: [rows]; padding rows have NO_KV_SLOT.
        logit_rows: [wanted].
        row_starts: [seqs + 1]; first row of each run; rows from the last element on are padding.
        tree_starts, context_starts: [seqs].
        block_tables: [seqs, max_blocks].
        max_seq_rows: a bound on the rows of one sequence.
        prompts: runs that are none of these ``seqs``.
    """

    masks: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    logit_rows: torch.Tensor
    row_starts: torch.Tensor
    tree_starts: torch.Tensor
    context_starts: torch.Tensor
    block_tables: torch.Tensor
    max_seq_rows: int
    prompts: PromptArrays | None = None


class DeviceBatch:
    """Batches of one shape: arrays on the device and the pinned buffers that fill them.

    Args:
        mask_words: words of a row's tree mask.
    """

    def __init__(self, shape: BatchShape, mask_words: int, device: torch.device) -> None:
        rows, wanted, seqs, max_seq_rows, max_blocks, prompts = shape
        sizes = {
            "masks": ((rows, mask_words), torch.int64),
            "token_ids": ((rows,), torch.int32),
            "positions": ((rows,), torch.int32),
            "kv_slots": ((rows,), torch.int32),
            "context_lens": ((rows,), torch.int32),
            "logit_rows": ((wanted,), torch.int32),
            **_run_sizes(seqs, max_blocks),
        }
        of_prompts = _run_sizes(prompts, max_blocks) if prompts else {}
        sizes |= {_PROMPT + name: size for name, size in of_prompts.items()}
        self.shape = shape
        self._pinned = PinnedBuffers(sizes, device)
        on_device = dict(self._pinned.device)
        runs = {name: on_device.pop(_PROMPT + name) for name in of_prompts}
        self.arrays = DeviceArrays(
            **on_device, max_seq_rows=max_seq_rows, prompts=PromptArrays(**runs, max_seq_rows=rows) if runs else None
        )

    def clear(self, row_starts: NDArray[np.int32], prompts: ForwardBatch | None = None) -> None:
        """Send padding rows for kernels to fill; the first ones have logits.

        Args:
            row_starts: [seqs + 1]; divides them into runs.
            prompts: rows that follow the last of these runs, without trees and without logits.
        """
        self._pinned.wait()
        host = self._pinned.host
        for name in ("masks", "token_ids", "positions", "context_lens", "tree_starts", "context_starts"):
            host[name][:] = 0
        host["kv_slots"][:] = NO_KV_SLOT
        host["logit_rows"][:] = np.arange(len(host["logit_rows"]), dtype=np.int32)
        host["row_starts"][:] = row_starts
        host["block_tables"][:] = 0
        if prompts is not None:
            self._fill(prompts, runs_of(prompts), int(row_starts[-1]), _PROMPT)
        self._pinned.send()

    def upload(self, batch: ForwardBatch, runs: Runs) -> None:
        """Send a batch, padded to the shape, which it must fit."""
        rows, wanted = batch.num_rows, len(batch.logit_rows)
        self._pinned.wait()
        host = self._pinned.host
        masks, words = host["masks"], batch.masks.shape[1]
        masks[rows:] = 0
        masks[:rows, words:] = 0
        masks[:rows, :words] = batch.masks.view(np.int64)
        for name in _ROW_ARRAYS:
            host[name][rows:] = NO_KV_SLOT if name == "kv_slots" else 0
        host["logit_rows"][:wanted], host["logit_rows"][wanted:] = batch.logit_rows, 0
        self._fill(batch, runs, 0, "")
        self._pinned.send()

    def _fill(self, batch: ForwardBatch, runs: Runs, first: int, prefix: str) -> None:
        """Fill rows from ``first`` on, without their masks.

        Also fill the arrays ``prefix``... of their runs.
        """
        host, end, seqs = self._pinned.host, first + batch.num_rows, len(runs.seqs)
        for name in _ROW_ARRAYS:
            host[name][first:end] = getattr(batch, name)
        starts, tables = host[prefix + "row_starts"], host[prefix + "block_tables"]
        starts[: seqs + 1] = runs.starts + first
        starts[seqs + 1 :] = end
        host[prefix + "tree_starts"][:seqs] = batch.tree_starts[runs.seqs]
        contexts = 0 if batch.context_starts is None else batch.context_starts[runs.seqs]
        host[prefix + "context_starts"][:seqs] = contexts
        width = min(batch.block_tables.shape[1], tables.shape[1])
        tables[:seqs, :width] = batch.block_tables[runs.seqs, :width]


def _run_sizes(seqs: int, max_blocks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of the arrays of ``seqs`` runs."""
    return {
        "row_starts": ((seqs + 1,), torch.int32),
        "tree_starts": ((seqs,), torch.int32),
        "context_starts": ((seqs,), torch.int32),
        "block_tables": ((seqs, max_blocks), torch.int32),
    }


# Widths of block tables. Attention has faster kernels for the narrow one; wider ones hardly differ.
NARROW_BLOCKS = 128
WIDE_BLOCKS = 1024
# Rows and wanted rows are padded to one of these, then to multiples of _STEP.
_STEP = 128
_BUCKETS: tuple[int, ...] = (
    *range(1, 9),
    *range(10, 17, 2),
    *range(20, 33, 4),
    *range(40, 65, 8),
    *range(80, 129, 16),
    160,
    192,
    224,
    256,
)


def captured_sizes(rows: int, seqs: int, max_seq_rows: int, blocks: int) -> tuple[int, int, int, int]:
    """Return the smallest captured sizes that hold a batch of rows with logits.

    They may exceed what a pass has room for.
    """
    return bucket(rows), seq_bucket(seqs), 1 << (max_seq_rows - 1).bit_length(), table_bucket(blocks)


def table_bucket(blocks: int) -> int:
    """Return the captured width that holds a block table of ``blocks`` blocks.

    There are few widths, because a growing context goes through all of them.
    """
    if blocks <= NARROW_BLOCKS:
        return NARROW_BLOCKS
    return max(1 << (blocks - 1).bit_length(), WIDE_BLOCKS)


def seq_bucket(count: int) -> int:
    """Return the captured size that holds ``count`` sequences or trees.

    Their number changes often and each new size waits for a capture, so there are few sizes. A
    padding sequence has no rows and costs next to nothing.
    """
    return 1 << max(count - 1, 0).bit_length()


def bucket(count: int) -> int:
    """Return the smallest captured size that holds ``count`` rows.

    A padding row costs as much as any other.
    """
    for size in _BUCKETS:
        if size >= count:
            return size
    return -(-count // _STEP) * _STEP
