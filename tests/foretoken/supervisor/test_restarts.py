"""The supervisor over dummy children: order, restarts, refusals, and that nothing outlives it."""

from __future__ import annotations

import json
import math
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

from foretoken.lost_context import ASSERTION_STATUS, CONTEXT_LOST_STATUS
from foretoken.supervisor import MAX_SILENCE_S, MIN_MISSED_HEARTBEATS, Heartbeats, Pulse, RestartDelays, describe_status

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


def test_stops_in_reverse_order_of_start(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"), ("third", "obeys"))
    driver.read_until("READY")
    children = [driver.child(name) for name in ("first", "second", "third")]
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.log == ["third SIGTERM", "second SIGTERM", "first SIGTERM"]
    assert_gone(*children)


def test_stops_all_at_once_if_asked_to(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "stubborn"), grace_s=3600.0, stops_together=True)
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    # The second child, which came last, does not delay the first one's signal.
    driver.wait_for_file("log")
    while "first SIGTERM" not in driver.log:
        assert driver.process.poll() is None
        time.sleep(0.01)
    driver.process.send_signal(signal.SIGINT)
    assert driver.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_stops_in_order(start: Start, number: signal.Signals) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"))
    driver.read_until("READY")
    os.killpg(driver.process.pid, number)
    assert driver.wait() == 0
    assert driver.log == ["second SIGTERM", "first SIGTERM"]


def test_a_second_sigterm_changes_nothing(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "stubborn"))
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    driver.read_until("stopping")
    driver.process.send_signal(signal.SIGTERM)
    driver.wait_for_file("log")
    second = driver.child("second")
    # If the second signal had counted as impatience, nothing would be left to end by itself.
    end_with(driver, "second", 0)
    assert driver.wait() == 0
    assert driver.log == ["second SIGTERM", "first SIGTERM"]
    assert "stopping at once" not in driver.lines
    # No user is there to press Ctrl-C again.
    assert "stopping" in driver.lines
    assert_gone(second)


def test_a_child_that_does_not_obey_is_killed_after_its_grace(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "stubborn"), grace_s=0.1)
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert "second did not end in time: killed" in driver.lines
    assert driver.log[-1] == "first SIGTERM"


def test_a_second_sigint_kills_at_once(start: Start) -> None:
    driver = start(("first", "stubborn"), ("second", "stubborn"), grace_s=3600.0)
    driver.read_until("READY")
    children = [driver.child(name) for name in ("first", "second")]
    driver.process.send_signal(signal.SIGINT)
    driver.read_until("stopping; again: at once")
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


def test_a_child_that_is_ready_again_is_announced(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"))
    driver.read_until("READY")
    for name in ("second", "first"):
        child = driver.child(name)
        (driver.folder / name).unlink()
        child.kill()
        assert driver.read_until("ended").startswith(name)
        assert driver.read_until("ready").startswith(f"{name} is ready again after ")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.lines.count("READY") == 1


QUICK = {"heartbeat_s": 0.05, "max_silence_s": 0.3}


def test_a_stopped_child_is_killed_and_started_again_and_the_others_stay(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"), **QUICK)
    driver.read_until("READY")
    first, second = driver.child("first"), driver.child("second")
    (driver.folder / "first").unlink()
    first.suspend()
    line = driver.read_until("first")
    assert line.startswith("first did not answer for ") and line.endswith(" s and was killed; starting it again")
    driver.read_until("first is ready again after")
    assert_gone(first)
    assert driver.child("first") != first and driver.child("second") == second
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    # One line for the silence, none for the end that followed.
    assert not any("ended" in line for line in driver.lines)


def test_a_hung_child_is_killed_and_started_again(start: Start) -> None:
    driver = start(("only", "hangs"), **QUICK)
    driver.read_until("READY")
    (driver.folder / "only").unlink()
    (driver.folder / "hang").touch()
    driver.read_until("only did not answer for")
    driver.read_until("only is ready again after")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


# Far longer than the allowed silence of a stopped child: that many questions take at least 1 s.
NUM_MISSED_WHILE_BUSY = 20


@pytest.mark.parametrize("how", ["busy", "stuck"])
def test_a_busy_child_is_left_alone(start: Start, how: str) -> None:
    """``busy``: nobody answers, as if a call held the GIL. ``stuck``: its thread answers."""
    driver = start(("only", "obeys"), max_stall_s=600.0, **QUICK)
    driver.read_until("READY")
    child = driver.child("only")
    (driver.folder / how).touch()
    driver.wait_for_missed("only", NUM_MISSED_WHILE_BUSY)
    (driver.folder / how).unlink()
    assert child.is_running()
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert not any("killed" in line for line in driver.lines)
    assert driver.log == ["only SIGTERM"]


def test_a_child_whose_loop_does_not_turn_for_too_long_is_killed(start: Start) -> None:
    driver = start(("only", "obeys"), heartbeat_s=0.05, max_silence_s=600.0, max_stall_s=0.3)
    driver.read_until("READY")
    stuck = driver.child("only")
    (driver.folder / "only").unlink()
    (driver.folder / "stuck").touch()
    line = driver.read_until("only did not turn its event loop for ")
    assert line.endswith(" s and was killed; starting it again")
    driver.read_until("only is ready again after")
    assert_gone(stuck)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_a_stopped_child_is_killed_also_where_a_busy_one_would_not_be(start: Start) -> None:
    driver = start(("only", "obeys"), max_stall_s=600.0, **QUICK)
    driver.read_until("READY")
    stopped = driver.child("only")
    (driver.folder / "only").unlink()
    stopped.suspend()
    driver.read_until("only did not answer for")
    driver.read_until("only is ready again after")
    assert_gone(stopped)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_a_child_stopped_during_its_start_is_found_and_a_slow_start_is_not(start: Start) -> None:
    driver = start(("slow", "unready"), ("stopped", "stops"), optional="slow", **QUICK)
    driver.read_until("stopped did not answer for")
    driver.read_until("stopped is ready after")
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert not any(line.startswith("slow did not answer") for line in driver.lines)


def test_a_stop_signal_works_without_a_terminal(start: Start) -> None:
    """SIGHUP says that the terminal is gone, so nobody can read the announcement."""
    driver = start(("only", "obeys"))
    driver.read_until("READY")
    assert driver.process.stdout is not None
    driver.process.stdout.close()
    driver.process.send_signal(signal.SIGHUP)
    driver.process.wait()
    assert driver.log == ["only SIGTERM"]


def test_a_child_is_started_again_also_where_nobody_hears_of_it(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "obeys"))
    driver.read_until("READY")
    assert driver.process.stdout is not None
    driver.process.stdout.close()
    first, second = driver.child("first"), driver.child("second")
    (driver.folder / "first").unlink()
    first.kill()
    driver.wait_for_file("first")
    assert driver.child("first") != first and driver.child("second") == second
    driver.process.send_signal(signal.SIGTERM)
    driver.process.wait()


def wait_for_log(driver: Driver, lines: list[str]) -> None:
    driver.wait_for_file("log")
    while driver.log != lines:
        assert driver.process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("launcher", [(), ("nohup",)])
def test_a_hangup_reloads_services_that_can(start: Start, launcher: tuple[str, ...]) -> None:
    driver = start(("first", "reloads"), ("second", "obeys"), launcher=launcher)
    driver.read_until("READY")
    for count in (1, 2):
        driver.process.send_signal(signal.SIGHUP)
        wait_for_log(driver, ["first SIGHUP"] * count)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.log == ["first SIGHUP"] * 2 + ["second SIGTERM", "first SIGTERM"]


def test_the_end_of_the_terminal_stops_also_services_that_reload(start: Start) -> None:
    master, slave = os.openpty()
    # A session's leader gets the first terminal that it opens.
    takes_terminal = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execvp(sys.argv[2], sys.argv[2:])"
    driver = start(("only", "reloads"), launcher=(sys.executable, "-c", takes_terminal, os.ttyname(slave)))
    os.close(slave)
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGHUP)
    wait_for_log(driver, ["only SIGHUP"])
    os.close(master)
    assert driver.wait() == 0
    assert driver.log == ["only SIGHUP", "only SIGTERM"]


def test_under_nohup_the_end_of_the_terminal_ends_nothing(start: Start) -> None:
    driver = start(("only", "obeys"), launcher=("nohup",))
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGHUP)
    child = driver.child("only")
    (driver.folder / "only").unlink()
    child.kill()
    driver.read_until("only is ready again after")
    assert "stopping" not in driver.lines
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_a_child_that_cannot_be_started_now_is_started_later_and_the_others_stay(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "program"

    def install() -> None:
        (tmp_path / "new").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tmp_path / "new").chmod(0o755)
        (tmp_path / "new").rename(program)

    install()
    driver = start(("first", "obeys"), ("second", "obeys"), program=str(program))
    driver.read_until("READY")
    first, second = driver.child("first"), driver.child("second")
    (driver.folder / "first").unlink()
    program.unlink()
    first.kill()
    driver.read_until("first could not be started (No such file or directory); starting it again")
    install()
    driver.read_until("first is ready again after")
    assert driver.child("second") == second
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_a_child_that_can_never_be_started_ends_everything(start: Start) -> None:
    driver = start(("only", "obeys"), program="/nowhere/program")
    assert driver.wait() == 1
    assert "only failed 3 times before it was ready: giving up" in driver.lines


def test_a_child_is_killed_also_where_the_command_before_it_is_not_there(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "stubborn"), grace_s=0.1, before_kill=("/nowhere/program",))
    driver.read_until("READY")
    second = driver.child("second")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert "second is killed without the command before it (No such file or directory)" in driver.lines
    assert driver.log[-1] == "first SIGTERM"
    assert_gone(second)


def test_restarts_go_on_for_ever_once_a_service_was_ready(start: Start) -> None:
    driver = start(("only", "obeys"))
    driver.read_until("READY")
    for delay in ("", " in 0.25 s", " in 0.5 s", " in 1 s"):
        child = driver.child("only")
        (driver.folder / "only").unlink()
        child.kill()
        assert driver.read_until("ended") == f"only ended (SIGKILL); starting it again{delay}"
        driver.read_until("ready again")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def end_with(driver: Driver, name: str, status: int) -> None:
    """Make a child end by itself."""
    (driver.folder / name).unlink()
    (driver.folder / "status.tmp").write_text(str(status))
    os.rename(driver.folder / "status.tmp", driver.folder / f"{name}.status")


@pytest.mark.parametrize("faulty", ["verifier", "drafter"])
def test_a_lost_context_ends_all_who_share_it_before_any_of_them_starts_again(start: Start, faulty: str) -> None:
    driver = start(
        ("drafter", "stubborn"), ("verifier", "stubborn"), ("gateway", "obeys"), shares_faults="drafter verifier"
    )
    driver.read_until("READY")
    gateway, other = driver.child("gateway"), {"drafter": "verifier", "verifier": "drafter"}[faulty]
    # An earlier child's leftovers there would pass for the next one's readiness.
    (driver.folder / other).unlink()
    end_with(driver, faulty, CONTEXT_LOST_STATUS)
    for _ in range(2):
        driver.read_until("is ready again after")
    said = [line for line in driver.lines if "starting it again" in line]
    assert sorted(said) == sorted(
        [
            f"{faulty} ended (status {CONTEXT_LOST_STATUS}: its GPU context is lost); starting it again",
            f"{other} was ended: it lost its GPU context together with {faulty}; starting it again",
        ]
    )
    starts = (driver.folder / "starts").read_text().splitlines()
    assert sorted(starts) == ["drafter beside gateway", "verifier beside gateway"]
    assert driver.log == [f"{other} SIGTERM"]
    assert driver.child("gateway") == gateway
    driver.process.send_signal(signal.SIGINT)
    driver.read_until("stopping")
    driver.process.send_signal(signal.SIGINT)
    assert driver.wait() == 0


def test_two_that_report_one_fault_end_once_each(start: Start) -> None:
    driver = start(("drafter", "obeys"), ("verifier", "obeys"), shares_faults="drafter verifier")
    driver.read_until("READY")
    os.kill(driver.process.pid, signal.SIGSTOP)
    first = [driver.child(name) for name in ("drafter", "verifier")]
    for name in ("drafter", "verifier"):
        end_with(driver, name, CONTEXT_LOST_STATUS)
    # Both have ended when the supervisor looks.
    while not all(process.status() == "zombie" for process in first):
        time.sleep(0.01)
    os.kill(driver.process.pid, signal.SIGCONT)
    for _ in range(2):
        driver.read_until("is ready again after")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert sum("starting it again" in line for line in driver.lines) == 2
    assert len((driver.folder / "starts").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("status", "shares_faults"),
    [(ASSERTION_STATUS, "drafter verifier"), (1, "drafter verifier"), (CONTEXT_LOST_STATUS, "")],
)
def test_any_other_end_is_of_one_process_alone(start: Start, status: int, shares_faults: str) -> None:
    driver = start(("drafter", "obeys"), ("verifier", "obeys"), shares_faults=shares_faults)
    driver.read_until("READY")
    verifier = driver.child("verifier")
    end_with(driver, "drafter", status)
    driver.read_until("drafter is ready again after")
    assert driver.child("verifier") == verifier
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert (driver.folder / "starts").read_text().splitlines() == ["drafter beside verifier"]


NOTICE = 'echo "$OF_SERVICE $(cat /proc/$1/status | grep ^State) $1" >>"$0/notices"'


def test_a_command_goes_before_a_kill(start: Start, tmp_path: Path) -> None:
    driver = start(("only", "stubborn"), before_kill=("/bin/sh", "-c", NOTICE, str(tmp_path)), grace_s=0.5, **QUICK)
    driver.read_until("READY")
    stopped = driver.child("only")
    (driver.folder / "only").unlink()
    stopped.suspend()
    driver.read_until("only is ready again after")
    assert (driver.folder / "notices").read_text() == f"only State:\tT (stopped) {stopped.pid}\n"
    second = driver.child("only")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    # It still lives: asleep, or about to sleep.
    (notice,) = (driver.folder / "notices").read_text().splitlines()[1:]
    assert notice in {f"only State:\t{state} {second.pid}" for state in ("S (sleeping)", "R (running)")}


def test_a_command_that_hangs_holds_a_kill_up_for_a_while_only(start: Start) -> None:
    driver = start(("only", "stubborn"), before_kill=("/bin/sh", "-c", "sleep 1000"), before_kill_s=0.5, grace_s=0.1)
    driver.read_until("READY")
    child = driver.child("only")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert_gone(child)


def test_heartbeats_missed_in_a_row_and_for_long_enough_mean_silence() -> None:
    heartbeats = Heartbeats(MAX_SILENCE_S)
    asked = [float(second) for second in range(20)]
    missed = [heartbeats.observe(False, at, at + 1.0) for at in asked[:6]]
    assert missed == [False, False, False, False, False, True]
    assert heartbeats.missing_since == 0.0
    # One answer, and it counts from the start.
    assert not heartbeats.observe(True, 6.0, 6.1)
    assert [heartbeats.observe(False, at, at + 1.0) for at in asked[7:13]] == missed


def test_a_supervisor_that_was_stopped_itself_takes_nobody_for_dead() -> None:
    heartbeats = Heartbeats(MAX_SILENCE_S)
    # Asked before the stop and noticed an hour later; then the child has time for a few questions.
    assert not heartbeats.observe(False, 0.0, 3600.0)
    assert not any(heartbeats.observe(False, 3600.0 + at, 3600.1 + at) for at in range(MIN_MISSED_HEARTBEATS - 2))
    assert not heartbeats.observe(True, 3605.0, 3605.1)


def seconds_until_killed(
    pulse: Pulse, last_turn: Callable[[float], float | None], *, is_stopped: bool = False
) -> tuple[float, str]:
    """Ask once a second, for at most a minute; return when the child is killed."""
    for second in range(60):
        if reason := pulse.judge(last_turn(second), is_stopped, float(second), second + 0.5):
            return float(second), reason
    return math.inf, ""


def test_a_loop_that_does_not_turn_is_given_as_long_as_its_service_allows() -> None:
    assert seconds_until_killed(Pulse(30.0), lambda _: 7.0) == (31.0, "did not turn its event loop for 30.5 s")
    # The loop turns now and then, however long a turn takes.
    assert seconds_until_killed(Pulse(30.0), lambda at: at // 20) == (math.inf, "")


@pytest.mark.parametrize(("is_stopped", "seconds"), [(False, 30.0), (True, 5.0)])
def test_silence_is_death_after_a_while_and_sooner_of_a_stopped_process(is_stopped: bool, seconds: float) -> None:
    pulse = Pulse(30.0)
    assert pulse.judge(1.0, False, -1.0, -0.5) == ""
    killed = seconds_until_killed(pulse, lambda _: None, is_stopped=is_stopped)
    assert killed == (seconds, f"did not answer for {seconds + 0.5} s")


def test_a_start_may_be_silent_for_as_long_as_it_likes_but_not_stopped() -> None:
    assert seconds_until_killed(Pulse(30.0), lambda _: None) == (math.inf, "")
    assert seconds_until_killed(Pulse(30.0), lambda _: None, is_stopped=True) == (5.0, "did not answer for 5.5 s")


def test_time_that_a_process_was_busy_does_not_count_when_it_is_stopped() -> None:
    pulse = Pulse(30.0)
    assert [pulse.judge(1.0, False, at, at + 0.5) for at in range(20)] == [""] * 20
    assert [bool(pulse.judge(None, True, at, at + 0.5)) for at in range(20, 26)] == [False] * 5 + [True]


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
    assert "second failed 3 times before it was ready: giving up" in driver.lines
    assert "second ended (status 7); starting it again" in driver.lines


def test_ready_without_an_optional_service_that_is_not(start: Start) -> None:
    driver = start(("drafter", "unready"), ("gateway", "obeys"), optional="drafter")
    driver.read_until("drafter is not ready yet; continuing without it")
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0


def test_a_long_start_is_spoken_of(start: Start) -> None:
    driver = start(
        ("first", "unready"), ("second", "unready"), ("drafter", "unready"), optional="drafter", slow_start_s=0.1
    )
    driver.read_until("waiting for first, second for long")
    (driver.folder / "first").touch()
    driver.read_until("first is ready after")
    (driver.folder / "second").touch()
    driver.read_until("READY")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert sum("for long" in line for line in driver.lines) == 1


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
    assert [delays.after(6.0), delays.after(1.0), delays.after(1.0)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "status 0"),
        (7, "status 7"),
        (CONTEXT_LOST_STATUS, f"status {CONTEXT_LOST_STATUS}: its GPU context is lost"),
        (-9, "SIGKILL"),
        (-200, "signal 200"),
    ],
)
def test_describe_status(status: int, text: str) -> None:
    assert describe_status(status) == text
