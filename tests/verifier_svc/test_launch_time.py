"""How long the host lets a step run before it launches the next one."""

from __future__ import annotations

import pytest

from verifier_svc.overlap.launch_time import LaunchTime


def seen(steps: list[float], launches: list[float]) -> LaunchTime:
    launch_time = LaunchTime()
    for seconds in steps:
        launch_time.observe_step(seconds)
    for seconds in launches:
        launch_time.observe_launch(seconds)
    return launch_time


def test_nothing_is_let_pass_until_enough_steps_were_seen() -> None:
    assert seen([0.01] * 7, [0.001] * 7).wait_s(0.01) == 0.0
    assert seen([0.01] * 8, [0.001] * 8).wait_s(0.01) == pytest.approx(0.007)


def test_the_shortest_of_the_latest_steps_and_of_the_estimate_counts() -> None:
    launch_time = seen([0.001, 0.02, *[0.06] * 6, 0.03], [0.001] * 9)
    assert launch_time.wait_s(1.0) == pytest.approx(0.014)
    assert launch_time.wait_s(0.008) == pytest.approx(0.0056)
    assert launch_time.wait_s(0.0) == 0.0


def test_the_host_keeps_the_time_that_its_longest_launch_takes() -> None:
    assert seen([0.02] * 8, [0.5, *[0.002] * 6, 0.012, 0.002]).wait_s(0.02) == pytest.approx(0.002)
    assert seen([0.02] * 8, [0.014]).wait_s(0.02) == 0.0
