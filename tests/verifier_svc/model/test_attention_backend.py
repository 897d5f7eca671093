"""``--attention-backend`` runs the backend asked for, or the verifier refuses to start."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.models.backend import CPU, Backend
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.device_pass import DevicePass
from tests.support import plain_flashinfer
from tests.support.tiny_checkpoint import save_llama
from verifier_svc.config import VerifierSettings
from verifier_svc.model import attention_choice
from verifier_svc.model.attention_choice import compiled, flashinfer_passes
from verifier_svc.model.runner import silent
from verifier_svc.model.target import memory_plan
from verifier_svc.target_loading import load_target

BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), std=0.3, num_hidden_layers=1)


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return load_config(folder)


@pytest.fixture
def gpu(device: str) -> Backend:
    return Backend("gpu", torch.device(device))


def settings(folder: Path, *, chunk: int = BLOCK, **fields: Any) -> VerifierSettings:
    return VerifierSettings(
        model=folder,
        served_model_name="tiny",
        address="unix:/none",
        dtype="float32",
        block_size=BLOCK,
        max_total_tokens=2 * BLOCK,
        context_length=BLOCK,
        max_running_requests=1,
        chunked_prefill_size=chunk,
        speculative_num_draft_tokens=4,
        **fields,
    )


@pytest.fixture
def _present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a FlashInfer in plain PyTorch in place, for any model."""
    monkeypatch.setattr(attention_choice, "obstacle", lambda *_: None)
    monkeypatch.setitem(sys.modules, "flashinfer", plain_flashinfer)


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
def test_what_has_no_effect_or_cannot_be_had_is_refused_by_the_plan(folder: Path, kernels: str, gpu: Backend) -> None:
    asked = settings(folder, attention_backend="flashinfer")
    reason = "has an effect on a GPU only" if kernels == "cpu" else "flashinfer: FlashInfer (needs|has no float32)"
    with pytest.raises(ConfigError, match=f"--attention-backend {reason}"):
        memory_plan(asked, CPU if kernels == "cpu" else gpu)


def test_triton_alone_is_refused_on_a_cpu(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--attention-backend has an effect on a GPU only"):
        memory_plan(settings(folder, attention_backend="triton"), CPU)


@pytest.mark.usefixtures("_present")
def test_strict_numerics_and_flashinfer_exclude_each_other(folder: Path, gpu: Backend) -> None:
    with pytest.raises(ConfigError, match="--attention-backend flashinfer: with --numerics strict"):
        memory_plan(settings(folder, attention_backend="flashinfer", numerics="strict"), gpu)


@pytest.mark.usefixtures("_present")
@pytest.mark.parametrize(
    ("wanted", "numerics", "chunk", "expected"),
    [
        ("auto", "auto", 2048, "prompts"),
        ("auto", "auto", 2047, "none"),
        ("auto", "strict", 2048, "none"),
        ("triton", "auto", 2048, "none"),
        ("flashinfer", "auto", 16, "all"),
    ],
)
def test_which_passes_it_takes(
    wanted: str,
    numerics: str,
    chunk: int,
    expected: str,
    folder: Path,
    config: ModelConfig,
    gpu: Backend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``auto`` says why it does without FlashInfer."""
    caplog.set_level(logging.INFO)
    asked = settings(folder, chunk=chunk, attention_backend=wanted, numerics=numerics)
    assert flashinfer_passes(asked, config, torch.float32, gpu, announce=True) == expected
    assert ("attention: Triton's for every pass" in caplog.text) == (wanted == "auto" and expected == "none")


@pytest.mark.usefixtures("_present")
def test_its_workspace_is_in_the_plan(folder: Path, gpu: Backend) -> None:
    with_it, without = (
        str(memory_plan(settings(folder, chunk=2048, attention_backend=wanted), gpu)) for wanted in ("auto", "triton")
    )
    assert "buffers" in with_it and with_it != without


@pytest.mark.usefixtures("_present")
@pytest.mark.parametrize("wanted", ["auto", "flashinfer", "triton"])
def test_no_step_runs_ahead_where_every_pass_is_planned(
    wanted: str, folder: Path, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    launch = DevicePass.launch

    def seen_launch(self: DevicePass, *args: Any) -> None:
        seen.append(len(args) > 2 and args[2] is not None)
        launch(self, *args)

    monkeypatch.setattr(DevicePass, "launch", seen_launch)
    asked = settings(folder, attention_backend=wanted)
    target = load_target(asked, memory_plan(asked, gpu), gpu, silent)
    assert (target.overlap_runs is None) == (wanted == "flashinfer")
    # Passes of few rows have graphs, unless every pass is planned.
    assert seen and set(seen) == {wanted == "flashinfer"}


@pytest.mark.usefixtures("_present")
@pytest.mark.parametrize("kind", [RuntimeError, AttributeError])
def test_where_it_does_not_compile_auto_does_without(
    kind: type[Exception],
    config: ModelConfig,
    gpu: Backend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another version may lack functions that foretoken calls."""

    def fail(*_: object) -> None:
        raise kind("much output" * 1000 + "Could not find nvcc")

    monkeypatch.setattr(attention_choice, "compile_kernels", fail)
    assert compiled("prompts", config, torch.bfloat16, gpu, silent) == "none"
    assert "Could not find nvcc" in caplog.text and len(caplog.text) < 3000
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: .*Could not find nvcc"):
        compiled("all", config, torch.bfloat16, gpu, silent)
