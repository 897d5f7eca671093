"""Requests of a burst begin in turns of the event loop of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from gateway.fields import parse_body
from gateway.turns import LoopTurns
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import steps
from tests.support.tcp_clients import raw_post

pytestmark = pytest.mark.anyio
BURST = 20


class Ticks:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


@contextlib.contextmanager
def ticking() -> Iterator[Ticks]:
    ticks = Ticks()
    try:
        yield ticks
    finally:
        ticks.stop()


async def test_one_task_goes_on_in_each_turn_first_come_first_served() -> None:
    turns, order = LoopTurns(), []

    async def begin(number: int) -> None:
        await turns.take()
        order.append((number, ticks.count))

    with ticking() as ticks:
        await asyncio.gather(*(begin(number) for number in range(BURST)))
    assert [number for number, _ in order] == list(range(BURST))
    assert all(later > earlier for (_, earlier), (_, later) in pairwise(order))


async def test_a_lone_task_does_not_wait() -> None:
    turns = LoopTurns()
    for _ in range(3):
        with ticking() as ticks:
            await turns.take()
            assert ticks.count == 0
        # The next turn is free again.
        await asyncio.sleep(0)


async def test_one_that_gives_up_holds_up_nobody() -> None:
    turns = LoopTurns()
    tasks = [asyncio.create_task(turns.take()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, True, False]
    await asyncio.wait_for(turns.take(), 5)


async def test_bodies_of_a_burst_are_parsed_in_turns_of_their_own(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.verifier.script = steps([65])
    parsed = []

    async def noted(body: bytes, **options: Any) -> dict[str, Any]:
        parsed.append(ticks.count)
        return await parse_body(body, **options)

    monkeypatch.setattr("gateway.http.parse_body", noted)
    async with contextlib.AsyncExitStack() as opened:
        connections = [await asyncio.open_connection("127.0.0.1", stack.settings.port) for _ in range(BURST)]
        for _, writer in connections:
            opened.callback(writer.close)
        with ticking() as ticks:
            for _, writer in connections:
                writer.write(raw_post("/v1/completions", b'{"prompt": "a"}'))
            heads = [await reader.readline() for reader, _ in connections]
    assert all(b" 200 " in head for head in heads)
    assert len(parsed) == BURST == len(set(parsed))
