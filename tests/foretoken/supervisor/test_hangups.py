"""SIGHUP to a supervisor: a reload, or the end of its terminal."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.foretoken.supervisor.conftest import Driver, Start


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
