"""Successive halving, on made-up candidates whose
measurements are noisy and whose machine slows down.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from foretoken.tune.halving import FINALISTS, Halving, Rung, TooFewRoundsError, plan_rungs

KEPT = ("plain", "auto")


class Machine:
    """Measures candidates of known speeds, with noise and drift. ``order``: what it measured."""

    def __init__(self, speeds: dict[str, float], *, noise: float = 0.0, drift: float = 0.0, seed: int = 0) -> None:
        self._speeds, self._noise, self._drift = speeds, noise, drift
        self._generator = random.Random(seed)
        self.order: list[str] = []

    def measure(self, name: str) -> float:
        self.order.append(name)
        drifted = self._speeds[name] * (1 - self._drift * len(self.order))
        return drifted * self._generator.lognormvariate(0.0, self._noise)


def speeds_of(count: int, seed: int) -> dict[str, float]:
    generator = random.Random(f"speeds {seed}")
    contenders = {f"s{number}": generator.uniform(50.0, 200.0) for number in range(count)}
    return {"plain": 80.0, "auto": 120.0} | contenders


def halve(machine: Machine, speeds: dict[str, float], budget: int) -> Halving[str]:
    contenders = [name for name in speeds if name not in KEPT]
    halving = Halving(contenders, KEPT, machine.measure)
    rungs = plan_rungs(len(contenders), len(KEPT), budget)
    assert list(halving.run(rungs)) == list(rungs)
    return halving


@pytest.mark.parametrize(
    ("num_contenders", "budget", "expected"),
    [
        (2, 20, (Rung(4, 5),)),
        (4, 40, (Rung(6, 3), Rung(4, 5))),
        (11, 62, (Rung(13, 1), Rung(8, 2), Rung(5, 3), Rung(4, 4))),
        # A round of each is all that there is.
        (11, 30, (Rung(13, 1), Rung(8, 1), Rung(5, 1), Rung(4, 1))),
        (1, 9, (Rung(3, 3),)),
    ],
)
def test_rungs_have_about_as_many_rounds_each(num_contenders: int, budget: int, expected: tuple[Rung, ...]) -> None:
    assert plan_rungs(num_contenders, 2, budget) == expected


@pytest.mark.parametrize("num_contenders", [1, 2, 3, 7, 11, 40])
@pytest.mark.parametrize("share", [0.15, 0.2, 0.5])
def test_the_budget_is_kept_and_used(num_contenders: int, share: float) -> None:
    budget = int(share * 24 * (num_contenders + 2))
    rungs = plan_rungs(num_contenders, 2, budget)
    used = sum(rung.num_candidates * rung.num_rounds for rung in rungs)
    assert budget - rungs[-1].num_candidates < used <= budget
    assert rungs[0].num_candidates == num_contenders + 2
    assert rungs[-1].num_candidates <= FINALISTS + 2
    rounds = [rung.num_rounds for rung in rungs]
    assert rounds == sorted(rounds)


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(TooFewRoundsError, match="needs at least 30 rounds"):
        plan_rungs(11, 2, 29)


def test_rounds_are_counted_and_no_candidate_is_measured_more_than_the_plan_says() -> None:
    speeds = speeds_of(11, 1)
    machine = Machine(speeds)
    halving = halve(machine, speeds, 62)
    assert halving.num_rounds == len(machine.order) == 13 + 16 + 15 + 16 <= 62
    # Without noise the order is the true one: each rung's losers are the slowest.
    ranking = sorted((name for name in speeds if name not in KEPT), key=speeds.__getitem__, reverse=True)
    lengths = [len(halving.rates[name]) for name in ranking]
    assert lengths == [10, 10, 6, 3, 3, 3, 1, 1, 1, 1, 1]
    assert halving.best == max(speeds, key=speeds.__getitem__)


def test_the_kept_are_never_dropped_however_slow() -> None:
    speeds = {"plain": 1.0, "auto": 2.0} | {f"s{number}": 100.0 + number for number in range(8)}
    halving = halve(Machine(speeds), speeds, 60)
    assert {*KEPT} < {*halving.survivors} and halving.best == "s7"
    assert len(halving.rates["plain"]) == len(halving.rates["s7"])


def test_candidates_take_turns_forwards_and_backwards() -> None:
    machine = Machine({"a": 1.0, "b": 1.0, "c": 1.0})
    Halving(["a", "b", "c"], [], machine.measure).add_rounds(["a", "b", "c"], 3)
    assert "".join(machine.order) == "abccbaabc"


def test_drift_drops_nobody() -> None:
    """The machine loses half of its speed; who is measured first must not win by that."""
    for place in range(8):
        speeds = {"plain": 50.0, "auto": 50.0} | {f"s{n}": 104.0 if n == place else 100.0 for n in range(8)}
        assert halve(Machine(speeds, drift=0.5 / 120), speeds, 120).best == f"s{place}"


def share_found(find: Callable[[int], float]) -> float:
    """Return in how many of 200 tries the candidate found is within 3% of the best."""
    return sum(find(seed) >= 0.97 for seed in range(200)) / 200


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_it_finds_a_setting_near_the_best_in_a_fifth_of_the_grids_rounds(noise: float) -> None:
    def by_halving(seed: int) -> float:
        speeds = speeds_of(11, seed)
        halving = halve(Machine(speeds, noise=noise, seed=seed), speeds, int(0.2 * 24 * len(speeds)))
        return speeds[halving.best] / max(speeds.values())

    assert share_found(by_halving) >= 0.97


def test_as_few_rounds_of_each_find_it_less_often() -> None:
    """What halving is for: with so much noise, the same
    number of rounds spread evenly does worse.
    """
    noise = 0.1

    def by_halving(seed: int) -> float:
        speeds = speeds_of(11, seed)
        halving = halve(Machine(speeds, noise=noise, seed=seed), speeds, 62)
        return speeds[halving.best] / max(speeds.values())

    def evenly(seed: int) -> float:
        speeds = speeds_of(11, seed)
        machine = Machine(speeds, noise=noise, seed=seed)
        rates = {name: median(machine.measure(name) for _ in range(62 // len(speeds))) for name in speeds}
        return speeds[max(rates, key=rates.__getitem__)] / max(speeds.values())

    assert share_found(by_halving) > share_found(evenly)
