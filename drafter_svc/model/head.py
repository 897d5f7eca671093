"""EAGLE, EAGLE-3 and MTP: a head that continues from the target's hidden states drafts trees.

foretoken.models.draft_head loads and computes the head.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drafter_svc.checkpoint.model_folder import check_head, head_notes
from drafter_svc.checkpoint.target_folder import target_folder
from drafter_svc.checkpoint.token_map import check_token_map, load_token_map
from drafter_svc.config import DrafterSettings
from drafter_svc.model.drafter import ModelDrafter
from drafter_svc.model.placement import ON_CPU, ModelPlacement, choose_placement
from drafter_svc.trees.growth import GrowthMaker
from drafter_svc.trees.host_growth import HostGrowth
from drafter_svc.trees.passes import DraftPasses
from drafter_svc.trees.rows import DraftRows
from foretoken.config import at_fault
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import ConfigError, PreconditionError
from foretoken.models.backend import device_uuid
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.draft_config import head_captured_layers
from foretoken.models.draft_head import HostDraftHead, load_head
from foretoken.models.draft_weights import HeadSource
from foretoken.models.target_check import log_notes
from foretoken.models.target_weights import TargetWeights, load_target_weights

if TYPE_CHECKING:
    from foretoken.models.device_draft_head import DeviceDraftHead

logger = logging.getLogger(__name__)

# KV slot 0 has no entry: it would need the target's hidden state before the first token.
FIRST_POSITION = 1


def make_drafter(settings: DrafterSettings) -> HeadDrafter:
    """Make the drafter of a head, its kernels compiled.

    Raises ConfigError or CheckpointError as HeadDrafter.
    """
    placement = choose_placement(settings)
    drafter = HeadDrafter(
        settings.algorithm,
        settings.speculative_draft_model_path,
        target=settings.target,
        token_map=settings.speculative_token_map,
        threads=settings.threads or 1,
        placement=placement,
        coupled_noise=not settings.disable_coupled_noise,
    )
    placement.compile_kernels()
    return drafter


class HeadDrafter(ModelDrafter):
    """A ``foretoken.drafter.Drafter``.

    Raises ConfigError or CheckpointError if the folder holds no head of the algorithm, or for a bad
    token map. Weights are read at ``attach``, because some of them may be the target's.
    """

    def __init__(
        self,
        algorithm: str,
        path: Path | None,
        *,
        target: Path | None = None,
        token_map: Path | None = None,
        threads: int = 1,
        placement: ModelPlacement = ON_CPU,
        coupled_noise: bool = True,
    ) -> None:
        """``path``: the head's folder; None for MTP, whose head is in the target's folder.

        ``target``: the target's folder, if the verifier's is not visible here.
        """
        super().__init__()
        self.algorithm = algorithm
        self._path = path
        self._target_path = target
        self._threads = threads
        self._placement = placement
        self._coupled = coupled_noise
        self._token_map: NDArray[np.int32] | None = None
        if token_map is not None:
            with at_fault("--speculative-token-map"):
                self._token_map = load_token_map(token_map)
        if path is not None:
            with at_fault("--speculative-draft-model-path"):
                head = check_head(algorithm, path)
            log_notes(logger, head_notes(path, head))

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        """Return needs of hidden states, blocks, and the target's embedding and output head.

        One position before the first computed one is enough for any number of modules: the state
        that a module passes to the next is kept for the last KV slot of every block, and prefixes
        end at block borders.
        """
        with _as_refusals():
            path, config = self._folders(target)
            head = check_head(self.algorithm, path)
            captured_layers = head_captured_layers(head, config.num_layers)
        return DrafterNeeds(
            captured_layers=captured_layers,
            num_rerun=1,
            blocks=True,
            weights=True,
            device=device_uuid(self._placement.backend),
            # A deeper module reads the state at a block's last KV slot, which the host keeps.
            overlaps=self._placement.is_gpu and head.num_depths == 1,
        )

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        """Forget all sequences, load the head and make its cache.

        If ``weights`` is None, or laid out for another device or type, they are read from the
        target's folder. With ``--dtype auto`` on a GPU the head is float16 if they are.

        Raises PreconditionError if the target's folder is not visible, or head and target do not
        fit.
        """
        with _as_refusals():
            path, config = self._folders(target)
            if weights is not None:
                placement = self._placement.of_stored(weights.layout.dtype)
            else:
                placement = self._placement.of_folder(self._target_folder(target))
            if self._token_map is not None:
                check_token_map(self._token_map, target.vocab_size)
            shared = self._weights(target, config, weights, placement)
            source = HeadSource(path, config, shared, placement.dtype, self._token_map, placement.backend)
            loaded = load_head(source, placement.cache_blocks(target), target.block_size)
        self._check_target_ids(loaded.weights.target_ids, target)
        num_positions, sizes = target.max_model_len + target.max_nodes, placement.pass_sizes(target)
        head: HostDraftHead | DeviceDraftHead
        if sizes is None:
            head = HostDraftHead(loaded, num_positions, self._threads)
            make_growth: GrowthMaker = partial(HostGrowth, head, target)
        else:
            # Triton is only imported where there is a GPU.
            from foretoken.models.device_draft_head import DeviceDraftHead

            head = DeviceDraftHead(loaded, num_positions, sizes)
            make_growth = placement.growth_maker(head, target, sizes)
        rows = DraftRows(target, first_position=FIRST_POSITION, num_depths=head.num_depths)
        passes = DraftPasses(
            head,
            target,
            rows,
            coupled=self._coupled,
            make_growth=make_growth,
            entry_rows=placement.entry_rows,
        )
        self._begin(passes)

    def _weights(
        self, target: TargetInfo, config: ModelConfig, shared: TargetWeights | None, placement: ModelPlacement
    ) -> TargetWeights:
        """Return the target's weights: those that are shared, or a copy read for this drafter."""
        if shared is not None and placement.reads(shared.layout):
            logger.info("embedding and head are the verifier's own")
            return shared
        folder = self._target_folder(target)
        logger.info("embedding and head are a copy, read from %s", folder)
        return load_target_weights(folder, config, placement.dtype, placement.backend)

    def _target_folder(self, target: TargetInfo) -> Path:
        return target_folder(target, self._target_path)

    def _folders(self, target: TargetInfo) -> tuple[Path, ModelConfig]:
        """Return the head's folder and the target's config.

        Raises PreconditionError if it is another target's.
        """
        folder = self._target_folder(target)
        config = load_config(folder)
        ours = (config.vocab_size, config.hidden_size, config.num_layers)
        theirs = (target.vocab_size, target.hidden_size, target.num_layers)
        if ours != theirs:
            raise PreconditionError(
                f"{folder} is not the verifier's target: vocabulary, hidden size and layers are {ours} there, "
                f"{theirs} at the verifier"
            )
        return self._path or folder, config

    @staticmethod
    def _check_target_ids(ids: NDArray[np.int32] | None, target: TargetInfo) -> None:
        if ids is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
            raise PreconditionError(
                f"the head drafts token {ids.max()}, the target's vocabulary has {target.vocab_size}"
            )


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    """Turn ConfigErrors into PreconditionErrors, whose messages the verifier logs."""
    try:
        yield
    except ConfigError as error:
        raise PreconditionError(error.message) from error
