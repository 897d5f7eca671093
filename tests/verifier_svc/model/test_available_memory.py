"""A container's limit bounds the memory plan, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from verifier_svc.config import VerifierSettings
from verifier_svc.model import memory_plan
from verifier_svc.model.available_memory import available_memory

MIB = 2**20
DEMO = Path(__file__).parents[3] / "models" / "demo" / "target"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=1000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def version_2(folder: Path, limit: str) -> None:
    write(folder, memory_max=limit, memory_current=str(300 * MIB), memory_stat=f"anon 1\ninactive_file {100 * MIB}")


def version_1(folder: Path, limit: str) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {100 * MIB}"
    usage = str(300 * MIB)
    write(folder / "memory", memory_limit_in_bytes=limit, memory_usage_in_bytes=usage, memory_stat=stat)


@pytest.mark.parametrize("version", [version_1, version_2])
def test_a_limit_counts_without_the_page_cache_that_goes_first(tmp_path: Path, version: object) -> None:
    assert callable(version)
    version(tmp_path, str(500 * MIB))
    assert available_memory(tmp_path) == 300 * MIB
    version(tmp_path, str(10_000 * MIB))
    assert available_memory(tmp_path) == 1000 * MIB
    version(tmp_path, str(100 * MIB))
    assert available_memory(tmp_path) == 0


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 1000 * MIB
    version_2(tmp_path, "max")
    assert available_memory(tmp_path) == 1000 * MIB
    version_1(tmp_path, "9223372036854771712")
    assert available_memory(tmp_path) == 1000 * MIB


def test_the_plan_fits_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_2(tmp_path, str(500 * MIB))
    monkeypatch.setattr(memory_plan, "available_memory", lambda: available_memory(tmp_path))
    settings = VerifierSettings(model=DEMO, served_model_name="demo", address="unix:/none", max_running_requests=64)
    plan = memory_plan.make_plan(settings, weights_bytes=60 * MIB, bytes_per_token=8192, max_model_len=2048)
    assert plan.available_bytes == 300 * MIB
    assert plan.cache_bytes <= 240 * MIB * memory_plan.CACHE_SHARE
