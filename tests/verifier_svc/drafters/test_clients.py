"""What the drafters of a verifier learn about its target."""

from __future__ import annotations

from pathlib import Path

from foretoken.models.backend import CPU
from tests.support.mirror_drafter import MirrorDrafter
from tests.support.tiny_checkpoint import save_llama
from verifier_svc.config import VerifierSettings
from verifier_svc.drafters.clients import DrafterClients
from verifier_svc.model.runner import ModelRunner


def test_drafters_get_the_checkpoints_hash_which_is_no_fingerprint(tmp_path: Path) -> None:
    """Drafters attach before the warm-up, which may
    change the mode, and with it the fingerprint.
    """
    folder = save_llama(tmp_path, std=0.3, num_hidden_layers=1)
    runner = ModelRunner(folder, threads=1, block_size=4, num_blocks=1)
    settings = VerifierSettings(
        model=folder,
        served_model_name="tiny",
        address="unix:/none",
        block_size=4,
        max_running_requests=1,
        chunked_prefill_size=4,
        speculative_num_draft_tokens=4,
    )
    clients = DrafterClients(settings, CPU, 1, ())
    clients.start(runner)
    drafter = MirrorDrafter()
    clients.attach_inside({"mirror": drafter})
    (target,) = drafter.attached
    assert target.checkpoint_hash == runner.checkpoint_hash != runner.fingerprint
    assert not hasattr(target, "model_fingerprint")
