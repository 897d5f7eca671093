"""The device that models run on is chosen, or refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foretoken.errors import ConfigError, PreconditionError
from foretoken.models import backend
from foretoken.models.backend import (
    CPU,
    Backend,
    choose_backend,
    device_name,
    device_of,
    device_uuid,
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files say that the machine has a driver."""
    monkeypatch.setattr(backend.os.path, "exists", lambda path: path == "/dev/nvidiactl")


def test_the_cpu_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.os.path, "exists", lambda path: False)
    assert choose_backend("auto") == choose_backend("cpu") == CPU
    assert device_name(CPU) == "CPU"


def test_a_machine_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of PyTorch does not matter."""
    monkeypatch.setattr(backend.os.path, "exists", lambda path: False)
    with pytest.raises(ConfigError, match="--device cuda: there is no NVIDIA GPU here, or no driver for it"):
        choose_backend("cuda")


def test_a_build_of_pytorch_for_cpus_is_named(
    driver: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_backend("auto") == CPU
    assert "build for CPUs" in caplog.text
    with pytest.raises(ConfigError, match=r"--device cuda: PyTorch .* is a build for CPUs"):
        choose_backend("cuda")


def test_an_old_gpu_is_named(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5"):
        choose_backend("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="driver too old"):
        choose_backend("cuda")


def test_only_gpu_kernels_name_a_device_to_meet_on(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = Backend("gpu", torch.device("cpu"))
    assert device_uuid(CPU) == ""
    assert device_of(device_uuid(interpreted)) == interpreted.device
    uuids = ["3b1d-0", "3b1d-1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[torch.device("cuda", getattr(device, "index", device)).index]),
    )
    second = torch.device("cuda", 1)
    assert device_uuid(Backend("gpu", second)) == "3b1d-1"
    assert device_of("3b1d-1") == second
    with pytest.raises(PreconditionError, match="no GPU 3b1d-7 here"):
        device_of("3b1d-7")
