"""The command line says where the models run, and with which flags."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import _flags, _parse
from tests.chaos.device import CPU, CUDA, DEVICES, Device
from tests.chaos.schedule import Strike

DEATHS = [Strike("verifier", "kill", 1.0), Strike("verifier", "pause", 2.0), Strike("head", "kill", 3.0)]


def test_the_cpu_is_the_default() -> None:
    options = _parse([])
    assert (options.device, options.serve_flags) == (CPU, [])
    assert _flags(options, DEATHS) == [
        *("--device", "cpu", "--numerics", "strict", "--gateway-workers", "1"),
        *("--resume-attempts", "11", "--verifier-wait", "120"),
    ]


def test_a_gpu_runs_in_strict_mode_with_the_flags_given() -> None:
    options = _parse(["--device", "cuda", "--clients", "32", "--", "--mps", "off"])
    assert (options.device.name, options.device.num_clients) == ("cuda", 32)
    flags = _flags(options, DEATHS)
    assert flags[:4] == ["--device", "cuda", "--numerics", "strict"]
    assert flags[-2:] == ["--mps", "off"]
    assert all(flag in flags for flag in CUDA.flags)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_nothing_gives_up_before_a_restart_can_be_over(device: Device) -> None:
    assert device.recovery_s < device.verifier_wait_s < device.patience_s


@pytest.mark.parametrize(
    "arguments", [["--device", "tpu"], ["--device", "cuda", "--bars"], ["--clients", "0"], ["--seconds", "0"]]
)
def test_nonsense_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(arguments)
