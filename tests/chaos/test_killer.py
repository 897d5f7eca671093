"""Which failures a gateway's death excuses, and how blows are distinguished."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.chaos.killer import OUTAGE_GRACE_S, Blow, Killer
from tests.chaos.schedule import Strike
from tests.chaos.watcher import Watcher

DEATH = Blow(Strike("gateway", "kill", 0.0), at=10.0, ended_at=10.1, replaced_at=10.2, over_at=13.0)


@pytest.mark.parametrize(
    ("sent_at", "ended_at", "excused"),
    [
        (1.0, 9.9, False),
        (1.0, 10.0, True),
        # A slow reader, which finds out late.
        (1.0, 20.0, True),
        (11.0, 11.1, True),
        (13.0 + OUTAGE_GRACE_S, 14.1, True),
        (13.1 + OUTAGE_GRACE_S, 14.5, False),
    ],
)
def test_a_gateways_death_excuses_the_connections_that_it_cut(sent_at: float, ended_at: float, excused: bool) -> None:
    killer = Killer(cast(Any, None), Watcher("unix:/none"), [], 60.0)
    killer.blows.append(DEATH)
    assert killer.excuses(sent_at, ended_at) == excused


@pytest.mark.parametrize(
    "strike",
    [Strike("gateway", "pause", 0.0), Strike("verifier", "kill", 0.0), Strike("drafter", "stop", 0.0)],
)
def test_nothing_else_excuses(strike: Strike) -> None:
    killer = Killer(cast(Any, None), Watcher("unix:/none"), [], 60.0)
    killer.blows.append(Blow(strike, at=10.0, over_at=13.0))
    assert not killer.excuses(1.0, 20.0)


def test_only_a_stopped_verifier_dies_later_than_its_signal() -> None:
    times = {"at": 10.0, "ended_at": 16.0}
    assert Blow(Strike("verifier", "stop", 0.0), **times).died_at == 16.0
    assert Blow(Strike("verifier", "kill", 0.0), **times).died_at == 10.0
    assert Blow(Strike("drafter", "stop", 0.0), **times).died_at == 10.0
