"""Make all measurements: each load, at one server or at two in turn."""

from __future__ import annotations

import collections
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.bench.bottleneck import client_figures, limits
from foretoken.bench.load import Clients, CompletedRequest, LoadResult, OnProgress
from foretoken.bench.measures import Bounds, figures_of
from foretoken.bench.prompts import LoadPrompt
from foretoken.bench.speculation import WatchedServer, from_answers
from foretoken.bench.stream import UserStream
from foretoken.bench.target import BenchTarget

# Prompts of a measurement whose number is not given.
LEAST_PROMPTS, PROMPTS_A_STREAM, SECONDS = 32, 4, 20.0
# Prompts for each request at once that a client holds at first when only the duration is given.
AHEAD = 4
# Streams that one client process serves before another one is started.
STREAMS_A_CLIENT, RATE_A_CLIENT = 32, 20.0

Row = dict[str, Any]
# From a seed to prompts without end; equal seeds give equal prompts.
Prompts = Callable[[str], Iterator[LoadPrompt]]
# Called with a load's name, ended and all requests; 0: nobody knows how many there will be.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One load: ``concurrency`` requests at once, or ``rate`` arrivals a second."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s" if self.rate else str(self.concurrency)

    def num_prompts(self, wanted: int) -> int:
        """Return how many prompts to send; ``wanted`` 0: enough for a rate."""
        auto = round(self.rate * SECONDS) if self.rate else PROMPTS_A_STREAM * self.concurrency
        return wanted or max(LEAST_PROMPTS, auto)

    def num_clients(self) -> int:
        """Return how many client processes this load needs."""
        load = self.rate / RATE_A_CLIENT if self.rate else self.concurrency / STREAMS_A_CLIENT
        return max(1, math.ceil(load))

    def arrivals(self, seed: str) -> Iterator[float]:
        """Yield when each request is due, in seconds, without end.

        Requests are due at once, or at random times (Poisson).
        """
        if not self.rate:
            yield from itertools.repeat(0.0)
        generator = random.Random(f"arrivals {self.name} {seed}")
        at = 0.0
        while True:
            yield at
            at += generator.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All loads, and what every measurement has in common.

    ``num_prompts`` 0: the number is not given. ``duration_s`` inf: there is no limit.
    """

    targets: Sequence[BenchTarget]
    points: Sequence[SweepPoint]
    prompts: Prompts
    clients: Clients
    rounds: int = 1
    num_prompts: int = 0
    duration_s: float = math.inf
    timeout_s: float = 300.0
    seed: int = 0
    bounds: Bounds | None = None

    def warm_up(self, count: int) -> list[str]:
        """Send ``count`` requests to each server, not measured; return why some failed."""
        failures = []
        for target in self.targets:
            prompts = self.prompts(f"{self.seed} warm-up {target.name}")
            streams = [target.stream(next(prompts)) for _ in range(count)]
            if streams:
                failures += self.clients.drive(target.address, streams, self.timeout_s, 1).failures
        return failures

    def rows(self, report: Report) -> Iterator[Row]:
        """Yield a row for each point, round and server. The server that comes first alternates."""
        for point in self.points:
            for number in range(self.rounds):
                turns = self.targets if number % 2 == 0 else tuple(reversed(self.targets))
                # The same prompts for both servers, others in each round.
                seed = f"{self.seed} {point.name} {number}"
                rows = {target.name: self._measure(target, point, seed, report) for target in turns}
                yield from ({**rows[target.name], "round": number} for target in self.targets)

    def _measure(self, target: BenchTarget, point: SweepPoint, seed: str, report: Report) -> Row:
        streams, more = self._streams(target, point, seed)
        total = 0 if more is not None else sum(len(stream.bodies) for stream in streams)
        watched = WatchedServer(target.address)
        load = self.clients.drive(
            target.address,
            streams,
            self.timeout_s,
            point.concurrency,
            _progress(report, f"{target.name}, {point.name}", total),
            duration_s=self.duration_s,
            more=more,
        )
        return self._row(target, point, load, watched)

    def _streams(
        self, target: BenchTarget, point: SweepPoint, seed: str
    ) -> tuple[list[UserStream], Iterator[UserStream] | None]:
        """Return a measurement's streams, and what follows them if their number is not known."""
        starts = itertools.takewhile(lambda at: at < self.duration_s, point.arrivals(seed))
        streams = (target.stream(prompt, at) for at, prompt in zip(starts, self.prompts(seed), strict=False))
        if self.num_prompts or math.isinf(self.duration_s):
            return list(itertools.islice(streams, point.num_prompts(self.num_prompts))), None
        if point.rate:
            return list(streams), None
        return list(itertools.islice(streams, AHEAD * point.concurrency)), streams

    def _row(self, target: BenchTarget, point: SweepPoint, load: LoadResult, watched: WatchedServer) -> Row:
        speculation = watched.speculation(load.answers) if load.answers else None
        return {
            "server": target.name,
            "load": point.name,
            "concurrency": point.concurrency,
            "request_rate": point.rate,
            "num_sent": len(load.answers) + len(load.failures),
            "num_failed": len(load.failures),
            "failures": dict(collections.Counter(load.failures)),
            **(figures_of(load.answers, self.bounds or Bounds()) if load.answers else {}),
            "has_bounds": self.bounds is not None,
            "speculation": None if speculation is None else asdict(speculation),
            "categories": categories(load.answers),
            **client_figures(load),
            "client_limits": limits(load),
            "num_clients": self.clients.count,
        }


def categories(answers: Sequence[CompletedRequest]) -> dict[str, Row]:
    """Return a few figures of each category; none if the prompts have no categories."""
    groups: dict[str, list[CompletedRequest]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    if set(groups) <= {""}:
        return {}
    found = {}
    for name, members in sorted(groups.items()):
        figures, speculation = figures_of(members), from_answers(members)
        kept = ("num_requests", "num_tokens", "ttft_p50_ms", "tpot_p50_ms")
        found[name or "none"] = {key: figures[key] for key in kept} | {
            "tokens_per_step": None if speculation is None else speculation.tokens_per_step
        }
    return found


def _progress(report: Report, name: str, total: int) -> OnProgress:
    return lambda ended: report(name, ended, total)
