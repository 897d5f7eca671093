"""A supervisor starts a child that ended again, and the others stay."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from foretoken.lost_context import CONTEXT_LOST_STATUS
from foretoken.supervisor import RestartDelays, describe_status
from tests.foretoken.supervisor.conftest import Start


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
