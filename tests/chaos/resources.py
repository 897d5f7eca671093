"""Memory, descriptors and threads of the stack's processes, and how much growth is a leak."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx
import psutil

from tests.chaos.schedule import DRAFTERS, Process
from tests.chaos.stack import Stack
from tests.chaos.watcher import Sample, Watcher

PROCESSES: tuple[Process, ...] = ("supervisor", "gateway", "verifier", *DRAFTERS)
# An idle gateway keeps a connection for each verifier and scraper. Its pools' threads stay.
MORE_DESCRIPTORS = {"gateway": 4, "supervisor": 2}
# gRPC adds a thread to its pool if all are busy, and removes it only after 20 idle seconds, which a
# question a second may prevent. A leaked thread for each death would be more than these.
MORE_THREADS = {"gateway": 4, "supervisor": 4}
# The gateway keeps nothing of an ended request. It has answered the whole pool before the first
# measurement; it may only add fragmentation, and buffers of slow readers.
MORE_GATEWAY_BYTES = 64 << 20
IDLE_WITHIN_S = 60.0
# Idle HTTP connections are closed after 5 s.
SETTLED_WITHIN_S = 20.0
POLL_S = 0.25
REQUESTS_GAUGE = "foretoken_gateway_num_requests"


@dataclass(frozen=True, slots=True)
class Holding:
    """The resources that one process holds."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int


async def idle_sample(stack: Stack, watcher: Watcher) -> tuple[Sample | None, float]:
    """Return the verifier's figures and the gateway's requests when idle, or when time is up."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        while True:
            sample, num_requests = await watcher.next_sample(), await _num_requests(client, stack)
            if (sample is not None and sample.is_idle and num_requests == 0) or time.monotonic() > deadline:
                return sample, num_requests


def holdings(stack: Stack) -> dict[Process, Holding]:
    """Return the holdings of every process of the stack now."""
    found = {}
    for name in PROCESSES:
        process = stack.find(name)
        with process.oneshot():
            found[name] = Holding(process.memory_info().rss, process.num_fds(), process.num_threads())
    return found


async def settled_holdings(stack: Stack, before: dict[Process, Holding]) -> tuple[dict[Process, Holding], list[str]]:
    """Return holdings and leaks once nothing leaks any more, or when the time is up."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while True:
        try:
            now = holdings(stack)
        except psutil.NoSuchProcess as error:
            return {}, [f"a process is missing: {error}"]
        found = leaks(before, now)
        if not found or time.monotonic() > deadline:
            return now, found
        await asyncio.sleep(POLL_S)


def leaks(before: dict[Process, Holding], now: dict[Process, Holding]) -> list[str]:
    """Return gateway's and supervisor's excess holdings; other processes are new after a death."""
    found = []
    for name, more in MORE_DESCRIPTORS.items():
        old, new = before[name], now[name]  # type: ignore[index]
        if new.num_descriptors > old.num_descriptors + more:
            found.append(f"{name}: {new.num_descriptors} descriptors, {old.num_descriptors} before")
        if new.num_threads > old.num_threads + MORE_THREADS[name]:
            found.append(f"{name}: {new.num_threads} threads, {old.num_threads} before")
    if now["gateway"].rss_bytes > before["gateway"].rss_bytes + MORE_GATEWAY_BYTES:
        sizes = f"{now['gateway'].rss_bytes >> 20} MiB, {before['gateway'].rss_bytes >> 20} before"
        found.append(f"gateway: {sizes}")
    return found


async def _num_requests(client: httpx.AsyncClient, stack: Stack) -> float:
    """Return the gateway's own gauge; -1 if it does not answer."""
    try:
        response = await client.get(f"{stack.url}/metrics")
    except httpx.TransportError:
        return -1.0
    lines = [line for line in response.text.splitlines() if line.startswith(REQUESTS_GAUGE)]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else -1.0
