"""The clients of a verifier's drafters, which attach as soon as the target's weights are loaded."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from foretoken.drafter import Drafter
from foretoken.drafting import TargetInfo, TreeLimits
from foretoken.links import read_credentials
from foretoken.models.backend import Backend
from verifier_svc.config import DrafterEndpoint, VerifierSettings
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.model.target import LoadedTarget


class DrafterClients:
    """Makes the clients of one verifier. ``epoch`` names this verifier to its drafters.

    A drafter on a GPU loads its model, compiles kernels and captures graphs when it is attached. So
    the drafters of the settings attach while the target still warms up.
    """

    def __init__(
        self, settings: VerifierSettings, backend: Backend, num_blocks: int, usual_trees: tuple[TreeLimits, ...]
    ) -> None:
        """``num_blocks``: blocks of the target's KV cache. Nothing happens before ``start``.

        ``usual_trees``: as in TargetInfo.
        """
        self.epoch = secrets.randbits(63) | 1
        self.remote: list[DrafterClient] = []
        self._settings, self._backend, self._num_blocks = settings, backend, num_blocks
        self._usual_trees = usual_trees
        self._credentials = read_credentials(settings)

    def start(self, runner: LoadedTarget) -> None:
        """Begin to attach the drafters of the settings, in the background; call it once.

        ``runner`` has its weights; it may still warm up.
        """
        self._runner = runner
        settings, config = self._settings, runner.config
        self._target = TargetInfo(
            # Not the runner's fingerprint, which is final only after its warm-up.
            checkpoint_hash=runner.checkpoint_hash,
            vocab_size=config.vocab_size,
            max_model_len=runner.max_model_len,
            max_batch_slots=settings.max_running_requests,
            max_nodes=settings.speculative_num_draft_tokens,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            block_size=settings.block_size,
            num_blocks=self._num_blocks,
            checkpoint=str(settings.model.resolve()),
            usual_trees=self._usual_trees,
        )
        self._offer = DeviceOffer.of_backend(
            self._backend, TreeBounds.of(settings).max_depth, runner.dtype, settings.chunked_prefill_size
        )
        self.remote = [self.make(endpoint) for endpoint in settings.drafters]
        for client in self.remote:
            client.start()

    def make(self, endpoint: DrafterEndpoint) -> DrafterClient:
        """Return the client of a drafter in another process; it is not started yet."""
        return DrafterClient(
            endpoint,
            self._target,
            self.epoch,
            weights=self._runner.shared_weights,
            offer=self._offer,
            credentials=self._credentials,
        )

    def attach_inside(self, drafters: Mapping[str, Drafter]) -> list[InProcessClient]:
        """Attach drafters of this process, by name, and return their clients."""
        weights = self._runner.target_weights
        clients = [
            InProcessClient(name, drafter, self._target, self.epoch, weights=weights, offer=self._offer)
            for name, drafter in drafters.items()
        ]
        for client in clients:
            client.start()
        return clients

    def close(self) -> None:
        """Detach the drafters of the settings for good. Idempotent."""
        for client in self.remote:
            client.close()
