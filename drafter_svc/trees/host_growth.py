"""Growth of draft trees on the CPU: all levels are one compiled call."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.cpu.draft_levels import LevelPass, Places, growth_function

from drafter_svc.trees.growth import ROWS_PER_BATCH_SLOT, PassOutput, VocabularyOwner, vocabulary_of
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.tree import Int32


class GrowingModel(VocabularyOwner, Protocol):
    """A draft model, as growth on the host uses it."""

    hidden_size: int

    def level_pass(self, num_rows: int, longest: int) -> LevelPass: ...


class HostGrowth:
    """A ``drafter_svc.trees.growth.Growth``.

    Args:
        scale: scale of the coupled score, in logits; 0: without the sampler's noise.
    """

    def __init__(self, model: GrowingModel, target: TargetInfo, scale: float) -> None:
        self._model = model
        self._target = target
        self._scale = scale
        self._vocabulary = vocabulary_of(model, target)
        self.trees = kernel.new_trees(
            ROWS_PER_BATCH_SLOT * target.max_batch_slots, target.max_nodes, model.draft_vocab_size
        )
        max_beams = target.max_batch_slots * max(target.max_nodes - 1, 1)
        self._beams = kernel.new_beams(max_beams)
        self._grow_levels = growth_function()
        self._all_rows = np.arange(max_beams, dtype=np.int32)
        self._beam_hidden = np.zeros((max_beams, model.hidden_size), np.float32)
        self._root_hidden = np.zeros((target.max_batch_slots, model.hidden_size), np.float32)

    def offer_roots(self, output: PassOutput, rows: Int32, ends: list[int], first: int) -> None:
        nodes = np.full(len(rows), -1, np.int32)
        logits = output.logits.reshape(-1).numpy()
        kernel.offer_children(self.trees, logits, *self._vocabulary, rows, nodes, first, self._scale)
        if self._model.hidden_size:
            self._root_hidden[first : first + len(rows)] = output.hidden.numpy()[ends]

    def grow(self, rows: Int32, places: Places) -> None:
        """Grow all levels of the trees. Raises ValueError for an index out of range."""
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

    def emit(self, request: DraftRequest, roots: Int32) -> DraftBatch:
        sizes = np.maximum(np.minimum(request.max_nodes, self._target.max_nodes), 1)
        most = int(sizes.sum())
        node_starts = np.empty(request.num_rows + 1, np.int32)
        tokens, parents = np.empty(most, np.int32), np.empty(most, np.int32)
        scores = np.empty(most, np.float32)
        kernel.emit_trees(self.trees, roots, node_starts, tokens, parents, scores)
        total = int(node_starts[-1])
        return DraftBatch(request.epoch, request.step_id, node_starts, tokens[:total], parents[:total], scores[:total])
