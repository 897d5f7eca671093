"""A supervisor kills children that are stopped or hang, and leaves busy ones alone."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

import pytest

from foretoken.pulse import MAX_SILENCE_S, MIN_MISSED_HEARTBEATS, Heartbeats, Pulse
from tests.foretoken.supervisor.conftest import QUICK, Start, assert_gone


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
    """A child that is ``busy`` does not answer, as while a call holds the GIL; a ``stuck`` one does."""
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
