"""The captures of usual drafts, before requests ask for them."""

from __future__ import annotations

import logging
from collections import deque

import torch
from foretoken_kernels.cpu import draft_tree as kernel

from drafter_svc.device.batch_rows import NO_BATCH_SLOT, BatchRows
from drafter_svc.device.draft_stage import NO_STEP
from drafter_svc.device.draft_stages import DraftStages
from drafter_svc.device.usual_drafts import UsualDraft, usual_drafts
from foretoken.drafting import TargetInfo

logger = logging.getLogger(__name__)

# Graphs that no request has asked for yet leave so much of the device's memory free.
_SPARE_BYTES = 512 << 20


class UsualCaptures:
    """Captures the graphs of usual drafts one by one, while no run is begun.

    It writes only to scratch, and to trees that nobody reads between two runs. Those are stamped as
    no step's.
    """

    def __init__(self, stages: DraftStages, target: TargetInfo) -> None:
        self._stages = stages
        self._waiting = deque(usual_drafts(target, stages.memory.layout) if stages.graphs.enabled else ())

    @property
    def are_done(self) -> bool:
        return not self._waiting

    def capture(self) -> bool:
        """Capture one more graph. Return whether there was one to capture."""
        stages = self._stages
        while self._waiting:
            usual = self._waiting.popleft()
            self._request_trees(usual)
            if not stages.graphs.captures(stages.shape_of(usual.batch_rows, usual.num_blocks)):
                continue
            if not _has_room(stages.levels.device):
                logger.warning("little memory is left on the GPU: other graphs are captured once requests need them")
                self._waiting.clear()
                return False
            batch = BatchRows([NO_BATCH_SLOT] * usual.batch_rows)
            batch.num_blocks[0] = usual.num_blocks
            stage = stages.set_up(batch, NO_STEP)
            stages.graphs.run(stage.shape, stage.launch)
            return True
        return False

    def _request_trees(self, usual: UsualDraft) -> None:
        """Write a usual draft's tree requests in place of a run's."""
        requested = self._stages.requested
        shapes, filters = requested.shapes[: usual.batch_rows], requested.filters[: usual.batch_rows]
        shapes[:] = 0
        shapes[:, [kernel.MAX_DEPTH, kernel.MAX_BRANCHES]] = usual.depth, usual.branches
        filters[:] = 0
        filters[:, kernel.TOP_P] = 1
        if usual.filtered:
            filters[:, kernel.TEMPERATURE] = shapes[:, kernel.TOP_K] = 1


def _has_room(device: torch.device) -> bool:
    """Return whether graphs may take more of a device's memory."""
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] >= _SPARE_BYTES
