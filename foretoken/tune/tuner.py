"""The course of a tuning.

Halving runs at each number of requests at once, then the winners are compared everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.bench.load import Clients
from foretoken.bench.sweep import Prompts
from foretoken.bench.target import BenchTarget
from foretoken.errors import ConfigError
from foretoken.tune.candidates import BASELINES, Candidate
from foretoken.tune.choice import best_of
from foretoken.tune.halving import Halving, Rung, TooFewRoundsError, plan_rungs
from foretoken.tune.measure import Meter
from foretoken.tune.settings import MAX_ROUNDS, TuneSettings

# Share of the rounds that compare the winners of all batches everywhere.
COMMON_SHARE = 0.2
# Between two lines of progress within a rung.
PROGRESS_S = 10.0

Say = Callable[[str], None]


@dataclass
class Findings:
    """What was measured until now.

    Attributes:
        rates: tokens a second of each round, by requests at once and candidate.
        num_rounds: all rounds.
        is_interrupted: whether the user ended it before its end.
    """

    rates: dict[int, dict[Candidate, list[float]]] = field(default_factory=dict)
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def num_rounds(self) -> int:
        return sum(len(rounds) for measured in self.rates.values() for rounds in measured.values())


class Tuner:
    """Measures candidates on one running server.

    Raises:
        ConfigError: there are too few rounds for so many candidates.
        ForetokenError: a request failed.
    """

    def __init__(
        self,
        settings: TuneSettings,
        candidates: Sequence[Candidate],
        target: BenchTarget,
        prompts: Prompts,
        clients: Clients,
        say: Say,
    ) -> None:
        self._settings, self._candidates = settings, candidates
        self._target, self._prompts, self._clients, self._say = target, prompts, clients, say
        self._rungs = plan_of(settings, candidates)
        self._said_at = time.monotonic()
        self.findings = Findings()

    @property
    def num_grid_rounds(self) -> int:
        """Rounds that the full grid takes."""
        return len(self._candidates) * self._settings.num_rounds * len(self._settings.batches)

    @property
    def num_planned_rounds(self) -> int:
        """Rounds that the search takes, without those that compare its winners."""
        return len(self._settings.batches) * sum(rung.num_candidates * rung.num_rounds for rung in self._rungs)

    def run(self) -> Findings:
        """Measure everything; an interrupt (Ctrl-C) ends it with what is known."""
        began = time.monotonic()
        try:
            halvings = {batch: self._halve(batch) for batch in self._settings.batches}
            self._compare(halvings)
        except KeyboardInterrupt:
            self.findings.is_interrupted = True
            # Where some were not measured yet, nothing can be compared.
            rates = self.findings.rates
            whole = {batch: found for batch, found in rates.items() if all(map(found.get, self._candidates))}
            self.findings.rates = whole or rates
        self.findings.seconds = time.monotonic() - began
        return self.findings

    def _halve(self, batch: int) -> Halving[Candidate]:
        settings = self._settings
        meter = Meter(
            self._target,
            self._prompts,
            self._clients,
            batch,
            settings.round_size(batch),
            settings.read_timeout_s,
            settings.seed,
            self._progress,
        )
        rates = self.findings.rates[batch] = {}
        halving = Halving(
            [candidate for candidate in self._candidates if candidate not in BASELINES],
            [candidate for candidate in self._candidates if candidate in BASELINES],
            lambda candidate: meter.rate(candidate, len(rates.get(candidate, ()))),
            rates,
        )
        self._say(f"{batch} at once: {len(self._candidates)} candidates, {_rungs_text(self._rungs)} rounds of each")
        for candidate in self._candidates:
            meter.warm_up(candidate)
        for number, rung in enumerate(halving.run(self._rungs), start=1):
            best = halving.best
            self._say(
                f"{batch} at once, rung {number} of {len(self._rungs)}: {rung.num_candidates} candidates measured, "
                f"{best.name} is best with {halving.rate(best):.0f} tok/s"
            )
        return halving

    def _compare(self, halvings: dict[int, Halving[Candidate]]) -> None:
        """Measure each winner at the other numbers of requests, where it was dropped early."""
        winners = dict.fromkeys(
            best_of({name: halving.rate(name) for name in halving.survivors}) for halving in halvings.values()
        )
        missing = {
            batch: [name for name in winners if name not in halving.survivors] for batch, halving in halvings.items()
        }
        count = sum(map(len, missing.values()))
        if not count:
            return
        budget = int(COMMON_SHARE * self._settings.budget * self.num_grid_rounds)
        rounds = min(max(1, budget // count), sum(rung.num_rounds for rung in self._rungs[1:]))
        for batch, names in missing.items():
            if names:
                self._say(f"{batch} at once: {rounds} more rounds of {', '.join(name.name for name in names)}")
                halvings[batch].add_rounds(names, rounds)

    def _progress(self, candidate: Candidate, rate: float) -> None:
        now = time.monotonic()
        if now - self._said_at > PROGRESS_S:
            self._said_at = now
            done, count = self.findings.num_rounds + 1, self.num_planned_rounds
            self._say(f"{done} of about {count} rounds done; {candidate.name}: {rate:.0f} tok/s")


def plan_of(settings: TuneSettings, candidates: Sequence[Candidate]) -> tuple[Rung, ...]:
    """Return the rungs of one number of requests at once.

    Raises ConfigError, with numbers that would do, if there are too few rounds.
    """
    count, rounds, budget = len(candidates), settings.num_rounds, settings.budget
    kept = sum(candidate in BASELINES for candidate in candidates)
    if budget == 1 or count == kept:
        return (Rung(count, rounds),)
    share = 1 - COMMON_SHARE if len(settings.batches) > 1 else 1.0

    def usable(num_rounds: int, budget: float) -> int:
        return int(share * budget * count * num_rounds)

    try:
        return plan_rungs(count - kept, kept, usable(rounds, budget))
    except TooFewRoundsError as error:
        least = error.least
    enough_rounds = next((n for n in range(rounds, MAX_ROUNDS + 1) if usable(n, budget) >= least), None)
    # Of the whole grid there is always enough.
    enough_budget = next((n / 100 for n in range(1, 100) if usable(rounds, n / 100) >= least), 1.0)
    would_do = f"--num-rounds {enough_rounds} or " if enough_rounds else ""
    raise ConfigError(
        f"--budget: needs at least {least} rounds for {count} candidates, and may use {usable(rounds, budget)}: "
        f"{would_do}--budget {enough_budget:g} would do, or try fewer --shapes"
    )


def _rungs_text(rungs: Sequence[Rung]) -> str:
    return " + ".join(str(rung.num_rounds) for rung in rungs)
