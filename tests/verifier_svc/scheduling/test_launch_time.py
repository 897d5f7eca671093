"""How long the host lets a step run before it launches the next one."""

from __future__ import annotations

import pytest

from verifier_svc.scheduling.launch_time import LaunchTime


def test_nothing_is_let_pass_until_enough_steps_were_seen() -> None:
    launch_time = LaunchTime()
    for _ in range(7):
        launch_time.observe(0.01)
        assert launch_time.wait_s(0.01) == 0.0
    launch_time.observe(0.01)
    assert launch_time.wait_s(0.01) == pytest.approx(0.005)


def test_the_shortest_of_the_latest_steps_and_of_the_estimate_counts() -> None:
    launch_time = LaunchTime()
    for seconds in (0.001, 0.02, *[0.06] * 6, 0.03):
        launch_time.observe(seconds)
    assert launch_time.wait_s(1.0) == pytest.approx(0.01)
    assert launch_time.wait_s(0.008) == pytest.approx(0.004)
    assert launch_time.wait_s(0.0) == 0.0
