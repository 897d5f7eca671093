"""Children that share a GPU lose their contexts together; any other end is one child's alone."""

from __future__ import annotations

import os
import signal
import time

import pytest

from foretoken.lost_context import ASSERTION_STATUS, CONTEXT_LOST_STATUS
from tests.foretoken.supervisor.conftest import Start, end_with


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
