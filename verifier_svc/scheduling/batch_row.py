"""Hold a sequence's batch row in overlapped steps (verifier_svc.overlap)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.sampling import has_token_masks
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence

# Most steps that are launched and not yet read: one runs, the next one waits for it.
MAX_IN_FLIGHT = 2


class BatchRow:
    """One sequence's batch row, from the step in which it joins to its end.

    Attributes:
        sequence: its last token is the root of its next tree.
        width: rows of its next step: most nodes of the drafter's tree, including the root. A tree
            from the host may take more.
        drafter_number: marks drafted tokens in ``WalkResult.sources``.
        is_new: whether no result has been read: the first token ends the prefill.
        has_stepped: whether a step of this sequence has been read. Its first step has only a root.
        enough_until: tokens of the sequence up to which its blocks suffice for one more step.
        is_masked: whether a grammar or token masks say which tokens may follow.
    """

    __slots__ = ("drafter_number", "enough_until", "has_stepped", "is_masked", "is_new", "sequence", "width")

    def __init__(self, sequence: Sequence, width: int, drafter_number: int, *, is_new: bool) -> None:
        self.sequence, self.width, self.drafter_number, self.is_new = sequence, width, drafter_number, is_new
        self.enough_until = 0
        self.has_stepped = False
        self.is_masked = has_token_masks(sequence.sampling)

    @property
    def is_left(self) -> bool:
        """Return whether the sequence has ended and given up its blocks."""
        return self.sequence.table is None

    def num_rows(self, budget: int) -> int:
        """Return the rows of its next step without a tree from the host.

        ``budget``: rows of each batch row on average, where batch rows share them; 0: each node has
        one.
        """
        return min(self.width, budget) if budget else self.width

    def num_added_rows(self, draft: Draft, budget: int) -> int:
        """Return how many more rows it has with a tree from the host, whose nodes share none."""
        return max(draft.tree.num_nodes, self.width) - self.num_rows(budget)


class BatchRowResult(NamedTuple):
    """A step's result for one sequence.

    Attributes:
        num_nodes: nodes of the verified tree, including the root; 0 if the sequence took no part.
        found: the tree that the host gave it for this step; None: the drafter's tree, or a root.
    """

    batch_row: BatchRow
    walk: WalkResult
    num_nodes: int
    found: Draft | None = None


class BatchRowTree(NamedTuple):
    """The tree that a step verifies for one sequence.

    ``tokens``, ``parents``: int32, as in DraftTree.
    """

    batch_row: BatchRow
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
