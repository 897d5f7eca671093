"""Run NVIDIA's multi-process service (MPS) for a stack, or use the one that the environment names.

With MPS the kernels of several processes run on a GPU concurrently; without it the processes take
turns. MPS is a user-space daemon that clients find by a folder of pipes; it changes no setting of
the device.
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
from foretoken.service import Service

MpsMode = Literal["auto", "on", "off"]
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# Exists where a driver is installed: checked without loading a library.
DRIVER = Path("/dev/nvidiactl")
COST = "without MPS each step costs about 0.3 ms more (NVIDIA H200, docs/gpu.md)"

# A running daemon answers within milliseconds; its first server starts within about a second.
ASK_TIMEOUT_S = 5.0
START_TIMEOUT_S = 15.0
_POLL_S = 0.05
# Size of a path in sockaddr_un, with its closing zero; the longest file name that the daemon uses.
_MAX_SOCKET_PATH = 108
_LONGEST_NAME = "nvidia-cuda-mps-control.pid"

# $0: the control program; $1: the process about to be killed. Killing a client with work in flight
# may end all clients of a server, unless the server drops the client first. A stopped client does
# not answer the server, and all others stall while it waits: so continue it first.
_TERMINATE_CLIENT = """exec >/dev/null 2>&1
kill -CONT "$1"
for server in $(echo get_server_list | "$0"); do echo "terminate_client $server $1" | "$0"; done"""

# All our clients have ended by then. A daemon that does not quit is killed with its servers.
_QUIT = """export {pipes}
echo 'quit -t 2' | timeout -k 1 5 {control} && exit
daemon=$(cat {pid_file}) || exit
pkill -KILL -P "$daemon"
kill -KILL "$daemon"
"""


class _MpsError(Exception):
    """MPS is not available; the message says why."""


@dataclass(frozen=True)
class GpuClients:
    """How to start and end services that use the GPU.

    Attributes:
        environment: additional variables of their processes.
        before_kill: see Service.
        share_faults: whether a fatal fault in one service's kernel hits all of them.
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
    """Run the daemon, if there is one, during the block; yield how to run a stack's GPU services.

    Args:
        mode: ``auto`` uses MPS where it is useful and available.
        folder: the stack's runtime folder.
        has_gpu: whether models run on a GPU.
        is_useful: whether several processes run models.
        announce: gets a line that says why there is no MPS, and what that costs.

    Raises:
        ConfigError: the mode is ``on``, and MPS is not available.
    """
    if mode == "on" and not has_gpu:
        raise ConfigError("--mps on: models do not run on an NVIDIA GPU here")
    with contextlib.ExitStack() as stack:
        clients = GpuClients()
        if mode == "off":
            # A folder without a daemon, so that clients ignore NVIDIA's default folder.
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
    """Use the environment's daemon if it answers, else run one during the block."""
    control = shutil.which(CONTROL)
    if control is None:
        raise _MpsError(f"there is no {CONTROL}")
    before_kill = ("/bin/sh", "-c", _TERMINATE_CLIENT, control)
    named = os.environ.get(PIPES)
    if named and answers(control, os.environ):
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
    # A server with a selection renumbers its GPUs, and clients would select among the new numbers.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        _start(control, environment, logs)
        yield GpuClients({PIPES: str(pipes)}, before_kill, share_faults=True)
    finally:
        # Ctrl-C must not reach it, as at the start. If it ends our wait, the folder's cleaner runs
        # the script.
        silent = subprocess.DEVNULL
        subprocess.run(["/bin/sh", str(at_end)], stdout=silent, stderr=silent, start_new_session=True)
        at_end.unlink()


def _start(control: str, environment: Mapping[str, str], logs: Path) -> None:
    """Start daemon and server, so that a server that cannot run fails now, not at each client."""
    deadline = time.monotonic() + START_TIMEOUT_S
    output = logs / "start"
    with output.open("wb") as file:
        try:
            done = subprocess.run(
                [control, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                # Not pipes: the daemon would keep them open.
                stdout=file,
                stderr=file,
                # A new session, so that Ctrl-C does not end it before its clients.
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


def answers(control: str, environment: Mapping[str, str]) -> bool:
    """Return whether the daemon that ``environment`` names answers.

    ``control``: the control program.
    """
    try:
        _ask(control, environment, "get_server_list")
    except _MpsError:
        return False
    return True


def _ask(control: str, environment: Mapping[str, str], command: str) -> str:
    """Return the daemon's answer. Do not call it beside a supervisor, which reaps all children."""
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
    """Return ``: `` and the last line of the first file that has one, or nothing."""
    for file in files:
        lines = file.read_text(errors="replace").split("\n") if file.exists() else []
        for line in reversed(lines):
            if line.strip():
                return f": {line.strip()}"
    return ""
