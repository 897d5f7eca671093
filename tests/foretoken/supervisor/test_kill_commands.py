"""A command that runs before a supervisor kills a child."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.foretoken.supervisor.conftest import QUICK, Start, assert_gone

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


def test_a_child_is_killed_also_where_the_command_before_it_is_not_there(start: Start) -> None:
    driver = start(("first", "obeys"), ("second", "stubborn"), grace_s=0.1, before_kill=("/nowhere/program",))
    driver.read_until("READY")
    second = driver.child("second")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert "second is killed without the command before it (No such file or directory)" in driver.lines
    assert driver.log[-1] == "first SIGTERM"
    assert_gone(second)
