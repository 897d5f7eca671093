"""Where a drafter's model runs: kernels, element type, and whether they are captured in graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from drafter_svc.config import DrafterSettings
from drafter_svc.draft_passes import PASS_ROWS, DraftModel, cache_blocks, scratch_blocks_per_row
from drafter_svc.growth import MAX_BRANCHES, ROWS_PER_SLOT, GrowthMaker
from foretoken.drafting import TargetInfo
from foretoken.models.backend import CPU, Backend, choose_backend, default_dtype
from foretoken.models.device_sizes import PassSizes, choices_file


class TunableModel(Protocol):
    def tune(self, path: Path | None) -> None: ...


class Placement(NamedTuple):
    """``graphs``: of CUDA, on a GPU."""

    backend: Backend = CPU
    dtype: torch.dtype = torch.float32
    graphs: bool = True

    @property
    def is_gpu(self) -> bool:
        return self.backend.kernels == "gpu"

    def cache_blocks(self, target: TargetInfo) -> int:
        """Blocks of the drafter's own cache; on a GPU one more, which rows write to that only fill up a graph."""
        return cache_blocks(target) + self.is_gpu

    def pass_sizes(self, target: TargetInfo) -> PassSizes | None:
        """The largest passes of a draft model; None on a CPU, whose buffers grow."""
        if not self.is_gpu:
            return None
        beams = target.max_slots * MAX_BRANCHES
        return PassSizes(
            rows=max(PASS_ROWS, beams),
            wanted=beams,
            seqs=ROWS_PER_SLOT * target.max_slots,
            blocks=self._table_blocks(target),
            graphs=self.graphs,
        )

    def tune(self, model: TunableModel) -> None:
        """On a GPU, take the fastest matmuls for a model."""
        if self.backend.device.type == "cuda":
            model.tune(choices_file())

    def growth_maker(self, model: DraftModel, target: TargetInfo) -> GrowthMaker | None:
        """What grows trees there; None: what DraftPasses takes by itself, on the CPU."""
        if not self.is_gpu:
            return None
        # Triton is imported where there is a GPU alone.
        from drafter_svc.device_growth import DeviceGrowth

        return partial(
            DeviceGrowth,
            model,
            target,
            max_blocks=self._table_blocks(target),
            num_slots=self.cache_blocks(target) * target.block_size,
            device=self.backend.device,
            dtype=self.dtype,
            graphs=self.graphs,
        )

    @staticmethod
    def _table_blocks(target: TargetInfo) -> int:
        """Blocks of one row: of the longest sequence, and of its tree."""
        return -(-target.max_model_len // target.block_size) + scratch_blocks_per_row(target)


ON_CPU = Placement()


def choose_placement(settings: DrafterSettings) -> Placement:
    """Raises ConfigError for a device that is not there."""
    backend = choose_backend(settings.device)
    dtype = default_dtype(backend) if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return Placement(backend, dtype, not settings.disable_cuda_graph)
