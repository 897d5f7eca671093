"""How the trees of a draft request grow: children of the roots, levels of beams, the best nodes of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.cpu.draft_levels import LevelPass, Places, Vocabulary, growth_function
from numpy.typing import NDArray

from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.sampling import MIN_TEMPERATURE
from foretoken.tree import Int32

if TYPE_CHECKING:
    from drafter_svc.draft_passes import PassFigures
    from drafter_svc.draft_rows import DraftRows
    from drafter_svc.resident_draft import ResidentDraft
    from foretoken.resident import ResidentMemory, StreamOrder

Float32 = NDArray[np.float32]

# Children of one node on a GPU, at most: its kernels keep them in registers.
MAX_BRANCHES = 16
# Requests have at most two rows a slot.
ROWS_PER_SLOT = 2


class PassOutput(Protocol):
    """Attributes:
    logits: float32 [len(logit_rows), draft vocabulary]; valid until the next pass.
    hidden: [rows, hidden_size]; what the next recurrent step is fed; valid until the next pass.
    """

    @property
    def logits(self) -> torch.Tensor: ...
    @property
    def hidden(self) -> torch.Tensor: ...


class VocabularyOwner(Protocol):
    """See drafter_svc.draft_passes.DraftModel."""

    draft_vocab_size: int
    target_ids: NDArray[np.int32] | None


class GrowingModel(VocabularyOwner, Protocol):
    """What growth on the host needs of a model."""

    hidden_size: int

    def level_pass(self, num_rows: int, longest: int) -> LevelPass: ...


class Growth(Protocol):
    """Trees of one request at a time. ``trees.shapes``, ``filters``, ``seeds`` and ``counts`` say what each row wants;
    they are the caller's to fill before the first call for a request."""

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
        """All levels behind the roots' children; ``rows`` are those of all roots that were offered, in order."""
        ...

    def emit(self, request: DraftRequest, roots: Int32) -> DraftBatch:
        """The best nodes of each row's tree. ``roots``: int32 [rows]; tokens."""
        ...

    def resident_draft(
        self, rows: DraftRows, scratch: Int32, memory: ResidentMemory, order: StreamOrder, figures: PassFigures
    ) -> ResidentDraft:
        """What drafts from device memory in the same way. ``scratch``: int32 [slots, blocks]: for trees.

        Raises PreconditionError if drafts cannot be made over such memory.
        """
        ...


# Of a scale of the coupled score, in logits; 0: without the sampler's noise.
GrowthMaker = Callable[[float], Growth]


def vocabulary_of(model: VocabularyOwner, target: TargetInfo) -> Vocabulary:
    """What a model may draft for a target."""
    size = model.draft_vocab_size
    if model.target_ids is None:
        return Vocabulary(size, min(size, target.vocab_size), np.empty(0, np.int32))
    return Vocabulary(size, size, np.array(model.target_ids, np.int32))


def set_wishes(trees: kernel.Trees, request: DraftRequest, max_nodes: int) -> None:
    """What the rows of a request want, in the first rows of ``trees``; ``max_nodes``: of a tree at most."""
    num_rows = request.num_rows
    shapes, filters = trees.shapes[:num_rows], trees.filters[:num_rows]
    shapes[:, kernel.LENGTH] = request.lengths
    shapes[:, kernel.MAX_NODES] = np.minimum(request.max_nodes, max_nodes)
    shapes[:, kernel.MAX_DEPTH] = np.minimum(request.max_depths, shapes[:, kernel.MAX_NODES] - 1)
    shapes[:, kernel.MAX_BRANCHES] = request.max_branches
    shapes[:, kernel.CHOICE_INDEX] = request.choice_indices
    shapes[:, kernel.TOP_K] = request.top_ks
    filters[:, kernel.TEMPERATURE] = np.where(request.temperatures < MIN_TEMPERATURE, 0, request.temperatures)
    filters[:, kernel.TOP_P] = request.top_ps
    filters[:, kernel.MIN_P] = request.min_ps
    trees.seeds[:num_rows] = request.seeds
    trees.counts[:num_rows] = 0


class HostGrowth:
    """Growth on the CPU: all levels are one compiled call.

    Args:
        scale: of the coupled score, in logits; 0: without the sampler's noise.
    """

    def __init__(self, model: GrowingModel, target: TargetInfo, scale: float) -> None:
        self._model = model
        self._target = target
        self._scale = scale
        self._vocabulary = vocabulary_of(model, target)
        self.trees = kernel.new_trees(ROWS_PER_SLOT * target.max_slots, target.max_nodes, model.draft_vocab_size)
        max_beams = target.max_slots * max(target.max_nodes - 1, 1)
        self._beams = kernel.new_beams(max_beams)
        self._grow_levels = growth_function()
        self._all_rows = np.arange(max_beams, dtype=np.int32)
        self._beam_hidden = np.zeros((max_beams, model.hidden_size), np.float32)
        self._root_hidden = np.zeros((target.max_slots, model.hidden_size), np.float32)

    def offer_roots(self, output: PassOutput, rows: Int32, ends: list[int], first: int) -> None:
        nodes = np.full(len(rows), -1, np.int32)
        logits = output.logits.reshape(-1).numpy()
        kernel.offer_children(self.trees, logits, *self._vocabulary, rows, nodes, first, self._scale)
        if self._model.hidden_size:
            self._root_hidden[first : first + len(rows)] = output.hidden.numpy()[ends]

    def grow(self, rows: Int32, places: Places) -> None:
        lengths, branches = self.trees.shapes[rows, kernel.LENGTH], self.trees.shapes[rows, kernel.MAX_BRANCHES]
        num_beams = min(len(rows) * int(branches.max()), len(self._all_rows))
        level = self._model.level_pass(num_beams, int(lengths.max()) + kernel.MAX_BEAM_NODES)
        num_passes = self._grow_levels(
            self.trees,
            rows,
            places,
            self._beams,
            level,
            self._root_hidden,
            self._beam_hidden,
            self._vocabulary,
            self._all_rows,
            self._scale,
        )
        if num_passes < 0:
            raise ValueError("a level of draft trees holds an index out of range")

    def resident_draft(
        self, rows: DraftRows, scratch: Int32, memory: ResidentMemory, order: StreamOrder, figures: PassFigures
    ) -> ResidentDraft:
        raise PreconditionError("a drafter on the CPU does not draft from device memory")

    def emit(self, request: DraftRequest, roots: Int32) -> DraftBatch:
        sizes = np.maximum(np.minimum(request.max_nodes, self._target.max_nodes), 1)
        most = int(sizes.sum())
        node_starts = np.empty(request.num_rows + 1, np.int32)
        tokens, parents = np.empty(most, np.int32), np.empty(most, np.int32)
        scores = np.empty(most, np.float32)
        kernel.emit_trees(self.trees, roots, node_starts, tokens, parents, scores)
        total = int(node_starts[-1])
        return DraftBatch(request.epoch, request.step_id, node_starts, tokens[:total], parents[:total], scores[:total])
