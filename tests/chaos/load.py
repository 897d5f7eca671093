"""Clients send a pool's requests over and over; every answer is compared as soon as it is there."""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.answer import Answer, Difference, differences, prefix_differences
from tests.chaos.client import PATIENCE_S, POLITE, Client, Manner, Record
from tests.chaos.requests import Request

DROP_SHARE = 0.1
LATEST_DROP_S = 3.0
SLOW_SHARE = 0.1
SLOWEST_S = 0.2
REST_AFTER_FAILURE_S = 1.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A polite client's arrivals, choice by choice. Times are time.monotonic()."""

    sent_at: float
    ended_at: float
    ticks: dict[int, tuple[float, ...]]


@dataclass(slots=True)
class Tally:
    """The outcomes of all requests. ``by_kind``: kind of request -> outcome -> count."""

    by_kind: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    num_tokens_compared: int = 0
    num_server_errors: int = 0
    failures: list[str] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    def total(self, outcome: str) -> int:
        """Return the number of requests of all kinds with that outcome."""
        return sum(counts[outcome] for counts in self.by_kind.values())


class Judge:
    """Compares records with the undisturbed answers, by request number."""

    def __init__(
        self,
        expected: Mapping[int, Answer],
        seed: int,
        excuses: Callable[[float, float], bool],
        device: str = "cpu",
    ) -> None:
        """Make a judge.

        ``seed``: the requests' seed. ``excuses``: whether a gateway's death may have broken a
        connection used between two times. ``device``: where the models run, for the line that
        says how to replay a request.
        """
        self._device = device
        self._expected = expected
        self._seed = seed
        self._excuses = excuses
        self.tally = Tally()

    def judge(self, record: Record) -> bool:
        """Note the record's faults; return whether the request must be sent again."""
        tally, expected = self.tally, self._expected[record.request.number]
        counts = tally.by_kind[record.request.kind]
        if record.status is not None and record.status >= 500:
            tally.num_server_errors += 1
        if record.outcome == "broken" and self._excuses(record.sent_at, record.ended_at):
            counts["sent again"] += 1
            self._complain(record, prefix_differences(expected, record.answer))
            return True
        if record.outcome in ("broken", "failed"):
            counts["failed"] += 1
            tally.failures.append(f"{_title(record)}: {record.error}\n{self._replay(record)}")
            return False
        counts[record.outcome] += 1
        if record.outcome == "dropped":
            self._complain(record, prefix_differences(expected, record.answer))
            return False
        self._complain(record, differences(expected, record.answer))
        tally.num_tokens_compared += record.answer.num_tokens
        if record.ticks and not record.manner.slow_s:
            tally.timelines.append(_timeline(record))
        return False

    def _complain(self, record: Record, found: Sequence[Difference]) -> None:
        if found:
            self.tally.by_kind[record.request.kind]["differing"] += 1
            lines = [
                f"{_title(record)}: {len(found)} differences",
                *(f"  {item}" for item in found[:4]),
                self._replay(record),
            ]
            self.tally.failures.append("\n".join(lines))

    def _replay(self, record: Record) -> str:
        body = json.dumps(record.request.body, ensure_ascii=False)
        return (
            f"  replay with --device {self._device} --seed {self._seed} --only {record.request.number}; it was {body}"
        )


class Load:
    """Several clients that draw from one queue of requests until they are stopped."""

    def __init__(
        self,
        url: str,
        grpc_address: str,
        requests: Sequence[Request],
        judge: Judge,
        seed: int,
        may_send: asyncio.Event,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Make clients; ``may_send`` is unset while there is no gateway to send to."""
        self._url, self._grpc_address, self._patience_s = url, grpc_address, patience_s
        self._judge = judge
        self._may_send = may_send
        self._row = _endless(requests, random.Random(f"load {seed}"))

    async def run(self, num_clients: int, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set and every begun request has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._work(stop))

    async def _work(self, stop: asyncio.Event) -> None:
        client = Client(self._url, self._grpc_address, self._patience_s)
        try:
            while not stop.is_set():
                request, manner = next(self._row)
                while True:
                    await self._may_send.wait()
                    record = await client.send(request, manner)
                    if not self._judge.judge(record):
                        break
                if record.outcome in ("broken", "failed"):
                    # The run has failed; refusals must not hide its other findings.
                    await asyncio.sleep(REST_AFTER_FAILURE_S)
        finally:
            await client.close()


async def ask_each(url: str, grpc_address: str, requests: Sequence[Request], num_clients: int) -> dict[int, Record]:
    """Send each request once, undisturbed, ``num_clients`` at a time; return records by number."""
    waiting = list(reversed(requests))
    records: dict[int, Record] = {}

    async def work() -> None:
        client = Client(url, grpc_address)
        try:
            while waiting:
                request = waiting.pop()
                records[request.number] = await client.send(request, POLITE)
        finally:
            await client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(work())
    return records


def _endless(requests: Sequence[Request], generator: random.Random) -> Iterator[tuple[Request, Manner]]:
    """Yield all requests in a random order, then all in another order, and so on."""
    while True:
        for request in generator.sample(requests, len(requests)):
            yield request, _manner(request, generator)


def _manner(request: Request, generator: random.Random) -> Manner:
    draw = generator.random()
    if draw < DROP_SHARE:
        return Manner(drop_after_s=generator.uniform(0.001, LATEST_DROP_S))
    if draw < DROP_SHARE + SLOW_SHARE and request.stream:
        return Manner(slow_s=generator.uniform(0.02, SLOWEST_S))
    return POLITE


def _timeline(record: Record) -> Timeline:
    ticks: dict[int, list[float]] = collections.defaultdict(list)
    for at, index in record.ticks:
        ticks[index].append(at)
    return Timeline(record.sent_at, record.ended_at, {index: tuple(times) for index, times in ticks.items()})


def _title(record: Record) -> str:
    return f"request {record.request.number} ({record.request.kind})"
