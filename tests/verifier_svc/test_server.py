"""A verifier's start: its drafters attach while the target warms up."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import rpc
from protos import drafter_pb2, drafter_pb2_grpc
from tests.support.environment import child_environment
from tests.support.tiny_checkpoint import save_llama, save_tokenizer
from verifier_svc import assembly, server
from verifier_svc.config import DrafterEndpoint, VerifierSettings
from verifier_svc.model.runner import ModelRunner


@pytest.fixture(name="address")
def _address(tmp_path: Path) -> Iterator[str]:
    """Run a drafter in a process of its own; return its address."""
    address = f"unix:{tmp_path}/d.sock"
    process = subprocess.Popen([sys.executable, "-m", "tests.support.mirror_drafter", address], env=child_environment())
    yield address
    process.kill()
    process.wait()


@pytest.fixture(name="settings")
def _settings(tmp_path: Path, address: str) -> VerifierSettings:
    folder = save_llama(tmp_path / "model")
    save_tokenizer(folder, [f"w{index}" for index in range(64)])
    return VerifierSettings(
        model=folder,
        served_model_name="tiny",
        address=f"unix:{tmp_path}/v.sock",
        max_running_requests=2,
        drafters=(DrafterEndpoint(name="mirror", address=address),),
    )


def is_attached(address: str) -> bool:
    with rpc.sync_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        attached: bool = stub.GetInfo(drafter_pb2.GetInfoRequest(), wait_for_ready=True).attached
        return attached


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process; the suite's time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def test_drafters_attach_while_the_target_warms_up(
    settings: VerifierSettings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = ModelRunner.warm_up

    def warm_up_once_attached(*args: Any) -> None:
        until(lambda: is_attached(address))
        warm_up(*args)

    monkeypatch.setattr(ModelRunner, "warm_up", warm_up_once_attached)
    verifier = assembly.build(settings)
    try:
        (drafter,) = verifier.engine.speculator.drafters
        until(lambda: drafter.num_attaches == 1)
        assert drafter.state == "attached" and verifier.clients.remote == [drafter.source]
    finally:
        verifier.close()
    until(lambda: not is_attached(address))


def test_a_start_that_fails_leaves_no_drafter_attached(
    settings: VerifierSettings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once_attached(*args: Any) -> None:
        until(lambda: is_attached(address))
        raise ValueError("broken")

    monkeypatch.setattr(ModelRunner, "warm_up", fail_once_attached)
    with pytest.raises(ValueError, match="broken"):
        assembly.build(settings)
    until(lambda: not is_attached(address))


def test_threads_of_a_verifier_pass_the_gil_on_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def serve(settings: VerifierSettings, drafters: object) -> bool:
        seen.append(sys.getswitchinterval())
        return True

    monkeypatch.setattr(server, "_serve", serve)
    before = sys.getswitchinterval()
    try:
        server.run(VerifierSettings(model=tmp_path, served_model_name="tiny", address=f"unix:{tmp_path}/v.sock"))
    finally:
        sys.setswitchinterval(before)
    assert seen == [pytest.approx(server.GIL_INTERVAL_S)] and seen[0] < before


def test_a_step_of_a_large_batch_starts_no_garbage_collection() -> None:
    before = gc.get_threshold()
    seen = []

    def look(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    try:
        server.spare_collections()
        gc.callbacks.append(look)
        made = [[index] for index in range(5000)]
        gc.callbacks.remove(look)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    assert len(made) == 5000 and not seen


@pytest.mark.parametrize(("limit", "is_limited"), [(0, False), (1, True)])
def test_the_limit_of_a_step_reaches_its_prompts(settings: VerifierSettings, limit: int, is_limited: bool) -> None:
    verifier = assembly.build(settings.model_copy(update={"drafters": (), "max_step_ms": limit}))
    try:
        prefill = verifier.engine.scheduler.prefill
        # A pass over the whole chunk takes more than the quarter of a millisecond that is left.
        assert prefill.most_tokens == 512 and (prefill.tokens(0.001) < 512) == is_limited
    finally:
        verifier.close()
