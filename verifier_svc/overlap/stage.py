"""The buffers of an overlapped step, and the sizes that they and its graph are made for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from foretoken_kernels.overlap_state import StepRows

from foretoken.models.device_llama import OverlapPass
from foretoken.models.pinned_buffers import FetchBuffer, PinnedBuffers, SendRing
from verifier_svc.sampling.device_walker import WalkStage

# Most block tables that may be in transfer at once.
_TABLES_IN_FLIGHT = 4


class StepSize(NamedTuple):
    """The sizes that a step's graph is captured for.

    Attributes:
        pass_rows: rows of a pass with prompts; 0: it has none.
    """

    rows: int
    seqs: int
    max_width: int
    blocks: int
    captured_layers: tuple[int, ...]
    pass_rows: int = 0


class Stage:
    """The buffers of steps of one size."""

    def __init__(self, size: StepSize, target_pass: OverlapPass, walk: WalkStage) -> None:
        self.size, self.target_pass, self.walk = size, target_pass, walk
        arrays, asked, wanted = target_pass.batch.arrays, walk.asked.device, target_pass.batch.shape.wanted
        # Rows of prompts come after the trees' rows and have no logits.
        self.rows = StepRows(
            row_starts=arrays.row_starts,
            token_ids=arrays.token_ids[:wanted],
            positions=arrays.positions[:wanted],
            kv_slots=arrays.kv_slots[:wanted],
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
        # Most rows of each batch row, where batch rows share the rows.
        sizes = {"widths": ((target_pass.batch.shape.seqs,), torch.int32)}
        self.widths = PinnedBuffers(sizes, arrays.row_starts.device)
        # The first row of each batch row, and the trees that the rows got.
        self.starts = FetchBuffer(arrays.row_starts)
        self.tokens, self.parents = FetchBuffer(asked["tokens"]), FetchBuffer(asked["parents"])

    def fill_walk(self, row_starts: np.ndarray, batch_slots: list[int]) -> None:
        """Fill the walk's input where no kernel writes it. Padding rows belong to no sequence.

        ``batch_slots``: of the sequences, at most one for each sequence of the size.
        """
        asked = self.walk.asked
        asked.wait()
        host = asked.host
        for name in ("row_seqs", "parents", "tokens"):
            host[name][:] = -1
        host["row_starts"][:] = row_starts
        host["batch_slots"][:] = 0
        host["batch_slots"][: len(batch_slots)] = batch_slots
        host["max_new"][:] = 1
        asked.send()
