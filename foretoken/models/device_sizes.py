"""The sizes that a GPU's passes are made for: its buffers never grow while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class PassSizes(NamedTuple):
    """The largest batch that a pass on a GPU runs.

    Attributes:
        rows: of a batch; wanted: of them, those whose logits are wanted.
        seqs, blocks: sequences, and blocks of one.
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
    """Where the fastest matmuls of this user's GPUs are kept from one start to the next."""
    return Path.home() / ".cache" / "foretoken" / "matmuls.json"
