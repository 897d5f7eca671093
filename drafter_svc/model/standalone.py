"""STANDALONE: a small model with the target's vocabulary drafts. It reads tokens only.

Its cache uses the verifier's block ids, so a prefix that it has in them is not computed again.
Missing tokens are prefilled, a bounded number in each request.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from drafter_svc.checkpoint.target_folder import target_folder
from drafter_svc.checkpoint.tokenizer_match import check_same_tokenizer
from drafter_svc.config import DrafterSettings
from drafter_svc.model.drafter import ModelDrafter
from drafter_svc.model.placement import ON_CPU, ModelPlacement, choose_placement
from drafter_svc.trees.growth import GrowthMaker
from drafter_svc.trees.host_growth import HostGrowth
from drafter_svc.trees.passes import DraftPasses, Float32
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.kv_cache import KVCache
from foretoken.models.backend import device_uuid
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import load_config
from foretoken.models.decoder_weights import load_decoder_weights
from foretoken.models.draft_head import HeadOutput
from foretoken.models.llama import HostLlama, Llama
from foretoken.models.target_check import config_notes, log_notes
from foretoken.models.weights import Checkpoint

if TYPE_CHECKING:
    from foretoken.models.device_batch import DeviceArrays
    from foretoken.models.device_llama import DeviceLlama
    from foretoken.models.target_weights import TargetWeights

logger = logging.getLogger(__name__)

# Most tokens that one request prefills, besides a few for each row: as many as a prefill chunk of a
# verifier on a CPU, so that the drafter keeps pace and no step waits for a whole prompt.
PREFILL_TOKENS = 512


def make_drafter(settings: DrafterSettings) -> StandaloneDrafter:
    """Make the drafter of a model, its kernels compiled.

    Raises ConfigError or CheckpointError as StandaloneDrafter.
    """
    path = settings.speculative_draft_model_path
    assert path is not None, "checked by the settings"
    placement = choose_placement(settings)
    drafter = StandaloneDrafter(
        path,
        target=settings.target,
        threads=settings.threads or 1,
        placement=placement,
        coupled_noise=not settings.disable_coupled_noise,
    )
    placement.compile_kernels()
    return drafter


class StandaloneModel:
    """A decoder as drafter_svc.trees.passes.DraftModel: it reads tokens only."""

    num_depths = 1
    hidden_size = 0
    hidden_width = 0
    target_ids: NDArray[np.int32] | None = None
    write_kv_entries = None

    def __init__(self, llama: Llama[Any]) -> None:
        self._decoder = llama
        self._no_hidden = torch.empty(0, 0)
        self.draft_vocab_size = llama.config.vocab_size

    def forward(self, batch: ForwardBatch, hidden: Float32, *, from_target: bool, depth: int = 0) -> HeadOutput:
        return HeadOutput(self._decoder.forward(batch), self._no_hidden)


class HostStandaloneModel(StandaloneModel):
    """A decoder on the CPU."""

    def __init__(self, llama: HostLlama) -> None:
        super().__init__(llama)
        self.level_pass = llama.level_pass


class DeviceStandaloneModel(StandaloneModel):
    """A decoder on a GPU."""

    def __init__(self, llama: DeviceLlama) -> None:
        super().__init__(llama)
        self._llama = llama
        self.tune = llama.tune

    def launch(self, arrays: DeviceArrays, hidden: torch.Tensor, sources: torch.Tensor, *, depth: int) -> HeadOutput:
        return HeadOutput(self._llama.launch(arrays), self._no_hidden)

    def extend(self, arrays: DeviceArrays, hidden: torch.Tensor) -> HeadOutput:
        return HeadOutput(self._llama.launch(arrays), self._no_hidden)

    def upload(self, batch: ForwardBatch) -> DeviceArrays:
        return self._llama.upload(batch)

    def write_prompt(self, arrays: DeviceArrays, hidden: torch.Tensor) -> None:
        self._llama.launch(arrays)


class StandaloneDrafter(ModelDrafter):
    """A ``foretoken.drafter.Drafter``.

    Raises ConfigError or CheckpointError if the folder holds no supported model. The constructor
    reads the weights; ``attach`` makes the cache.
    """

    algorithm = "STANDALONE"

    def __init__(
        self,
        path: Path,
        *,
        target: Path | None = None,
        threads: int = 1,
        placement: ModelPlacement = ON_CPU,
        coupled_noise: bool = True,
    ) -> None:
        """``target``: the target's folder, if the verifier's is not visible here."""
        super().__init__()
        self._path = path
        self._target_path = target
        self._threads = threads
        self._coupled = coupled_noise
        self._placement = placement = placement.of_folder(path)
        self._config = load_config(path)
        log_notes(logger, config_notes(path, self._config))
        with Checkpoint(path) as checkpoint:
            self._weights = load_decoder_weights(self._config, checkpoint, placement.dtype, _silent, placement.backend)

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        """Return needs of blocks only.

        Raises PreconditionError that names what differs in the vocabularies.
        """
        if self._config.vocab_size != target.vocab_size:
            raise PreconditionError(
                f"the draft model's vocabulary has {self._config.vocab_size} tokens, the target's {target.vocab_size}"
            )
        check_same_tokenizer(self._path, target_folder(target, self._target_path))
        placement = self._placement
        return DrafterNeeds(blocks=True, device=device_uuid(placement.backend), overlaps=placement.is_gpu)

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        """Forget all sequences and make the cache. Raises as ``needs``."""
        self.needs(target)
        config, placement = self._config, self._placement
        cache = KVCache(
            config.num_layers,
            placement.cache_blocks(target),
            target.block_size,
            config.num_kv_heads,
            config.head_dim,
            placement.dtype,
            placement.backend.device,
        )
        # Past the positions that it was trained for, a model drafts badly but causes no wrong text.
        num_positions, sizes = target.max_model_len + target.max_nodes, placement.pass_sizes(target)
        model: HostStandaloneModel | DeviceStandaloneModel
        if sizes is None:
            model = HostStandaloneModel(HostLlama(config, self._weights, cache, num_positions, self._threads))
            growth: GrowthMaker = partial(HostGrowth, model, target)
        else:
            # Triton is only imported where there is a GPU.
            from foretoken.models.device_llama import DeviceLlama

            model = DeviceStandaloneModel(DeviceLlama(config, self._weights, cache, num_positions, sizes))
            growth = placement.growth_maker(model, target, sizes)
        rows = DraftRows(target, first_position=0, needs_hidden=False)
        self._begin(DraftPasses(model, target, rows, budget=PREFILL_TOKENS, coupled=self._coupled, make_growth=growth))


def _silent(_done: int, _total: int, _what: str) -> None:
    """Show no progress."""
