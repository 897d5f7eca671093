"""NVIDIA's multi-process service (MPS) for a stack: a control daemon of its own, or the one that the environment names.

With it the kernels of several processes run on a GPU side by side; without it the processes take turns. It is a daemon
of user space, to which clients find by a folder of pipes, and no setting of the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from foretoken.errors import ConfigError
from foretoken.runtime_folder import AT_END
from foretoken.supervisor import Service

MpsMode = Literal["auto", "on", "off"]
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# There where a driver is: known without loading anything.
DRIVER = Path("/dev/nvidiactl")
COST = "without MPS each step costs about 0.3 ms more (NVIDIA H200, docs/gpu.md)"

# One command to a daemon that lives takes milliseconds; its first server, a second or so.
ASK_TIMEOUT_S = 5.0
START_TIMEOUT_S = 15.0
_POLL_S = 0.05
# Of sockaddr_un, its closing zero counted; the longest name of what the daemon makes there.
_MAX_SOCKET_PATH = 108
_LONGEST_NAME = "nvidia-cuda-mps-control.pid"

# $0: the control program; $1: the process that is about to be killed. A kill with work in flight may end all clients
# of a server, unless the server has let go of the client first. A client that is stopped does not answer it, and all
# others stand still for as long as it waits.
_TERMINATE_CLIENT = """exec >/dev/null 2>&1
kill -CONT "$1"
for server in $(echo get_server_list | "$0"); do echo "terminate_client $server $1" | "$0"; done"""

# By then all our clients have gone. A daemon that does not obey is killed with its servers.
_QUIT = """export {pipes}
echo 'quit -t 2' | timeout -k 1 5 {control} && exit
daemon=$(cat {pid_file}) || exit
pkill -KILL -P "$daemon"
kill -KILL "$daemon"
"""


class _MpsError(Exception):
    """There is no MPS to be had, and why."""


@dataclass(frozen=True)
class GpuClients:
    """What services that use the GPU are started and ended with.

    Attributes:
        environment: of their processes, beside our own.
        before_kill: see Service.
        share_faults: whether a fatal fault of one's kernel is all of theirs.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    before_kill: tuple[str, ...] = ()
    share_faults: bool = False

    def run(self, service: Service) -> Service:
        return dataclasses.replace(
            service, environment=self.environment, before_kill=self.before_kill, shares_faults=self.share_faults
        )


@contextlib.contextmanager
def gpu_clients(
    mode: MpsMode, folder: Path, *, has_gpu: bool, is_useful: bool, announce: Callable[[str], None]
) -> Iterator[GpuClients]:
    """How a stack's GPU services are to be run; in the block, the daemon runs if there is one.

    Args:
        mode: ``auto`` takes MPS where it is useful and can be had.
        folder: the stack's runtime folder.
        has_gpu: whether models run on a GPU.
        is_useful: whether those of several processes do.
        announce: gets the line that says why there is none, and what that costs.

    Raises:
        ConfigError: ``on``, and it cannot be had.
    """
    if mode == "on" and not has_gpu:
        raise ConfigError("--mps on: models do not run on an NVIDIA GPU here")
    with contextlib.ExitStack() as stack:
        clients = GpuClients()
        if mode == "off":
            # A folder without a daemon: clients do not look for one in NVIDIA's default folder then.
            clients = GpuClients({PIPES: str(folder / "no-mps")})
            if has_gpu and is_useful:
                announce(f"--mps off: {COST}")
        elif mode == "on" or (has_gpu and is_useful):
            try:
                clients = stack.enter_context(_daemon(folder))
            except _MpsError as error:
                if mode == "on":
                    raise ConfigError(f"--mps on: {error}") from None
                announce(f"no MPS, {error}: {COST}")
        yield clients


@contextlib.contextmanager
def _daemon(folder: Path) -> Iterator[GpuClients]:
    """A daemon that has a server: the environment's if it answers, else one that lives as long as the block."""
    control = shutil.which(CONTROL)
    if control is None:
        raise _MpsError(f"there is no {CONTROL}")
    before_kill = ("/bin/sh", "-c", _TERMINATE_CLIENT, control)
    named = os.environ.get(PIPES)
    if named and _answers(control, os.environ):
        yield GpuClients({PIPES: named}, before_kill, share_faults=True)
        return
    pipes, logs = folder / "mps", folder / "mps-log"
    if len(os.fsencode(pipes / _LONGEST_NAME)) >= _MAX_SOCKET_PATH:
        raise _MpsError(f"the path of {pipes} is too long for its sockets (TMPDIR)")
    pipes.mkdir(mode=0o700)
    logs.mkdir(mode=0o700)
    at_end = folder / AT_END
    at_end.write_text(
        _QUIT.format(
            pipes=shlex.quote(f"{PIPES}={pipes}"),
            control=shlex.quote(control),
            pid_file=shlex.quote(str(pipes / _LONGEST_NAME)),
        )
    )
    environment = {**os.environ, PIPES: str(pipes), LOGS: str(logs)}
    # A server that sees some GPUs only numbers them anew, and its clients' own choice would be among those numbers.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        _start(control, environment, logs)
        yield GpuClients({PIPES: str(pipes)}, before_kill, share_faults=True)
    finally:
        # As at the start: a Ctrl-C must not reach it. One that ends our wait leaves the script for the folder's end.
        silent = subprocess.DEVNULL
        subprocess.run(["/bin/sh", str(at_end)], stdout=silent, stderr=silent, start_new_session=True)
        at_end.unlink()


def _start(control: str, environment: Mapping[str, str], logs: Path) -> None:
    """Start daemon and server; a server that cannot run here says so now, not to each client."""
    deadline = time.monotonic() + START_TIMEOUT_S
    output = logs / "start"
    with output.open("wb") as file:
        try:
            done = subprocess.run(
                [control, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                # Not pipes, which the daemon would keep open.
                stdout=file,
                stderr=file,
                # Out of the terminal's reach: Ctrl-C must not end it before its clients.
                start_new_session=True,
                timeout=START_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise _MpsError(f"{CONTROL} -d does not return") from None
    if done.returncode != 0:
        raise _MpsError(f"{CONTROL} -d failed with status {done.returncode}{_last_line(output)}")
    has_asked = False
    while True:
        try:
            if not has_asked:
                _ask(control, environment, f"start_server -uid {os.getuid()}")
                has_asked = True
            if any(word.isdecimal() for word in _ask(control, environment, "get_server_list").split()):
                return
            problem = f"its daemon starts no server{_last_line(logs / 'server.log', logs / 'control.log')}"
        except _MpsError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise _MpsError(problem)
        time.sleep(_POLL_S)


def _answers(control: str, environment: Mapping[str, str]) -> bool:
    try:
        _ask(control, environment, "get_server_list")
    except _MpsError:
        return False
    return True


def _ask(control: str, environment: Mapping[str, str], command: str) -> str:
    """What the daemon answers. Not for while a supervisor runs, which reaps all children."""
    try:
        done = subprocess.run(
            [control], input=f"{command}\n", env=environment, capture_output=True, text=True, timeout=ASK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise _MpsError("its daemon does not answer") from None
    if done.returncode != 0:
        raise _MpsError(f"its daemon does not answer: {' '.join((done.stdout + done.stderr).split())}")
    return done.stdout


def _last_line(*files: Path) -> str:
    """``: `` and the last line of the first file that has one, or nothing."""
    for file in files:
        lines = file.read_text(errors="replace").split("\n") if file.exists() else []
        for line in reversed(lines):
            if line.strip():
                return f": {line.strip()}"
    return ""
