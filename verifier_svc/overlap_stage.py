"""The buffers of an overlapped step, and the sizes that they and its graph are made for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from foretoken_kernels.overlap_state import StepRows

from foretoken.models.device_llama import OverlapPass
from foretoken.models.pinned_buffers import FetchBuffer, PinnedBuffers, SendRing
from verifier_svc.sampling.device_walker import WalkStage

# Most block tables that may be in transfer at once.
_TABLES_IN_FLIGHT = 4


class StepShape(NamedTuple):
    """The sizes that a step's graph is captured for.

    Attributes:
        pass_rows: rows of a pass with prompts; 0: it has none.
    """

    rows: int
    seqs: int
    max_width: int
    blocks: int
    features: tuple[int, ...]
    pass_rows: int = 0


class Stage:
    """The buffers of one shape."""

    def __init__(self, resident: OverlapPass, walk: WalkStage) -> None:
        self.resident, self.walk = resident, walk
        arrays, asked, wanted = resident.batch.arrays, walk.asked.device, resident.batch.shape.wanted
        # Rows of prompts come after the seats' rows and have no logits.
        self.rows = StepRows(
            row_starts=arrays.row_starts,
            token_ids=arrays.token_ids[:wanted],
            positions=arrays.positions[:wanted],
            slot_mapping=arrays.slot_mapping[:wanted],
            context_lens=arrays.context_lens[:wanted],
            masks=arrays.masks[:wanted],
            tree_starts=arrays.tree_starts,
            row_seqs=asked["row_seqs"],
            tokens=asked["tokens"],
            parents=asked["parents"],
            sample_positions=asked["positions"],
            num_outputs=asked["num_outputs"],
            max_new=asked["max_new"],
            num_nodes=walk.found.device["num_nodes"],
        )
        self.tables = SendRing(arrays.block_tables, _TABLES_IN_FLIGHT)
        # Most rows of each seat, where seats share the rows.
        sizes = {"widths": ((resident.batch.shape.seqs,), torch.int32)}
        self.widths = PinnedBuffers(sizes, arrays.row_starts.device)
        # The first row of each seat, and the trees that the rows got.
        self.starts = FetchBuffer(arrays.row_starts)
        self.tokens, self.parents = FetchBuffer(asked["tokens"]), FetchBuffer(asked["parents"])
