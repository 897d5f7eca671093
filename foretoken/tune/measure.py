"""Measure candidates on one running server: each request asks for its candidate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from foretoken.bench.load import Clients
from foretoken.bench.measures import figures_of
from foretoken.bench.sweep import Prompts
from foretoken.bench.target import BenchTarget
from foretoken.errors import ForetokenError
from foretoken.tune.candidates import Candidate

# Tokens of a warm-up's outputs.
WARM_UP_LEN = 16


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures at one number of requests at once.

    Round k has the same prompts for each candidate. Each request has a
    ``cache_salt`` of its own, so that none finds its prompt, or its text as a draft,
    because another candidate was there before.

    Args:
        batch: requests at once.
        round_size: requests of a round.
        on_round: called after each round with the candidate and its tokens a second.
    """

    target: BenchTarget
    prompts: Prompts
    clients: Clients
    batch: int
    round_size: int
    timeout_s: float
    seed: int
    on_round: Callable[[Candidate, float], None]

    def warm_up(self, candidate: Candidate) -> None:
        """Run a few short requests, so that later ones capture and learn nothing new."""
        self._drive(candidate, f"{self.seed} warm-up", self.batch, output_len=WARM_UP_LEN)

    def rate(self, candidate: Candidate, number: int) -> float:
        """Run round ``number`` of a candidate; return its output tokens a second."""
        figures = self._drive(candidate, f"{self.seed} {self.batch} {number}", self.round_size)
        rate: float = figures["tokens_per_s"]
        self.on_round(candidate, rate)
        return rate

    def _drive(self, candidate: Candidate, seed: str, count: int, **options: Any) -> dict[str, Any]:
        extra = {"speculative": candidate.speculative}
        target = replace(self.target, options=replace(self.target.options, salted=True, extra=extra, **options))
        streams = [target.stream(prompt) for prompt in islice(self.prompts(seed), count)]
        load = self.clients.drive(target.address, streams, self.timeout_s, self.batch)
        if load.failures:
            raise ForetokenError(f"{candidate.name}, {self.batch} at once: a request failed: {load.failures[0]}")
        return figures_of(load.answers)
