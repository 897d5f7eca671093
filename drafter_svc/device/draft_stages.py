"""The stages of overlapped drafts over one memory, by shape, and the graphs that work on them."""

from __future__ import annotations

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from numpy.typing import NDArray

from drafter_svc.device.batch_rows import NO_BATCH_SLOT, BatchRows
from drafter_svc.device.draft_stage import NO_STEP, DraftStage
from drafter_svc.device.levels import DeviceLevels, TreeShape
from drafter_svc.trees.growth import set_tree_requests
from foretoken.drafting import TargetInfo
from foretoken.models.device_batch import seq_bucket, table_bucket
from foretoken.models.device_graph import DeviceGraphs
from foretoken.overlap_memory import OverlapMemory
from foretoken.tree import Int32

# A table has room for so many blocks more than a run's longest sequence has, or it would soon be
# too narrow.
_ROOM_BLOCKS = 16
# A table has a multiple of so many blocks, as tables of ordinary requests have. Otherwise kernels
# would be compiled once more.
_TABLE_STEP = 16


class DraftStages:
    """Makes the stages of one memory, and sets them up for batch rows.

    Args:
        max_blocks: blocks of the longest sequence.
        scratch: int32 [batch_slots, blocks]; of the model's cache, for the trees.
        graphs: whether drafts are captured.

    Attributes:
        levels, memory: as given.
        requested: the tree requests of the batch rows, for all stages.
        graphs: the captured drafts by shape.
    """

    def __init__(
        self,
        levels: DeviceLevels,
        target: TargetInfo,
        memory: OverlapMemory,
        *,
        max_blocks: int,
        scratch: Int32,
        graphs: bool,
    ) -> None:
        self.levels, self.memory = levels, memory
        self.requested = kernel.new_trees(memory.layout.batch_rows, 2, 1)
        self.graphs = DeviceGraphs(graphs and levels.device.type == "cuda")
        self._max_nodes, self._max_blocks = min(target.max_nodes, memory.layout.nodes), max_blocks
        self._scratch = scratch
        self._root_hidden = torch.zeros(
            (memory.layout.batch_rows, max(levels.model.hidden_size, 1)), dtype=levels.dtype, device=levels.device
        )
        self._stages: dict[TreeShape, DraftStage] = {}

    def request_trees(self, rows: NDArray[np.void]) -> None:
        """Write the tree requests of a request's batch rows."""
        set_tree_requests(self.requested, rows, self._max_nodes)

    def shape_of(self, count: int, num_blocks: int) -> TreeShape:
        """Return the shape for the tree requests of so many batch rows.

        ``num_blocks``: blocks of their longest sequence.
        """
        layout = self.memory.layout
        least = min(table_bucket(num_blocks + _ROOM_BLOCKS), self._max_blocks) + self._scratch.shape[1]
        return TreeShape.of(
            self.requested,
            np.arange(count, dtype=np.int32),
            trees=min(seq_bucket(count), layout.batch_rows),
            nodes=layout.nodes,
            blocks=-(-least // _TABLE_STEP) * _TABLE_STEP,
        )

    def set_up(self, batch: BatchRows, number: int) -> DraftStage:
        """Send what is known of the batch rows before step ``number``; return their stage."""
        shape = self.shape_of(len(batch), max(batch.num_blocks))
        stage = self._stages.get(shape)
        if stage is None:
            stage = DraftStage(shape, self.memory, self.levels, self._scratch.shape[1], self._root_hidden)
            self._stages[shape] = stage
        stage.send(batch, self.requested, self._scratch, number)
        return stage

    def warm_up(self) -> None:
        """Compile the kernels by running them in memory that nobody uses yet.

        What they write belongs to no step.
        """
        # Chains: wider trees share the kernels of ordinary requests.
        layout, shapes = self.memory.layout, self.requested.shapes
        shapes[:] = 0
        shapes[:, [kernel.MAX_DEPTH, kernel.MAX_BRANCHES]] = max(layout.tokens - 1, 1), 1
        count = 1
        while count <= layout.batch_rows:
            self.set_up(BatchRows([NO_BATCH_SLOT] * count), NO_STEP).launch()
            count *= 2
        self._stages.clear()
