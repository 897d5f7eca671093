"""Where and how a drafter's model runs: kernels, element type, CUDA graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from drafter_svc.config import DrafterSettings
from drafter_svc.trees.growth import MAX_BRANCHES, ROWS_PER_BATCH_SLOT, Growth, GrowthMaker, PassOutput
from drafter_svc.trees.passes import (
    ENTRY_ROWS,
    GPU_ENTRY_ROWS,
    PASS_ROWS,
    DraftModel,
    cache_blocks,
    scratch_batch,
    scratch_blocks_per_row,
    warm_up,
)
from foretoken.drafting import TargetInfo
from foretoken.models.backend import CPU, Backend, choose_backend
from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import DeviceArrays
from foretoken.models.device_sizes import PassSizes, choices_file
from foretoken.models.element_type import checked_type, default_type, stored_type
from foretoken.models.weight_layout import PanelLayout, RowLayout, WeightLayout

# Passes of up to so many rows use all tiles of the attention, also passes over a prompt next to
# other sequences' tokens.
_WARM_ROWS = 512


class LaunchedModel(DraftModel, Protocol):
    """A model on a GPU."""

    def tune(self, path: Path | None) -> None: ...
    def launch(
        self, arrays: DeviceArrays, hidden: torch.Tensor, sources: torch.Tensor, *, depth: int
    ) -> PassOutput: ...
    def extend(self, arrays: DeviceArrays, hidden: torch.Tensor) -> PassOutput: ...
    def upload(self, batch: ForwardBatch) -> DeviceArrays: ...
    def write_prompt(self, arrays: DeviceArrays, hidden: torch.Tensor) -> None: ...


class ModelPlacement(NamedTuple):
    """Where a model runs.

    ``graphs``: whether a GPU runs CUDA graphs; ``warm``: whether it compiles kernels at ``attach``;
    ``is_auto``: whether a checkpoint decides ``dtype`` (``of_stored``).
    """

    backend: Backend = CPU
    dtype: torch.dtype = torch.float32
    graphs: bool = True
    warm: bool = True
    is_auto: bool = False

    def of_stored(self, stored: torch.dtype) -> ModelPlacement:
        """Return the placement of a model whose checkpoint, or target, is stored as this type."""
        return self._replace(dtype=default_type(self.backend, stored)) if self.is_auto else self

    def of_folder(self, folder: Path) -> ModelPlacement:
        """Return the placement of the model in a folder."""
        return self.of_stored(stored_type(folder)) if self.is_auto else self

    @property
    def is_gpu(self) -> bool:
        return self.backend.kernels == "gpu"

    @property
    def entry_rows(self) -> int:
        """Return ``entry_rows`` of DraftPasses."""
        return GPU_ENTRY_ROWS if self.is_gpu else ENTRY_ROWS

    def compile_kernels(self) -> None:
        """Compile the kernels of a CPU.

        A GPU's kernels are compiled when a verifier attaches. What needs no target is done now,
        while the verifier loads: make the GPU's context and import Triton.
        """
        if not self.is_gpu:
            warm_up(self.dtype)
            return
        import drafter_svc.device.growth  # noqa: F401

        torch.zeros(1, device=self.backend.device)

    def reads(self, layout: WeightLayout) -> bool:
        """Return whether the kernels can use weights of this layout in place."""
        if self.is_gpu:
            return layout == RowLayout(self.backend.device, self.dtype)
        return isinstance(layout, PanelLayout)

    def cache_blocks(self, target: TargetInfo) -> int:
        """Return the blocks of the drafter's cache; on a GPU one more, for padding rows."""
        return cache_blocks(target) + self.is_gpu

    def pass_sizes(self, target: TargetInfo) -> PassSizes | None:
        """Return the largest passes of a draft model; None on a CPU, whose buffers grow."""
        if not self.is_gpu:
            return None
        beams = target.max_batch_slots * MAX_BRANCHES
        return PassSizes(
            rows=max(PASS_ROWS, beams),
            wanted=beams,
            seqs=ROWS_PER_BATCH_SLOT * target.max_batch_slots,
            blocks=self._table_blocks(target),
            graphs=self.graphs,
        )

    def growth_maker(self, model: LaunchedModel, target: TargetInfo, sizes: PassSizes) -> GrowthMaker:
        """Return what grows trees on the GPU; ``sizes``: from ``pass_sizes``."""
        if self.backend.device.type == "cuda":
            model.tune(choices_file())
        # Triton is imported where there is a GPU alone.
        from drafter_svc.device.growth import DeviceGrowth

        make = partial(
            DeviceGrowth,
            model,
            target,
            sizes=sizes,
            num_kv_slots=self.cache_blocks(target) * target.block_size,
            device=self.backend.device,
            dtype=self.dtype,
            warm=self.warm,
        )
        if not self.warm:
            return make

        def make_warm(scale: float) -> Growth:
            growth = make(scale)
            growth.warm_up(self._run_prompts(model, target), target.num_blocks, target.block_size)
            return growth

        return make_warm

    @staticmethod
    def _run_prompts(model: LaunchedModel, target: TargetInfo) -> PassOutput:
        """Run passes over prompts of all sizes, in scratch. Return the output of the last row."""
        rows = 1 << (min(PASS_ROWS, _WARM_ROWS, target.max_model_len).bit_length() - 1)
        while True:
            batch = scratch_batch(rows, target)
            output = model.forward(batch, np.zeros((rows, model.hidden_width), np.float32), from_target=True)
            if rows == 1:
                return output
            rows //= 2

    @staticmethod
    def _table_blocks(target: TargetInfo) -> int:
        """Return the blocks of one row: of the longest sequence and of its tree."""
        return -(-target.max_model_len // target.block_size) + scratch_blocks_per_row(target)


ON_CPU = ModelPlacement()


def choose_placement(settings: DrafterSettings) -> ModelPlacement:
    """Return the placement that the settings name.

    Raises ConfigError if the device is not there or lacks the element type.
    """
    backend, graphs = choose_backend(settings.device), not settings.disable_cuda_graph
    if settings.dtype == "auto":
        return ModelPlacement(backend, default_type(backend, torch.bfloat16), graphs, is_auto=True)
    return ModelPlacement(backend, checked_type(settings.dtype, backend), graphs)
