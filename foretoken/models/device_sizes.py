"""The largest batch of a GPU's passes. Its buffers never grow while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class PassSizes(NamedTuple):
    """The largest batch that a pass on a GPU runs.

    Attributes:
        rows: rows of a batch.
        wanted: rows whose logits are wanted.
        seqs: runs of rows of one sequence.
        blocks: width of the block tables.
        mask_words: words of a row's tree mask.
        graphs: whether decode-sized batches are captured as CUDA graphs.
    """

    rows: int
    wanted: int
    seqs: int
    blocks: int
    mask_words: int = 1
    graphs: bool = True


def choices_file() -> Path:
    """Return the file that keeps the fastest matmuls of this user's GPUs between starts."""
    return Path.home() / ".cache" / "foretoken" / "matmuls.json"
