"""A stack's MPS daemon is started, joined and always ended; without one the log says so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from foretoken import mps, probes
from foretoken.descendants import is_stopped
from foretoken.errors import ConfigError
from foretoken.mps import COST, PIPES, GpuClients, MpsMode
from foretoken.runtime_folder import AT_END, runtime_folder
from foretoken.service import Service
from tests.support import fake_mps

ROOT = Path(__file__).parents[2]
# A stack's supervisor up to the point where it would start services.
OWNER = """
import sys
from foretoken.mps import gpu_clients
from foretoken.runtime_folder import runtime_folder
with runtime_folder() as folder, gpu_clients("on", folder, has_gpu=True, is_useful=True, announce=print) as clients:
    print(clients.environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    sys.stdin.read()
"""

Install = Callable[..., Path]


@pytest.fixture(name="install")
def _install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a control program first on PATH and returns its journal."""
    monkeypatch.delenv(PIPES, raising=False)

    def install(mode: str = "works") -> Path:
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return fake_mps.write(tmp_path, mode)

    return install


class Said(list[str]):
    """The lines of one run, and the clients in it."""

    @contextlib.contextmanager
    def clients(
        self, mode: MpsMode, folder: Path, *, has_gpu: bool = True, is_useful: bool = True
    ) -> Iterator[GpuClients]:
        with mps.gpu_clients(mode, folder, has_gpu=has_gpu, is_useful=is_useful, announce=self.append) as clients:
            yield clients


@pytest.fixture(name="said")
def _said() -> Said:
    return Said()


def daemon_of(pipes: str | Path) -> psutil.Process:
    return psutil.Process(int((Path(pipes) / "nvidia-cuda-mps-control.pid").read_text()))


def is_gone(process: psutil.Process) -> bool:
    try:
        process.wait(60)
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_stack_has_a_daemon_of_its_own_for_as_long_as_it_lives(mode: MpsMode, install: Install, said: Said) -> None:
    journal = install()
    with runtime_folder() as folder:
        with said.clients(mode, folder) as clients:
            pipes = clients.environment[PIPES]
            daemon = daemon_of(pipes)
            assert Path(pipes).parent == folder and daemon.is_running()
            assert clients.share_faults
        assert is_gone(daemon)
        assert not (folder / AT_END).exists()
    lines = journal.read_text().splitlines()
    assert lines[0].startswith(f"start {pipes}")
    assert f"start_server -uid {os.getuid()} in {pipes}" in lines
    assert lines[-1] == f"quit -t 2 in {pipes}"
    assert said == []


def test_the_daemon_sees_all_gpus_so_that_its_clients_may_choose(
    install: Install, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    journal = install()
    with runtime_folder() as folder, said.clients("on", folder) as clients:
        assert "CUDA_VISIBLE_DEVICES" not in clients.environment
    assert journal.read_text().splitlines()[0].endswith(" visible=")


@pytest.mark.parametrize("mode", ["works", "deaf"])
def test_sigkill_of_the_owner_ends_the_daemon_too(mode: str, install: Install) -> None:
    install(mode)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    pipes = Path(owner.stdout.readline().strip())
    daemon, cleaners = daemon_of(pipes), psutil.Process(owner.pid).children()
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs([daemon, *cleaners], timeout=60)
    assert alive == []
    assert not pipes.parent.exists()


def test_an_impatient_ctrl_c_leaves_no_daemon(install: Install) -> None:
    """The signal goes to the whole group, as from a terminal, while the daemon is asked to quit."""
    journal = install("deaf")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None and owner.stdin is not None
    pipes = Path(owner.stdout.readline().strip())
    daemon, cleaners = daemon_of(pipes), psutil.Process(owner.pid).children()
    owner.stdin.close()
    while "\nquit" not in journal.read_text():
        assert owner.poll() is None
        time.sleep(0.01)
    os.killpg(owner.pid, signal.SIGINT)
    owner.wait(60)
    owner.stdout.close()
    _, alive = psutil.wait_procs([daemon, *cleaners], timeout=60)
    assert alive == []
    assert not pipes.parent.exists()


def test_a_daemon_that_does_not_obey_is_killed(install: Install, said: Said) -> None:
    install("deaf")
    with runtime_folder() as folder:
        with said.clients("on", folder) as clients:
            daemon = daemon_of(clients.environment[PIPES])
        assert is_gone(daemon)


def test_the_environments_daemon_is_joined_and_never_stopped(
    install: Install, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = install()
    pipes = tmp_path / "theirs"
    pipes.mkdir()
    monkeypatch.setenv(PIPES, str(pipes))
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    daemon = daemon_of(pipes)
    try:
        with runtime_folder() as folder, said.clients("auto", folder) as clients:
            assert clients.environment == {PIPES: str(pipes)}
            assert clients.share_faults and clients.before_kill
            assert not (folder / AT_END).exists()
        assert daemon.is_running()
        lines = journal.read_text().splitlines()
        assert lines == [f"start {pipes} visible=", f"get_server_list in {pipes}"]
    finally:
        daemon.kill()


def test_a_named_folder_where_nobody_answers_is_left_alone(
    install: Install, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv(PIPES, str(tmp_path / "nobody"))
    with runtime_folder() as folder, said.clients("auto", folder) as clients:
        assert Path(clients.environment[PIPES]).parent == folder


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("absent", "there is no nvidia-cuda-mps-control"),
        ("fails", "nvidia-cuda-mps-control -d failed with status 1: MPS is not supported here"),
        ("serverless", "its daemon starts no server"),
        ("hangs", "its daemon does not answer"),
    ],
)
def test_without_a_daemon_auto_goes_on_and_says_what_it_costs(
    fault: str, reason: str, install: Install, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "absent":
        monkeypatch.setattr("shutil.which", lambda name: None)
    else:
        install(fault)
    # Short only where it must pass: a slow start does not hang.
    if fault == "hangs":
        monkeypatch.setattr(mps, "ASK_TIMEOUT_S", 0.3)
    if fault in ("hangs", "serverless"):
        monkeypatch.setattr(mps, "START_TIMEOUT_S", 2.0)
    with runtime_folder() as folder, said.clients("auto", folder) as clients:
        assert clients == GpuClients()
        assert said == [f"no MPS, {reason}: {COST}"]
    with runtime_folder() as folder, pytest.raises(ConfigError, match=f"^--mps on: {reason}$"):
        said.clients("on", folder).__enter__()


def test_a_folder_whose_sockets_would_have_too_long_names(install: Install, said: Said, tmp_path: Path) -> None:
    journal = install()
    folder = tmp_path / ("x" * 100)
    with said.clients("auto", folder) as clients:
        assert clients == GpuClients()
    assert "too long" in said[0]
    assert not journal.exists()


def test_auto_does_nothing_where_no_two_processes_use_a_gpu(install: Install, said: Said, tmp_path: Path) -> None:
    journal = install()
    for has_gpu, is_useful in ((False, True), (True, False)):
        with said.clients("auto", tmp_path, has_gpu=has_gpu, is_useful=is_useful) as clients:
            assert clients == GpuClients()
    assert said == [] and not journal.exists()


def test_off_keeps_clients_from_any_daemon_and_says_what_it_costs(install: Install, said: Said, tmp_path: Path) -> None:
    journal = install()
    with said.clients("off", tmp_path) as clients:
        assert not clients.share_faults and clients.before_kill == ()
        assert not Path(clients.environment[PIPES]).exists()
    assert said == [f"--mps off: {COST}"]
    with said.clients("off", tmp_path, is_useful=False), said.clients("off", tmp_path, has_gpu=False):
        pass
    assert len(said) == 1 and not journal.exists()


def test_on_without_a_gpu_is_refused(install: Install, said: Said, tmp_path: Path) -> None:
    install()
    with pytest.raises(ConfigError, match=r"^--mps on: models do not run on an NVIDIA GPU here$"):
        said.clients("on", tmp_path, has_gpu=False).__enter__()


def test_the_command_before_a_kill_names_the_client_to_its_server(install: Install, said: Said) -> None:
    journal = install()
    with runtime_folder() as folder, said.clients("on", folder) as clients:
        service = clients.run(Service("drafter x", ("sleep", "9"), probes.GrpcProbe("localhost:1", "x"), 1.0))
        assert (service.environment, service.shares_faults) == (clients.environment, True)
        subprocess.run([*service.before_kill, "77"], env={**os.environ, **service.environment}, check=True)
        pipes = clients.environment[PIPES]
        lines = journal.read_text().splitlines()
    assert lines[-2:] == [f"get_server_list in {pipes}", f"terminate_client {fake_mps.SERVER_PID} 77 in {pipes}"]


def test_a_stopped_client_goes_on_before_its_server_releases_it(install: Install, said: Said) -> None:
    """Otherwise the server would wait for it, and all other clients with the server."""
    install()
    client = subprocess.Popen(["sleep", "600"])
    try:
        client.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, client.pid, os.WSTOPPED)
        with runtime_folder() as folder, said.clients("on", folder) as clients:
            subprocess.run(
                [*clients.before_kill, str(client.pid)], env={**os.environ, **clients.environment}, check=True
            )
        assert not is_stopped(client.pid)
    finally:
        client.kill()
        client.wait()
