"""``--numerics`` runs the arithmetic asked for, or the verifier refuses to start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.models import device_pass
from foretoken.models.backend import CPU, Backend
from foretoken.models.batch import ForwardBatch
from foretoken.models.device_sizes import PassSizes
from foretoken.models.llama import HostLlama
from tests.support.tiny_checkpoint import save_llama
from verifier_svc import target_loading
from verifier_svc.config import VerifierSettings
from verifier_svc.model import device_runner
from verifier_svc.model import runner as model_runner
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.model.runner import ModelRunner, silent
from verifier_svc.model.target import memory_plan
from verifier_svc.target_loading import load_target

BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), std=0.3, num_hidden_layers=1)


def settings(folder: Path, **fields: Any) -> VerifierSettings:
    return VerifierSettings(
        model=folder,
        served_model_name="tiny",
        address="unix:/none",
        block_size=BLOCK,
        max_total_tokens=2 * BLOCK,
        context_length=BLOCK,
        max_running_requests=1,
        chunked_prefill_size=BLOCK,
        speculative_num_draft_tokens=4,
        **fields,
    )


def on_device(folder: Path, device: str, strict: bool) -> DeviceRunner:
    runner = DeviceRunner(
        folder,
        backend=Backend("gpu", torch.device(device)),
        sizes=PassSizes(rows=8, wanted=8, seqs=1, blocks=4),
        strict=strict,
        dtype="float32",
        block_size=BLOCK,
        num_blocks=1,
    )
    runner.warm_up()
    return runner


@pytest.fixture(autouse=True)
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of checks that passed, which is the test's own."""
    path = tmp_path / "checks.json"
    monkeypatch.setattr(target_loading, "checks_file", lambda: path)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("strict_products")
def test_a_device_is_strict_where_that_is_wanted(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is the CPU's, with trees: it finds attention in another order.

    Fingerprints distinguish all of these.
    """
    strict, fast = on_device(folder, device, True), on_device(folder, device, False)
    assert (strict.mode, fast.mode) == ("strict", "fast")
    on_cpu = ModelRunner(folder, threads=1, block_size=BLOCK, num_blocks=1)
    assert on_cpu.mode == "strict"
    assert len({runner.fingerprint for runner in (strict, fast, on_cpu)}) == 3
    monkeypatch.setattr(device_pass, "strict_attention", device_pass.tree_attention)
    assert on_device(folder, device, True).mode == "fast"


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
def test_strict_numerics_that_cannot_be_had_are_refused(
    folder: Path, kernels: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CPU if kernels == "cpu" else Backend("gpu", torch.device(device))
    asked = settings(folder, numerics="strict")
    for module in (model_runner, device_runner):
        monkeypatch.setattr(module, "rows_are_independent", lambda *_: False)
    with pytest.raises(ConfigError, match="--numerics strict: on this machine"):
        load_target(asked, memory_plan(asked, CPU), backend, silent)


class Starts:
    """Starts the target again and again, and notes whether all rows were checked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def checks_all(self, **fields: Any) -> bool:
        asked, seen = settings(self._folder, **{"numerics": "strict", "threads": 1} | fields), []

        def note(done: int, total: int, what: str) -> None:
            seen.append(what)

        assert load_target(asked, memory_plan(asked, CPU), CPU, note).runner.mode == "strict"
        return "checking strict numerics" in seen


def test_a_check_that_passed_counts_at_the_next_start(
    folder: Path, checks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = Starts(folder)
    assert starts.checks_all()
    with caplog.at_level(logging.INFO):
        assert not starts.checks_all() and not starts.checks_all(numerics="auto")
    assert "as checked at " in caplog.text and str(checks) in caplog.text
    # It counts for nothing else.
    for fields in ({"threads": 2}, {"dtype": "bfloat16"}):
        assert starts.checks_all(**fields), fields
        assert not starts.checks_all(**fields), fields
    with monkeypatch.context() as patch:
        patch.setattr("numpy.__version__", "0.1")
        assert starts.checks_all()
    checks.unlink()
    assert starts.checks_all()


def test_another_checkpoint_is_checked(folder: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other", std=0.2, num_hidden_layers=1)
    assert Starts(folder).checks_all() and not Starts(folder).checks_all()
    assert Starts(other).checks_all() and not Starts(other).checks_all()


@pytest.mark.parametrize("part", ["chunk", "row", "tree"])
def test_a_kept_check_is_no_excuse_for_rows_that_depend_on_their_batch(
    folder: Path, checks: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows are checked at each start; if one fails, all are, and the kept check is gone."""
    assert Starts(folder).checks_all()
    forward = HostLlama.forward

    def depends(model: HostLlama, batch: ForwardBatch, *more: Any) -> torch.Tensor:
        logits = forward(model, batch, *more)
        is_tree = bool(batch.masks.any()) and batch.num_rows > 1
        kind = "row" if batch.num_rows == 1 else "tree" if is_tree else "chunk"
        return logits + (kind == part)

    with monkeypatch.context() as patch:
        patch.setattr(HostLlama, "forward", depends)
        asked = settings(folder, numerics="strict", threads=1)
        with pytest.raises(ConfigError, match="--numerics strict: on this machine"):
            load_target(asked, memory_plan(asked, CPU), CPU, silent)
        assert json.loads(checks.read_text()) == {}
        # A check that failed is not kept either.
        with pytest.raises(ConfigError, match="--numerics strict: on this machine"):
            load_target(asked, memory_plan(asked, CPU), CPU, silent)
    assert Starts(folder).checks_all()


def test_auto_is_strict_on_a_cpu(folder: Path) -> None:
    for numerics in ("auto", "strict"):
        asked = settings(folder, numerics=numerics)
        assert load_target(asked, memory_plan(asked, CPU), CPU, silent).runner.mode == "strict"
