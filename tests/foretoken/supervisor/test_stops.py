"""The order in which a supervisor stops its children, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.foretoken.supervisor.conftest import Start, assert_gone, end_with


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


def test_a_stop_signal_works_without_a_terminal(start: Start) -> None:
    """SIGHUP says that the terminal is gone, so nobody can read the announcement."""
    driver = start(("only", "obeys"))
    driver.read_until("READY")
    assert driver.process.stdout is not None
    driver.process.stdout.close()
    driver.process.send_signal(signal.SIGHUP)
    driver.process.wait()
    assert driver.log == ["only SIGTERM"]


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
