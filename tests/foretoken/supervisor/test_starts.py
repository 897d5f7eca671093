"""When a supervisor is ready, and which children's failed starts end everything."""

from __future__ import annotations

import signal

from tests.foretoken.supervisor.conftest import Start


def test_a_child_that_can_never_be_started_ends_everything(start: Start) -> None:
    driver = start(("only", "obeys"), program="/nowhere/program")
    assert driver.wait() == 1
    assert "only failed 3 times before it was ready: giving up" in driver.lines


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
    driver.read_until("still waiting for first, second after 0 s")
    (driver.folder / "first").touch()
    driver.read_until("first is ready after")
    driver.read_until("still waiting for second after")
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
