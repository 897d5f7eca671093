"""The schedule: in proportion to the time, the same for the same seed, and of all kinds."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.chaos.device import DEVICES, Device
from tests.chaos.schedule import draw_schedule, num_deaths


@pytest.mark.parametrize("seconds", [1, 10, 19, 20, 60, 300, 1800])
@pytest.mark.parametrize("seed", range(5))
def test_enough_die(seconds: float, seed: int) -> None:
    strikes = draw_schedule(seconds, seed)
    assert num_deaths(strikes, "verifier") >= max(1, seconds / 20)
    assert num_deaths(strikes, "drafter") >= max(1, seconds / 10)
    assert num_deaths(strikes, "head") >= max(1, seconds / 20)
    assert num_deaths(strikes, "gateway") >= max(1, seconds // 60)
    assert num_deaths(strikes, "supervisor") == 0
    assert all(0 <= strike.at_s <= seconds for strike in strikes)
    assert strikes == draw_schedule(seconds, seed) != draw_schedule(seconds, seed + 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_minute_has_all_kinds(seed: int) -> None:
    kinds = {(strike.process, strike.action, strike.chained_s is not None) for strike in draw_schedule(60, seed)}
    for process in ("verifier", "drafter", "head"):
        assert {
            (process, "kill", False),
            (process, "kill", True),
            (process, "stop", False),
            (process, "pause", False),
        } <= kinds
    assert {("gateway", "kill", False), ("gateway", "pause", False), ("supervisor", "pause", False)} <= kinds


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_device_says_how_often_its_processes_die(device: Device) -> None:
    strikes = draw_schedule(60, 1, device.seconds_per_death)
    plain = {
        process: sum(strike.is_death and strike.process == process and strike.chained_s is None for strike in strikes)
        for process in device.seconds_per_death
    }
    assert plain == {process: math.ceil(60 / seconds) for process, seconds in device.seconds_per_death.items()}


@pytest.mark.parametrize("seed", range(5))
def test_a_chained_strike_follows_a_death_of_its_process_at_once(seed: int) -> None:
    for process in ("verifier", "drafter", "head"):
        lane = [strike for strike in draw_schedule(300, seed) if strike.process == process]
        for previous, strike in itertools.pairwise(lane):
            if strike.chained_s is not None:
                assert previous.is_death and previous.at_s == strike.at_s
        assert lane[0].chained_s is None


@pytest.mark.parametrize("seed", range(5))
def test_no_pause_is_as_long_as_the_silence_that_means_death(seed: int) -> None:
    pauses = [strike for strike in draw_schedule(300, seed) if strike.action == "pause"]
    assert pauses and all(0.2 <= strike.pause_s <= 3.0 for strike in pauses)
