"""A supervisor in a process of its own, over dummy children that fail as a test asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
DRIVER = ROOT / "tests" / "support" / "supervised.py"
# A child: ready when its file is there, alive while its socket gives a time; logs each signal. It
# ends with the status in NAME.status, and logs at its start which first-generation children live.
CHILD = """
import contextlib, os, pathlib, signal, socket, sys, threading, time
name, folder, mode = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
def end_when_asked():
    while not (folder / f"{name}.status").exists():
        time.sleep(0.01)
    status = int((folder / f"{name}.status").read_text())
    os.unlink(folder / f"{name}.status")
    os._exit(status)
# Only the main thread runs handlers, so that it must get the signals.
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
threading.Thread(target=end_when_asked, daemon=True).start()
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
first = {path.stem: int(path.read_text()) for path in folder.glob("*.first")}
if name not in first:
    # In one piece, for others read it while they start.
    (folder / f"{name}.tmp").write_text(str(os.getpid()))
    os.rename(folder / f"{name}.tmp", folder / f"{name}.first")
else:
    beside = [other for other, pid in sorted(first.items()) if os.path.exists(f"/proc/{pid}")]
    with open(folder / "starts", "a") as starts:
        starts.write(f"{name} beside {' '.join(beside) or 'none'}\\n")
def note(number, frame):
    with open(folder / "log", "a") as log:
        log.write(f"{name} {signal.Signals(number).name}\\n")
    if mode != "stubborn":
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
def note_only(number, frame):
    with open(folder / "log", "a") as log:
        log.write(f"{name} {signal.Signals(number).name}\\n")
if mode == "reloads":
    # So a signal before this line does not end it.
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, note_only)
if mode == "forks" and os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "grandchild.tmp").write_text(str(os.getpid()))
    os.rename(folder / "grandchild.tmp", folder / "grandchild")
    while True:
        signal.pause()
if mode == "crashes":
    sys.exit(7)
if mode == "refuses":
    sys.exit(2)
if mode == "stops" and not (folder / "was-stopped").exists():
    (folder / "was-stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
# Only the first one is stuck.
(folder / "stuck").unlink(missing_ok=True)
def listen():
    (folder / f"{name}.sock").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{name}.sock"))
    listener.listen()
    return listener
listener = listen()
if mode != "unready":
    (folder / f"{name}.tmp").write_text(str(os.getpid()))
    os.rename(folder / f"{name}.tmp", folder / name)
while not (mode == "hangs" and (folder / "hang").exists()):
    if (folder / "busy").exists():
        listener.close()
        while (folder / "busy").exists():
            time.sleep(0.01)
        listener = listen()
    connection, _ = listener.accept()
    # Whoever asked may have given it up.
    with connection, contextlib.suppress(BrokenPipeError):
        connection.sendall(str(0.0 if (folder / "stuck").exists() else time.monotonic()).encode())
os.rename(folder / "hang", folder / "hung")
while True:
    signal.pause()
"""
QUICK = {"heartbeat_s": 0.05, "max_silence_s": 0.3}


@dataclass
class Driver:
    """A supervisor in its own process group."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """Return the next line that contains ``text``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return line.rstrip()
        raise AssertionError(f"ended before {text!r}: {self.lines}")

    def wait_for_file(self, name: str) -> None:
        while not (self.folder / name).exists():
            assert self.process.poll() is None
            time.sleep(0.01)

    def wait_for_missed(self, name: str, count: int) -> None:
        """Wait until ``count`` more questions showed no turn of the loop; the child must live."""
        missed, child = self.folder / f"{name}.missed", self.child(name)
        size = missed.stat().st_size if missed.exists() else 0
        while not missed.exists() or missed.stat().st_size < size + count:
            assert child.is_running()
            time.sleep(0.01)

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait()

    def child(self, name: str) -> psutil.Process:
        return psutil.Process(int((self.folder / name).read_text()))

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    drivers: list[Driver] = []

    def start(  # noqa: PLR0913 - the child's ways to fail
        *modes: tuple[str, str],
        grace_s: float = 600.0,
        optional: str = "",
        heartbeat_s: float = 1.0,
        max_silence_s: float = 600.0,
        max_stall_s: float | None = None,
        slow_start_s: float = 600.0,
        before_kill_s: float = 600.0,
        stops_together: bool = False,
        shares_faults: str = "",
        before_kill: tuple[str, ...] = (),
        program: str = sys.executable,
        launcher: tuple[str, ...] = (),
    ) -> Driver:
        services: list[dict[str, Any]] = [
            {
                "name": name,
                "command": [program, "-c", CHILD, name, str(tmp_path), mode],
                "probe": {"ready_file": str(tmp_path / name), "alive_socket": str(tmp_path / f"{name}.sock")},
                "missed_file": str(tmp_path / f"{name}.missed"),
                # A child that obeys has all the time that it needs.
                "stop_grace_s": grace_s if mode == "stubborn" else 600.0,
                "required": name != optional,
                "environment": {"OF_SERVICE": name},
                "before_kill": before_kill,
                "shares_faults": name in shares_faults.split(),
                "max_stall_s": max_silence_s if max_stall_s is None else max_stall_s,
                "reloads": mode == "reloads",
            }
            for name, mode in modes
        ]
        spec = {"services": services, "optional_ready_s": 0.1, "slow_start_s": slow_start_s}
        spec |= {"heartbeat_s": heartbeat_s, "max_silence_s": max_silence_s, "stops_together": stops_together}
        spec |= {"before_kill_s": before_kill_s}
        # The tests may run under nohup, which children would inherit.
        hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        process = subprocess.Popen(
            [*launcher, sys.executable, str(DRIVER), json.dumps(spec)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        signal.signal(signal.SIGHUP, hangup)
        drivers.append(Driver(process, tmp_path))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.wait()
        assert driver.process.stdout is not None
        driver.process.stdout.close()


def assert_gone(*processes: psutil.Process) -> None:
    assert [process for process in processes if process.is_running() and process.status() != "zombie"] == []


def end_with(driver: Driver, name: str, status: int) -> None:
    """Make a child end by itself."""
    (driver.folder / name).unlink()
    (driver.folder / "status.tmp").write_text(str(status))
    os.rename(driver.folder / "status.tmp", driver.folder / f"{name}.status")
