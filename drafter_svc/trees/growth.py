"""The interface of tree growth: children of the roots, levels of beams, the best nodes of all.

Growth on the host and growth on a GPU implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.cpu.draft_levels import DraftVocabulary, Places
from numpy.typing import NDArray

from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.overlap_memory import OverlapMemory, StreamOrder
from foretoken.sampling import MIN_TEMPERATURE
from foretoken.tree import Int32

Float32 = NDArray[np.float32]

# At most so many children of a node on a GPU, whose kernels keep them in registers.
MAX_BRANCHES = 16
# A request has at most two rows a batch slot.
ROWS_PER_BATCH_SLOT = 2


class PassOutput(Protocol):
    """Attributes:
    logits: float32 [len(logit_rows), draft vocabulary]; valid until the next pass.
    hidden: [rows, hidden_size]; the input of the next recurrent step; valid until the next pass.
    """

    @property
    def logits(self) -> torch.Tensor: ...
    @property
    def hidden(self) -> torch.Tensor: ...


class VocabularyOwner(Protocol):
    """See drafter_svc.trees.passes.DraftModel."""

    draft_vocab_size: int
    target_ids: NDArray[np.int32] | None


class DraftsFromMemory(Protocol):
    """Drafts from device memory: drafter_svc.device.overlapped_draft.OverlappedDraft."""

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Enqueue the draft after a step that may still run; wait only for the last one of a run.

        Raises ValueError for a request that does not fit the run.
        """
        ...

    def finish(self) -> None:
        """End the run, if there is one; after that all rows are up to date."""
        ...

    def release(self, batch_slots: Sequence[int]) -> None:
        """Stop learning tokens of these batch slots."""
        ...

    @property
    def is_prepared(self) -> bool:
        """Return whether ``prepare`` has nothing left to do."""
        ...

    def prepare(self) -> bool:
        """Prepare for one more usual kind of drafts, if no run is begun. Return whether it did."""
        ...


class Growth(Protocol):
    """Grows the trees of one request at a time.

    The caller fills ``trees.shapes``, ``filters``, ``seeds`` and ``counts`` with each row's tree
    request before the first call for a request.
    """

    @property
    def trees(self) -> kernel.Trees: ...

    def offer_roots(self, output: PassOutput, rows: Int32, ends: list[int], first: int) -> None:
        """Let roots have their children.

        Args:
            output: of the pass that the roots were rows of; its logits are theirs.
            rows: int32 [n]; their rows in the request.
            ends: their rows in the pass.
            first: roots of this request that came before.
        """
        ...

    def grow(self, rows: Int32, places: Places) -> None:
        """Grow all levels below the roots' children; ``rows``: of all offered roots, in order."""
        ...

    def emit(self, request: DraftRequest, roots: Int32) -> DraftBatch:
        """Return the best nodes of each row's tree. ``roots``: int32 [rows]; tokens."""
        ...


@runtime_checkable
class GrowsFromMemory(Protocol):
    """A Growth that also drafts from device memory."""

    def overlapped_draft(
        self, rows: DraftRows, scratch: Int32, memory: OverlapMemory, order: StreamOrder, figures: PassFigures
    ) -> DraftsFromMemory:
        """Return drafts from this memory.

        ``scratch``: int32 [batch_slots, blocks]; the blocks of each tree.

        Raises PreconditionError if this memory cannot be used.
        """
        ...


# Of a scale of the coupled score, in logits; 0: without the sampler's noise.
GrowthMaker = Callable[[float], Growth]


def vocabulary_of(model: VocabularyOwner, target: TargetInfo) -> DraftVocabulary:
    """Return the tokens that a model may draft for a target."""
    size = model.draft_vocab_size
    if model.target_ids is None:
        return DraftVocabulary(size, min(size, target.vocab_size), np.empty(0, np.int32))
    return DraftVocabulary(size, size, np.array(model.target_ids, np.int32))


def set_tree_requests(trees: kernel.Trees, rows: NDArray[np.void], max_nodes: int) -> None:
    """Write the tree requests of a request's ``rows`` to the first rows of ``trees``.

    ``max_nodes``: the target's bound of a tree.
    """
    num_rows = len(rows)
    shapes, filters = trees.shapes[:num_rows], trees.filters[:num_rows]
    shapes[:, kernel.LENGTH] = rows["lengths"]
    shapes[:, kernel.MAX_NODES] = np.minimum(rows["max_nodes"], max_nodes)
    shapes[:, kernel.MAX_DEPTH] = np.minimum(rows["max_depths"], shapes[:, kernel.MAX_NODES] - 1)
    shapes[:, kernel.MAX_BRANCHES] = rows["max_branches"]
    shapes[:, kernel.CHOICE_INDEX] = rows["choice_indices"]
    shapes[:, kernel.TOP_K] = rows["top_ks"]
    filters[:, kernel.TEMPERATURE] = np.where(rows["temperatures"] < MIN_TEMPERATURE, 0, rows["temperatures"])
    filters[:, kernel.TOP_P] = rows["top_ps"]
    filters[:, kernel.MIN_P] = rows["min_ps"]
    trees.seeds[:num_rows] = rows["seeds"]
    trees.counts[:num_rows] = 0
