"""The comparison with guidellm: its server's answers, and how pairs are judged."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from benchmarks.guidellm import to_markdown
from benchmarks.paced_server import Pace, run
from foretoken.bench.client import CHAT, Address, get
from foretoken.bench.completion import StreamError
from foretoken.bench.load import running_clients
from foretoken.bench.stream import UserStream
from foretoken.free_ports import free_ports


@pytest.fixture
def address() -> Iterator[Address]:
    """Start a paced server that does not wait, with 4 tokens in a chunk; yield its address."""
    (port,) = free_ports(1)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await run(port, Pace(0.0, 0.0, 4))

    task = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    found = Address("127.0.0.1", port)
    while not is_there(found):
        assert thread.is_alive()
    yield found
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def is_there(address: Address) -> bool:
    try:
        return get(address, "/health")[0] == 200
    except StreamError:
        return False


def test_a_paced_answer_has_the_wanted_tokens_in_larger_chunks(address: Address) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 10, "stream": True}
    with running_clients(1) as clients:
        (answer,) = clients.run(address, [UserStream((body,), path=CHAT)]).answers
    # 1, 4, 4 and 1 tokens.
    assert (answer.num_tokens, len(answer.gaps)) == (10, 3)


def test_the_median_of_the_pairs_is_judged() -> None:
    pairs = [({"a": 100.0, "b": 50.0}, {"a": 100.0, "b": 48.0}), ({"a": 104.0, "b": 52.0}, {"a": 103.0, "b": 50.0})]
    pairs.append(({"a": 120.0, "b": 60.0}, {"a": 100.0, "b": 50.0}))
    table, off = to_markdown(pairs)
    assert off == ["b"]
    assert "| a | 104.00 | 100.00 | 1.010 (1.000 to 1.200) |" in table
