"""Each check of ``foretoken doctor`` judges the facts that it is given: well, so-so and badly."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.doctor import gpu, packages
from foretoken.doctor.finding import Finding, as_json, fault, lines, ok, tried, warning
from foretoken.doctor.gpu import Gpu, GpuProcess, check_gpu, check_gpus
from foretoken.doctor.model_files import OF_HEAD, OF_TARGET, check_model_files
from foretoken.doctor.multi_process import MpsFacts, check_mps, read_mps
from foretoken.doctor.packages import check_packages
from foretoken.doctor.ports import check_ports
from foretoken.doctor.python import check_python
from foretoken.doctor.sockets import check_sockets
from foretoken.doctor.space import Space, check_disk, check_shm, read_space
from foretoken.doctor.torch_build import TorchBuild, check_torch, read_build
from foretoken.errors import ConfigError
from foretoken.free_ports import free_ports
from foretoken.rpc import MAX_UNIX_PATH_BYTES
from tests.support.command_line import DEMO

CPU_BUILD, CUDA_BUILD = TorchBuild("2.11.0+cpu", "", has_gpu=False), TorchBuild("2.11.0", "12.8", has_gpu=True)
H100 = Gpu(0, "GPU-1", "NVIDIA H100", (9, 0), 79.6, 79.0)
SMI_GPU = "0, GPU-1, NVIDIA H100 80GB HBM3, 9.0, 81559, 40000\n1, GPU-2, Tesla V100, 7.0, 32768, 32000\n"
SMI_PROCESSES = "GPU-1, 4242, /usr/bin/python3.11, 39000\nGPU-1, 7, [Not Found], [N/A]\n"


def test_lines_and_json() -> None:
    found = [ok("Python", "3.11.2"), warning("a disk", "full", "make room"), fault("port 80", "in use")]
    assert lines(found) == [
        "ok       Python   3.11.2",
        "warning  a disk   full; make room",
        "fault    port 80  in use",
        "1 fault and 1 warning",
    ]
    assert lines(found[:1])[-1] == "no fault found"
    assert lines([found[1], found[1]])[-1] == "2 warnings"
    shown = as_json(found)
    assert (shown["num_faults"], shown["num_warnings"]) == (1, 1)
    assert shown["findings"][1] == {"check": "a disk", "level": "warning", "found": "full", "advice": "make room"}


def test_an_attempt_that_fails_is_a_fault_of_one_line() -> None:
    def fail() -> None:
        raise ConfigError("it is\nbroken")

    assert tried("thing", fail, "fine", "mend it") == Finding("thing", "fault", "it is broken", "mend it")
    assert tried("thing", lambda: None, "fine", "mend it") == ok("thing", "fine")


@pytest.mark.parametrize(("version", "level"), [((3, 10, 9), "fault"), ((3, 13, 1), "ok"), ((3, 14, 0), "warning")])
def test_python(version: tuple[int, int, int], level: str) -> None:
    assert check_python(version, "/usr/bin/python3").level == level


def test_packages() -> None:
    required = ["torch>=2.11", "click>=8.5", "numba>=0.63; python_version<'3'", "ray[serve]>=2.60; extra == 'ray'"]
    assert check_packages(required, {"torch": "2.13.0+cpu", "click": "8.5"}) == ok("packages", "torch 2.13.0+cpu")
    found = check_packages(required, {"torch": "2.9.1", "ray": "2.1"})
    assert (found.level, found.found) == ("fault", "torch 2.9.1 is not >=2.11, click is missing, ray 2.1 is not >=2.60")
    assert "pip install" in found.advice


def test_the_packages_of_this_environment_will_do() -> None:
    required = packages.requirements()
    assert any(text.startswith("torch") for text in required)
    assert check_packages(required, packages.installed_versions(required)).level == "ok"


@pytest.mark.parametrize(
    ("build", "driver", "device", "level", "said"),
    [
        (CPU_BUILD, "", "auto", "ok", "no NVIDIA driver: models run on the CPU"),
        (CPU_BUILD, "", "cuda", "fault", "install NVIDIA's driver"),
        (CPU_BUILD, "12.8", "auto", "warning", "install PyTorch's CUDA build"),
        (CPU_BUILD, "12.8", "cuda", "fault", "install PyTorch's CUDA build"),
        (CPU_BUILD, "12.8", "cpu", "ok", "models run on the CPU"),
        (CUDA_BUILD, "12.2", "auto", "ok", "built for CUDA 12.8; the driver runs CUDA 12.2"),
        (CUDA_BUILD, "13.0", "cuda", "ok", "the driver runs CUDA 13.0"),
        (CUDA_BUILD, "11.4", "auto", "warning", "update the driver to one for CUDA 12"),
        (TorchBuild("2.11.0", "12.8", has_gpu=False), "12.8", "cuda", "fault", "CUDA_VISIBLE_DEVICES"),
        (None, "12.8", "auto", "fault", "cannot be imported"),
    ],
)
def test_torch_against_the_driver(build: TorchBuild | None, driver: str, device: str, level: str, said: str) -> None:
    found = check_torch(build, driver, device)
    assert found.level == level
    assert said in f"{found.found}; {found.advice}"


def test_the_build_here_is_read() -> None:
    build = read_build()
    assert build is not None and build.version[0].isdigit()


def test_a_gpu() -> None:
    assert check_gpu(H100, 0.85) == ok("GPU 0", "NVIDIA H100, compute capability 9.0, 79.0 of 79.6 GiB free")
    old = check_gpu(Gpu(1, "GPU-2", "Tesla V100", (7, 0), 32.0, 31.0), 0.85)
    assert (old.level, old.advice[:23]) == ("fault", "8.0 or later is needed:")
    used = Gpu(
        0, "GPU-1", "NVIDIA H100", (9, 0), 80.0, 40.0, (GpuProcess(42, "python", 38.5), GpuProcess(7, "x", None))
    )
    assert "used by python (42, 38.5 GiB), x (7)" in check_gpu(used, 0.85).found
    hidden = check_gpu(Gpu(0, "GPU-1", "NVIDIA H100", (9, 0), 80.0, 40.0), 0.85)
    assert (hidden.level, "--mem-fraction-static 0.85" in hidden.advice) == ("warning", True)
    assert check_gpu(Gpu(0, "GPU-1", "NVIDIA H100", (9, 0), 80.0, 40.0), 0.4).level == "ok"


def test_what_nvidia_smi_says_is_read() -> None:
    asked: list[Sequence[str]] = []

    def run(words: Sequence[str]) -> str:
        asked.append(words)
        return SMI_PROCESSES if "compute-apps" in words[1] else SMI_GPU

    first, second = gpu.read_gpus(run)
    assert (first.name, first.capability, first.total_gib) == ("NVIDIA H100 80GB HBM3", (9, 0), 81559 / 1024)
    assert first.processes == (GpuProcess(4242, "python3.11", 39000 / 1024), GpuProcess(7, "[Not Found]", None))
    assert (second.capability, second.processes) == ((7, 0), ())
    assert [finding.level for finding in check_gpus(run, 0.85)] == ["warning", "fault"]
    assert all(words[0] == "nvidia-smi" for words in asked)


@pytest.mark.parametrize(
    ("outcome", "level"),
    [
        (FileNotFoundError("nvidia-smi"), "warning"),
        (subprocess.CalledProcessError(9, "nvidia-smi"), "warning"),
        ("Failed to initialize NVML: Unknown Error", "warning"),
        ("", "fault"),
    ],
)
def test_an_nvidia_smi_that_does_not_help(outcome: Exception | str, level: str) -> None:
    def run(words: Sequence[str]) -> str:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    (found,) = check_gpus(run, 0.85)
    assert found.level == level


@pytest.mark.parametrize(
    ("mode", "facts", "level", "said"),
    [
        ("off", MpsFacts(has_control=True), "ok", "--mps off"),
        ("auto", MpsFacts(has_control=False), "warning", "there is no nvidia-cuda-mps-control"),
        ("on", MpsFacts(has_control=False), "fault", "there is no nvidia-cuda-mps-control"),
        ("auto", MpsFacts(has_control=True), "ok", "starts a daemon of its own"),
        ("auto", MpsFacts(True, Path("/mps"), is_accessible=True, answers=True), "ok", "the daemon in /mps answers"),
        ("auto", MpsFacts(True, Path("/mps"), is_accessible=True), "warning", "no daemon answers in /mps"),
        ("auto", MpsFacts(True, Path("/mps")), "warning", "this user may not write in /mps"),
    ],
)
def test_mps(mode: str, facts: MpsFacts, level: str, said: str) -> None:
    found = check_mps(mode, facts)  # type: ignore[arg-type]
    assert (found.level, said in found.found) == (level, True)


def test_the_environments_daemon_is_asked(tmp_path: Path) -> None:
    """Its control program is a script here: it answers while the folder of pipes holds a file."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text('#!/bin/sh\nread -r _; test -f "$CUDA_MPS_PIPE_DIRECTORY/log" && echo 42\n')
    control.chmod(0o700)
    pipes = tmp_path / "pipes"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    assert read_mps(environment) == MpsFacts(True, pipes, is_accessible=False, answers=False)
    pipes.mkdir()
    assert read_mps(environment) == MpsFacts(True, pipes, is_accessible=True, answers=False)
    (pipes / "log").touch()
    assert read_mps(environment) == MpsFacts(True, pipes, is_accessible=True, answers=True)
    assert read_mps({"PATH": str(pipes)}) == MpsFacts(has_control=False)


def test_sockets(tmp_path: Path) -> None:
    short = Path("/tmp")
    assert check_sockets(short, ["ngram"]).level == "ok"
    missing = check_sockets(tmp_path / "none", [])
    assert (missing.level, "No such file" in missing.found) == ("fault", True)
    deep = tmp_path / ("x" * MAX_UNIX_PATH_BYTES)
    deep.mkdir()
    found = check_sockets(deep, [])
    assert (found.level, f"less than {MAX_UNIX_PATH_BYTES + 1}" in found.found, "TMPDIR" in found.advice) == (
        "fault",
        True,
        True,
    )
    assert not list(deep.iterdir())


def test_a_drafters_name_counts_in_the_path(tmp_path: Path) -> None:
    """The same folder does for the verifier's socket, and
    not for that of a drafter with a long name.
    """
    base = Path("/tmp") / ("y" * 50)
    base.mkdir(exist_ok=True)
    try:
        assert check_sockets(base, ["a"]).level == "ok"
        assert check_sockets(base, ["a", "b" * 60]).level == "fault"
    finally:
        shutil.rmtree(base)


def test_ports() -> None:
    first, second = free_ports(2)
    assert [finding.level for finding in check_ports("127.0.0.1", first, second)] == ["ok", "ok"]
    assert check_ports("127.0.0.1", first, first)[0].level == "fault"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        used, free = check_ports("127.0.0.1", port, first)
    # foretoken itself may be what uses it.
    assert (used.level, free.level) == ("warning", "ok")
    assert f"port {port} is in use; choose another with --port" in used.found


def test_shared_memory() -> None:
    shm = Path("/dev/shm")
    assert check_shm(Space(shm, 1.0, is_writable=True)).level == "ok"
    assert check_shm(Space(shm, 0.03, is_writable=True)).advice == "start the container with --shm-size 1g"
    assert check_shm(Space(shm, 1.0, is_writable=False)).level == "fault"
    assert check_shm(Space(shm, None, is_writable=False)).level == "fault"


def test_disks(tmp_path: Path) -> None:
    cache = Path("/cache")
    assert check_disk("hub cache", Space(cache, 50.0, is_writable=True), 16.0).level == "ok"
    assert "make room: 16.0 GiB" in check_disk("hub cache", Space(cache, 5.0, is_writable=True), 16.0).advice
    assert check_disk("hub cache", Space(cache, 5.0, is_writable=False)).level == "fault"
    assert check_disk("hub cache", Space(cache, None, is_writable=False)).level == "fault"
    here = read_space(tmp_path / "not" / "yet")
    assert (
        here.free_gib is not None
        and here.is_writable
        and here.free_gib == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1.0)
    )
    (tmp_path / "file").touch()
    assert read_space(tmp_path / "file" / "folder") == Space(tmp_path / "file" / "folder", None, is_writable=False)


def test_the_demos_files_are_whole() -> None:
    found = check_model_files("model", DEMO / "target", OF_TARGET)
    assert (found.level, "74 tensors in 1 file" in found.found) == ("ok", True)
    assert check_model_files("head", DEMO / "eagle3", OF_HEAD).level == "ok"


def test_files_that_are_missing_unreadable_or_cut(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(DEMO / "target", folder)
    closed = check_model_files("model", folder, OF_TARGET, lambda path: path.name != "tokenizer.json")
    assert (closed.level, closed.found) == ("fault", f"{folder / 'tokenizer.json'} is not readable for this user")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    cut = check_model_files("model", folder, OF_TARGET)
    assert (cut.level, "not a whole safetensors file" in cut.found) == ("fault", True)
    weights.unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    shard = check_model_files("model", folder, OF_TARGET)
    assert "model-1.safetensors does not exist, though" in shard.found
    (folder / "tokenizer.json").unlink()
    assert check_model_files("model", folder, OF_TARGET).found == f"{folder} has no tokenizer.json"
