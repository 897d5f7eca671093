"""The supervisor over dummy children: order, restarts, refusals, and that nothing outlives it."""

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

from foretoken.supervisor import RestartDelays, describe_status

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "support" / "supervised.py"
# Ready when its file is there; notes in the log each signal that it gets.
CHILD = """
import os, pathlib, signal, sys
name, folder, mode = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
def note(number, frame):
    with open(folder / "log", "a") as log:
        log.write(f"{name} {signal.Signals(number).name}\\n")
    if mode != "stubborn":
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
if mode == "forks" and os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "grandchild.tmp").write_text(str(os.getpid()))
    os.rename(folder / "grandchild.tmp", folder / "grandchild")
if mode == "crashes":
    sys.exit(7)
if mode == "refuses":
    sys.exit(2)
if mode != "unready":
    (folder / f"{name}.tmp").write_text(str(os.getpid()))
    os.rename(folder / f"{name}.tmp", folder / name)
while True:
    signal.pause()
"""


@dataclass
class Driver:
    """A supervisor in a process (group) of its own."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """The next line that contains ``text``."""
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

    def start(*modes: tuple[str, str], grace_s: float = 60.0, optional: str = "") -> Driver:
        services: list[dict[str, Any]] = [
            {
                "name": name,
                "command": [sys.executable, "-c", CHILD, name, str(tmp_path), mode],
                "ready_file": str(tmp_path / name),
                "stop_grace_s": grace_s,
                "required": name != optional,
            }
            for name, mode in modes
        ]
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps({"services": services, "optional_ready_s": 0.1})],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
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


def test_stops_in_reverse_order_of_start(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"), ("third", "obeys"))
    driver.read_until("READY")
    children = [driver.child(name) for name in ("first", "second", "third")]
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.log == ["third SIGTERM", "second SIGTERM", "first SIGTERM"]
    assert_gone(*children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_stops_in_order(start: Start, number: signal.Signals) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"))
    driver.read_until("READY")
    os.killpg(driver.process.pid, number)
    assert driver.wait() == 0
    assert driver.log == ["second SIGTERM", "first SIGTERM"]


def test_a_second_sigterm_changes_nothing(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "stubborn"), grace_s=1.0)
    driver.read_until("READY")
    for _ in range(3):
        driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.log == ["second SIGTERM", "first SIGTERM"]
    assert "second did not end in time: killed" in driver.lines


def test_a_second_sigint_kills_at_once(start: Start) -> None:
    driver = start(("first", "stubborn"), ("second", "stubborn"), grace_s=3600.0)
    driver.read_until("READY")
    children = [driver.child(name) for name in ("first", "second")]
    driver.process.send_signal(signal.SIGINT)
    driver.read_until("stopping")
    driver.process.send_signal(signal.SIGINT)
    assert driver.wait() == 0
    assert_gone(*children)


def test_a_stopped_child_still_gets_its_sigterm(start: Start) -> None:
    driver = start(("only", "obeys"))
    driver.read_until("READY")
    driver.child("only").suspend()
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.log == ["only SIGTERM"]


def test_a_killed_child_is_started_again_and_the_others_stay(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"))
    driver.read_until("READY")
    first, second = driver.child("first"), driver.child("second")
    (driver.folder / "first").unlink()
    first.kill()
    assert driver.read_until("first ended") == "first ended (SIGKILL); starting it again"
    driver.wait_for_file("first")
    assert driver.child("first").pid != first.pid
    assert driver.child("second") == second
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_sigkill_of_the_supervisor_leaves_no_child(start: Start) -> None:
    driver = start(("first", "stubborn"), ("second", "obeys"))
    driver.read_until("READY")
    children = [driver.child(name) for name in ("first", "second")]
    driver.process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_what_a_child_left_in_another_session_is_ended_too(start: Start) -> None:
    driver = start(("only", "forks"))
    driver.read_until("READY")
    driver.wait_for_file("grandchild")
    grandchild = driver.child("grandchild")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert_gone(grandchild)


def test_a_refused_configuration_ends_everything_with_status_2(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "refuses"))
    assert driver.wait() == 2
    assert "READY" not in driver.lines
    assert not any("starting it again" in line for line in driver.lines)


def test_a_required_service_that_never_starts_ends_everything(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "crashes"))
    assert driver.wait() == 1
    assert "second ended 3 times before it was ready: giving up" in driver.lines
    assert "second ended (status 7); starting it again" in driver.lines


def test_ready_without_an_optional_service_that_is_not(start: Start) -> None:
    driver = start(("drafter", "unready"), ("gateway", "obeys"), optional="drafter")
    driver.read_until("drafter is not ready yet; going on without it")
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_ready_is_said_once_and_after_every_required_service(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"))
    driver.read_until("READY")
    assert sum("is ready after" in line for line in driver.lines) == 2
    driver.child("first").kill()
    driver.read_until("starting it again")
    driver.process.send_signal(signal.SIGTERM)
    driver.wait()
    assert driver.lines.count("READY") == 1


def test_restart_delays_double_up_to_five_seconds() -> None:
    delays = RestartDelays()
    assert [delays.after(1.0) for _ in range(8)] == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_long_life_resets_the_delay() -> None:
    delays = RestartDelays()
    for _ in range(5):
        delays.after(1.0)
    assert [delays.after(31.0), delays.after(1.0), delays.after(1.0)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(("status", "text"), [(0, "status 0"), (7, "status 7"), (-9, "SIGKILL"), (-200, "signal 200")])
def test_describe_status(status: int, text: str) -> None:
    assert describe_status(status) == text
