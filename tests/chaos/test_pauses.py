"""Waits after deaths, from made-up arrivals."""

from __future__ import annotations

from tests.chaos.killer import Blow
from tests.chaos.load import Timeline
from tests.chaos.pauses import Waits, after_deaths, between_tokens
from tests.chaos.schedule import Action, Process, Strike


def line(*ticks: float) -> Timeline:
    return Timeline(ticks[0] - 1, ticks[-1] + 1, {0: ticks})


def blow(process: Process, action: Action, at: float, **times: float) -> Blow:
    return Blow(Strike(process, action, 0.0), at, **times)


def test_gaps_are_of_one_output_each() -> None:
    timeline = Timeline(0.0, 9.0, {0: (1.0, 2.0, 5.0), 1: (1.5, 1.75)})
    assert between_tokens([timeline]) == Waits(3, 1.0, 3.0)
    assert between_tokens([]) == Waits(0, 0.0, 0.0)


def test_only_outputs_in_flight_count() -> None:
    lines = [line(1.0, 3.0, 8.0), line(2.0, 7.0), line(4.5, 5.0), line(1.0, 2.0, 3.5)]
    waits = after_deaths(lines, [blow("verifier", "kill", 4.0)], "verifier")
    assert waits == Waits(2, 3.5, 4.0)


def test_a_stopped_verifier_is_dead_when_it_is_found_out() -> None:
    deaths = [blow("verifier", "stop", 2.0, ended_at=8.0)]
    assert after_deaths([line(1.0, 1.9, 11.0)], deaths, "verifier") == Waits(1, 3.0, 3.0)
    assert after_deaths([line(1.0, 1.9, 11.0)], deaths, "verifier", since_signal=True) == Waits(1, 9.0, 9.0)
    # A stream that began during the silence was not in flight.
    assert after_deaths([line(3.0, 11.0)], deaths, "verifier").count == 0


def test_pauses_are_no_deaths() -> None:
    assert after_deaths([line(1.0, 9.0)], [blow("verifier", "pause", 2.0, over_at=4.0)], "verifier").count == 0


def test_a_wait_for_the_verifier_says_nothing_of_the_drafter() -> None:
    deaths = [blow("drafter", "kill", 5.0), blow("verifier", "kill", 2.0, over_at=7.0)]
    assert after_deaths([line(1.0, 9.0)], deaths, "drafter").count == 0
    assert after_deaths([line(1.0, 9.0)], deaths, "verifier") == Waits(1, 7.0, 7.0)
    deaths[1] = blow("verifier", "kill", 2.0, over_at=4.0)
    assert after_deaths([line(1.0, 4.5, 5.5)], deaths, "drafter") == Waits(1, 0.5, 0.5)


def test_tokens_that_were_on_their_way_end_no_silence() -> None:
    deaths = [blow("verifier", "kill", 2.0, over_at=9.0)]
    assert after_deaths([line(1.0, 2.03, 2.25, 9.25, 9.3)], deaths, "verifier") == Waits(1, 7.0, 7.0)
    # A later silence does not belong to this death.
    assert after_deaths([line(1.0, 2.25, 2.75, 9.25)], deaths, "verifier") == Waits(1, 0.5, 0.5)


def test_an_output_that_brought_nothing_more_says_nothing() -> None:
    assert after_deaths([line(1.0, 1.5)], [blow("verifier", "kill", 2.0)], "verifier").count == 0
