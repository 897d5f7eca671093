"""Clients that ask without a pause, and compare each answer with what was answered undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.chaos.load import Judge, Load, Tally, ask_each
from tests.chaos.requests import Material, Request, draw_requests
from tests.chaos.stack import MODEL

SEED = 1
NUM_CLIENTS = 6


def draw(count: int, *, with_grpc: bool) -> list[Request]:
    """Return requests of all kinds that name no drafter: the drafters change.

    ``with_grpc``: with requests that Ray Serve's proxy does not bring.
    """
    requests = draw_requests(count, SEED, Material.load(MODEL, SEED))
    return [request for request in requests if (with_grpc or request.api != "grpc") and not _names_drafter(request)]


def _names_drafter(request: Request) -> bool:
    return "drafter" in request.body.get("speculation" if request.api == "grpc" else "speculative", {})


class Pressure:
    """A load on one server, whose answers are compared with its own of before."""

    def __init__(self, url: str, grpc_address: str, requests: list[Request], judge: Judge) -> None:
        self._url = url
        self._grpc_address = grpc_address
        self._requests = requests
        self._judge = judge

    @classmethod
    async def prepare(cls, url: str, grpc_address: str, requests: list[Request]) -> Pressure:
        """Ask each request once, undisturbed."""
        records = await ask_each(url, grpc_address, requests, NUM_CLIENTS)
        wrong = [
            (record.request, record.outcome, record.error, record.answer.violations)
            for record in records.values()
            if record.outcome != "done" or record.answer.violations
        ]
        assert not wrong, "\n".join(map(str, wrong[:3]))
        expected = {number: record.answer for number, record in records.items()}
        # No gateway dies, so no broken connection is excused.
        return cls(url, grpc_address, requests, Judge(expected, SEED, lambda began, ended: False))

    @property
    def tally(self) -> Tally:
        return self._judge.tally

    @contextlib.asynccontextmanager
    async def by(self, num_clients: int) -> AsyncIterator[None]:
        """Keep so many clients busy during the block; each ends its last request."""
        may_send, stop = asyncio.Event(), asyncio.Event()
        may_send.set()
        load = Load(self._url, self._grpc_address, self._requests, self._judge, SEED, may_send)
        task = asyncio.create_task(load.run(num_clients, stop))
        try:
            yield
        finally:
            stop.set()
            await task

    def check(self) -> None:
        """Assert that no token was changed or lost and no client got an error."""
        print(f"{self.tally.total('done')} answers, {self.tally.num_tokens_compared} tokens compared")
        assert not self.tally.failures, "\n".join(self.tally.failures[:5])
        assert self.tally.total("done") > 0
        assert self.tally.num_tokens_compared > 0
