"""Start the stack under test as a user would, with ``foretoken serve``, and stop it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from foretoken.bench.client import Address, get
from foretoken.bench.completion import StreamError
from foretoken.tune.server import drafter_states, serve_command, server_process

READY_TIMEOUT_S = 180.0
POLL_S = 0.1
LOG_TAIL_LINES = 20


class StackError(Exception):
    """The stack did not start, or does not meet the benchmark's needs."""


@contextlib.contextmanager
def running_stack(
    model: Path,
    threads: int,
    flags: Sequence[str] = (),
    *,
    num_drafters: int = 1,
    ready_timeout_s: float = READY_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    log_file: Path | None = None,
) -> Iterator[tuple[Address, psutil.Process]]:
    """Start ``foretoken serve`` with ``flags`` on free ports; yield its address and its supervisor.

    It is ready, and its drafters are attached.

    Args:
        num_drafters: the least number of attached drafters.
        environment: the environment of its processes; None: this process's own.
        log_file: keeps the log; None: the log is not kept.

    Raises:
        StackError: the stack ended or was not ready in time. The message has the end of its log.
    """
    command, address = serve_command([str(model), "--threads", str(threads), *flags])
    with running_server("foretoken serve", command, environment=environment, log_file=log_file) as server:
        server.wait_until(lambda: drafters_attached(address, num_drafters), ready_timeout_s)
        yield address, psutil.Process(server.pid)


class ServerProcess:
    """A server that this process started, and its log."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._name, self._child, self._log = name, child, log

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Wait until ``condition`` holds; return the seconds that it took.

        Raises:
            StackError: the server ended, or the time was too short. The message ends with the log.
        """
        began = time.monotonic()
        while not condition():
            if self._child.poll() is not None:
                raise StackError(f"{self._name} ended with status {self._child.returncode}:\n{_tail(self._log)}")
            if time.monotonic() > began + timeout_s:
                raise StackError(f"{self._name} was not ready within {timeout_s:g} s:\n{_tail(self._log)}")
            time.sleep(POLL_S)
        return time.monotonic() - began


@contextlib.contextmanager
def running_server(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log_file: Path | None = None,
) -> Iterator[ServerProcess]:
    """Start ``command`` in ``folder``, yield it at once, and stop it at the end.

    ``environment``, ``log_file``: as in ``running_stack``.

    Raises:
        StackError: it did not stop and was killed.
    """
    with log_file.open("w+b") if log_file else tempfile.TemporaryFile() as log:
        with server_process(command, env=environment, cwd=folder, stdout=log, stderr=log) as child, terminable():
            yield ServerProcess(name, child, log)
        if child.returncode == -signal.SIGKILL:
            raise StackError(f"{name} did not stop in time and was killed")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end this process by an exception, so that it stops the stack that it started.

    The stack is in another session; it would go on and keep its ports and a GPU's memory.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe(address: Address) -> dict[str, Any]:
    """Return GET /version: the model, its mode, and each drafter with its transport.

    Raises:
        StackError: the server did not answer.
    """
    try:
        status, body = get(address, "/version")
    except (OSError, StreamError) as error:
        raise StackError(f"http://{address.host}:{address.port}/version: {error}") from error
    if status != 200:
        raise StackError(f"/version: status {status}: {body[:200]!r}")
    details: dict[str, Any] = json.loads(body)
    return details


def service(root: psutil.Process, name: str) -> psutil.Process:
    """Return the child of a stack's supervisor that runs ``foretoken NAME``.

    Raises:
        StackError: there is not exactly one.
    """
    found = []
    for process in root.children():
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            # The process ended between the two calls.
            continue
        if "foretoken" in words and words[words.index("foretoken") + 1 :][:1] == [name]:
            found.append(process)
    if len(found) != 1:
        raise StackError(f"foretoken serve has {len(found)} processes that run {name}")
    return found[0]


def cpu_seconds(root: psutil.Process) -> dict[int, float]:
    """Return the user and system CPU seconds of each process of the tree, by process id."""
    used = {}
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        used[process.pid] = times.user + times.system
    return used


def idle_share(root: psutil.Process, seconds: float) -> float:
    """Return CPU seconds of the whole tree during ``seconds`` without a request / ``seconds``.

    Raises:
        StackError: a process ended or began meanwhile, so the sum is invalid.
    """
    before, began = cpu_seconds(root), time.perf_counter()
    time.sleep(seconds)
    after, ended = cpu_seconds(root), time.perf_counter()
    if before.keys() != after.keys():
        raise StackError("the stack's processes changed while it was idle")
    return (sum(after.values()) - sum(before.values())) / (ended - began)


def answers(address: Address, path: str) -> bool:
    """Return whether GET ``path`` is answered with status 200."""
    try:
        status, _ = get(address, path)
    except (OSError, StreamError):
        return False
    return status == 200


def drafters_attached(address: Address, num_drafters: int) -> bool:
    """Return whether the stack accepts requests and every drafter is attached."""
    states = drafter_states(address)
    return states is not None and len(states) >= num_drafters and set(states) <= {"attached"}


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
