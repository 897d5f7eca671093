"""Growth of draft trees on a GPU: all levels, with the head's passes, are one CUDA graph.

From a request to its trees the host waits for the device only once, for the trees.
"""

from __future__ import annotations

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.cpu.draft_levels import Places
from foretoken_kernels.gpu.draft_tree import padded_candidates
from foretoken_kernels.gpu.draft_tree_state import MAX_BEAM_NODES, NUM_COLUMNS, DraftOutput, deepest_tree

from drafter_svc.device.levels import (
    DeviceLevels,
    FoundTrees,
    LaunchingModel,
    TreePlaces,
    TreeShape,
    batch_of,
    write_requests,
)
from drafter_svc.device.overlapped_draft import OverlappedDraft
from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.growth import MAX_BRANCHES, ROWS_PER_BATCH_SLOT, PassOutput
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.models.device_batch import seq_bucket, table_bucket
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_sizes import PassSizes
from foretoken.models.pinned_buffers import PinnedBuffers
from foretoken.overlap_memory import OverlapMemory, StreamOrder
from foretoken.tree import Int32

# Levels of the deepest trees whose kernels are compiled at a start.
_WARM_DEPTH = 8


class _Stage:
    """The memory of one shape's graph: the host's request, the levels, and the trees."""

    def __init__(self, shape: TreeShape, levels: DeviceLevels) -> None:
        trees, _, _, nodes, num_blocks, _ = shape
        self.asked = PinnedBuffers(
            {
                "requests": ((trees, NUM_COLUMNS), torch.int32),
                "block_tables": ((trees, num_blocks), torch.int32),
                "tree_starts": ((trees,), torch.int32),
                "context_starts": ((levels.model.num_depths, trees), torch.int32),
            },
            levels.device,
        )
        self.found = PinnedBuffers(
            {
                "tokens": ((trees, nodes), torch.int32),
                "parents": ((trees, nodes), torch.int32),
                "scores": ((trees, nodes), torch.float32),
                "num_nodes": ((trees,), torch.int32),
            },
            levels.device,
        )
        self.levels = levels.memory(shape, TreePlaces(**self.asked.device), DraftOutput(**self.found.device))


class DeviceGrowth:
    """A ``drafter_svc.trees.growth.Growth``.

    Args:
        scale: scale of the coupled score, in logits; 0: without the sampler's noise.
        sizes: the largest passes of the model; ``graphs``: whether growth is captured as a CUDA
            graph.
        num_kv_slots: KV slots of the model's cache. The last one is scratch, in no tree.
        dtype: type of the model's hidden states.
        warm: whether the kernels that draft from device memory are compiled as soon as it is set.
    """

    def __init__(
        self,
        model: LaunchingModel,
        target: TargetInfo,
        scale: float,
        *,
        sizes: PassSizes,
        num_kv_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        warm: bool,
    ) -> None:
        self._model, self._target, self._sizes, self._is_warm = model, target, sizes, warm
        self._levels = DeviceLevels(model, target, scale, num_kv_slots=num_kv_slots, device=device, dtype=dtype)
        # The rows' tree requests, in the same form as on the CPU; it holds no tree.
        self.trees = kernel.new_trees(ROWS_PER_BATCH_SLOT * target.max_batch_slots, 2, 1)
        self._root_logits = torch.zeros(
            (target.max_batch_slots, model.draft_vocab_size), dtype=torch.float32, device=device
        )
        self._root_hidden = torch.zeros((target.max_batch_slots, max(model.hidden_size, 1)), dtype=dtype, device=device)
        self._ends = PinnedBuffers({"ends": ((target.max_batch_slots,), torch.int32)}, device)
        self._stages: dict[TreeShape, _Stage] = {}
        self._graphs = DeviceGraphs(sizes.graphs and device.type == "cuda")
        # The current request's drafted rows, and the stage that holds their trees.
        self._rows = np.empty(0, np.int32)
        self._stage: _Stage | None = None

    @torch.inference_mode()
    def offer_roots(self, output: PassOutput, rows: Int32, ends: list[int], first: int) -> None:
        """Copy the roots' logits and hidden states, which the next pass overwrites."""
        last = first + len(rows)
        self._root_logits[first:last].copy_(output.logits[: len(rows)])
        if self._model.hidden_size:
            self._ends.wait()
            self._ends.host["ends"][: len(ends)] = ends
            self._ends.send()
            device_ends = self._ends.device["ends"][: len(ends)]
            torch.index_select(output.hidden, 0, device_ends, out=self._root_hidden[first:last])

    @torch.inference_mode()
    def grow(self, rows: Int32, places: Places) -> None:
        longest = int(places.tree_starts[rows].max()) + MAX_BEAM_NODES
        shape = TreeShape.of(
            self.trees,
            rows,
            trees=min(seq_bucket(len(rows)), self._target.max_batch_slots),
            nodes=self._target.max_nodes,
            blocks=min(table_bucket(-(-longest // places.block_size)), self._sizes.blocks),
        )
        if shape not in self._stages:
            self._stages[shape] = _Stage(shape, self._levels)
        stage = self._stages[shape]
        self._ask(stage, rows, places)
        self._graphs.run(shape, lambda: self._launch(stage))
        self._rows, self._stage = rows, stage

    def emit(self, request: DraftRequest, roots: Int32) -> DraftBatch:
        found = None if self._stage is None else FoundTrees(**self._stage.found.receive())
        batch = batch_of(request, roots, self._rows, found)
        self._stage, self._rows = None, np.empty(0, np.int32)
        return batch

    def overlapped_draft(
        self, rows: DraftRows, scratch: Int32, memory: OverlapMemory, order: StreamOrder, figures: PassFigures
    ) -> OverlappedDraft:
        draft = OverlappedDraft(self._levels, self._target, self._sizes, rows, scratch, memory, order, figures)
        if self._is_warm:
            draft.warm_up()
        return draft

    def warm_up(self, output: PassOutput, scratch_block: int, block_size: int) -> None:
        """Compile the kernels of all tree shapes, so that no request waits for a compiler.

        Args:
            output: output of a pass with one row.
            scratch_block: a block of the cache that may be overwritten.
        """
        trees, row = self.trees, np.zeros(1, np.int32)
        tables = np.full((1, self._sizes.blocks), scratch_block, np.int32)
        places = Places(tables, row.copy(), np.ones((self._model.num_depths, 1), np.int32), block_size)
        branches = 1
        while branches <= min(MAX_BRANCHES, max(self._target.max_nodes - 1, 1)):
            for depth in _warm_depths(branches):
                trees.shapes[0] = 0
                trees.shapes[0, [kernel.LENGTH, kernel.MAX_NODES]] = 1, self._target.max_nodes
                trees.shapes[0, [kernel.MAX_DEPTH, kernel.MAX_BRANCHES]] = depth, branches
                self.offer_roots(output, row, [0], 0)
                self.grow(row, places)
            branches *= 2
        self._stage, self._rows = None, np.empty(0, np.int32)

    def _ask(self, stage: _Stage, rows: Int32, places: Places) -> None:
        """Send the rows' tree requests; trees that only pad the shape want nothing."""
        count = len(rows)
        stage.asked.wait()
        host = stage.asked.host
        write_requests(host["requests"], self.trees, rows)
        tables = host["block_tables"]
        tables[:count] = places.block_tables[rows, : tables.shape[1]]
        host["tree_starts"][:count] = places.tree_starts[rows]
        host["context_starts"][:, :count] = places.context_starts[:, rows]
        stage.asked.send()

    def _launch(self, stage: _Stage) -> None:
        """Launch one growth; this is what is captured."""
        num_trees = len(stage.levels.trees.requests)
        self._levels.launch(stage.levels, self._root_logits[:num_trees], self._root_hidden[:num_trees])


def _warm_depths(branches: int) -> list[int]:
    """Return a depth for each kind of tree that the kernels distinguish."""
    deepest = min(_WARM_DEPTH, deepest_tree(branches))
    return list({padded_candidates(branches, depth): depth for depth in range(1, deepest + 1)}.values())
