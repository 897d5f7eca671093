"""The batch rows of a run: which sequence each one has, and what is known of it."""

from __future__ import annotations

import numpy as np

from drafter_svc.trees.rows import DraftSequence

# The batch slot of an empty batch row.
NO_BATCH_SLOT = -1


class BatchRows:
    """The batch rows as the last request that named them left them.

    Attributes:
        batch_slots: the batch slot of each batch row; NO_BATCH_SLOT: the batch row is empty.
        sequences: None: the batch row is empty, or its sequence is unknown, and nothing is learned.
        is_drafted: bool [batch rows]; whether KV entries are written; if not, tokens are only
            learned.
        num_blocks: number of known blocks of each sequence.
        wants_tree: bool [batch rows]; whether more than the root is asked for.
    """

    __slots__ = ("batch_slots", "is_drafted", "num_blocks", "sequences", "wants_tree")

    def __init__(self, batch_slots: list[int]) -> None:
        count = len(batch_slots)
        self.batch_slots = batch_slots
        self.sequences: list[DraftSequence | None] = [None] * count
        self.is_drafted = np.zeros(count, np.bool_)
        self.num_blocks = [0] * count
        self.wants_tree = np.zeros(count, np.bool_)

    def __len__(self) -> int:
        return len(self.batch_slots)

    @property
    def num_drafted(self) -> int:
        """Number of batch rows that have a tree, as far as the host knows."""
        return int(np.count_nonzero(self.is_drafted & self.wants_tree))

    def empty(self, index: int) -> None:
        """Stop drafting for a batch row, and learning its tokens."""
        self.sequences[index], self.is_drafted[index] = None, False
