"""A drafter that drafts from device memory by arithmetic; it can also run as its own process.

Its ``device`` runs GPU kernels on a CPU: the memory is host memory, and an ``await`` blocks its
thread.
"""

from __future__ import annotations

import sys

import numpy as np
import uvloop

from drafter_svc.config import DrafterSettings
from drafter_svc.server import serve
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.target_weights import TargetWeights
from foretoken.overlap_memory import OverlapMemory, StreamOrder
from tests.support.draft_requests import draft_batch
from tests.support.mirror_drafter import MirrorDrafter

DEVICE = "cpu"
# A batch row's tree: a root, and this many nodes in a chain.
NUM_DRAFTED = 3
# Kinds of requests that it prepares for.
NUM_KINDS = 3


class OverlapDrafter(MirrorDrafter):
    """Node ``k`` of a chain is the row's last new token plus ``k`` times its hidden state's sum."""

    def __init__(self, device: str = DEVICE) -> None:
        super().__init__()
        self._device = device
        self.memory: OverlapMemory | None = None
        self.order = StreamOrder()
        self.num_prepared = 0

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds(captured_layers=(1,), num_rerun=1, device=self._device, overlaps=True)

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        super().attach(target, weights)
        self.memory, self.order = None, StreamOrder()

    def set_overlap_memory(self, memory: OverlapMemory, order: StreamOrder) -> None:
        assert self.attached, "before attach"
        self.memory, self.order = memory, order
        self.num_prepared = 0

    @property
    def is_prepared(self) -> bool:
        return self.num_prepared == NUM_KINDS

    def prepare(self) -> bool:
        if self.is_prepared:
            return False
        self.num_prepared += 1
        return True

    def gauges(self) -> dict[str, float]:
        return super().gauges() | {"prepared": float(self.num_prepared)}

    def draft(self, request: DraftRequest) -> DraftBatch:
        step = request.device_step
        if step is None:
            return super().draft(request)
        assert self.memory is not None
        self.order.await_step(step.number)
        draft_into(self.memory, step.number, request.num_rows)
        self.order.signal_draft(step.number)
        rows = request.num_rows
        if step.is_last:
            return trees(self.memory, request)
        return draft_batch(
            request.epoch,
            request.step_id,
            np.arange(rows + 1, dtype=np.int32),
            np.zeros(rows, np.int32),
            np.full(rows, -1, np.int32),
        )


def draft_into(memory: OverlapMemory, number: int, batch_rows: int) -> None:
    """Grow the trees of step ``number``; it cannot use another step's trees."""
    if int(memory.stamp) != number:
        return
    for batch_row in range(batch_rows):
        last = int(memory.counts[batch_row]) - 1
        step = int(memory.hidden[batch_row * memory.layout.tokens + last].sum())
        for node in range(1 + NUM_DRAFTED):
            memory.draft_tokens[batch_row, node] = int(memory.new_tokens[batch_row, last]) + node * step
            memory.draft_parents[batch_row, node] = node - 1
        memory.num_nodes[batch_row] = 1 + NUM_DRAFTED
    memory.draft_stamp.fill_(number)


def trees(memory: OverlapMemory, request: DraftRequest) -> DraftBatch:
    """Return the trees that ``draft_into`` left, as a reply."""
    rows, nodes = request.num_rows, 1 + NUM_DRAFTED
    return draft_batch(
        request.epoch,
        request.step_id,
        np.arange(0, rows * nodes + 1, nodes, dtype=np.int32),
        memory.draft_tokens[:rows, :nodes].numpy().flatten(),
        memory.draft_parents[:rows, :nodes].numpy().flatten(),
    )


if __name__ == "__main__":
    uvloop.run(serve(DrafterSettings(name="overlap", address=sys.argv[1]), OverlapDrafter))
