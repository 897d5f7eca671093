"""``foretoken serve --executor ray`` on a cluster: a node dies
under load, and nothing is left at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from foretoken.free_ports import free_ports
from tests.chaos.stack import MODEL
from tests.ray_cluster.cluster import PATIENCE_S, RayCluster, ray_cluster
from tests.ray_cluster.load import NUM_CLIENTS, Pressure, draw

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    # Ray's own.
    pytest.mark.filterwarnings("ignore"),
]

STOP_TIMEOUT_S = 60.0
FLAGS = ["--threads", "1", "--speculative-algorithm", "NGRAM", "--drafter-placement", "in-process"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as cluster:
        yield cluster


async def test_streams_outlive_a_node_and_a_fresh_one_is_taken_in(cluster: RayCluster, tmp_path: Path) -> None:
    port, grpc_port, events, *free = free_ports(9)
    replay = next(port for port in free if abs(port - events) >= 3)
    command = [sys.executable, "-P", "-m", "foretoken", "serve", str(MODEL), *FLAGS, "--verifier-wait", "300"]
    command += ["--executor", "ray", "--num-verifiers", "3", "--ray-address", cluster.address]
    command += ["--port", str(port), "--grpc-port", str(grpc_port)]
    command += ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            before = await _until_up(port, 3)
            assert _actors() == {"target-verifier-0", "target-verifier-1", "target-verifier-2"}
            pressure = await Pressure.prepare(
                f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", draw(40, with_grpc=True)
            )
            async with pressure.by(NUM_CLIENTS):
                cluster.replace_node()
                after = await _until_up(port, 3, other_than=before)
                assert after & before, "the other nodes' verifiers went on"
                _kill_stack(min(after))
                assert min(after) not in await _until_up(port, 3, other_than=after)
            pressure.check()
            assert _topics(events, replay, 3) == [f"kv@target-verifier-{number}@target" for number in range(3)]
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, STOP_TIMEOUT_S) == 0, (tmp_path / "log").read_text()
            assert _actors() == set()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


async def _until_up(port: int, count: int, other_than: set[str] | None = None) -> set[str]:
    """Wait until so many verifiers are up, not all of them those of before.

    Return their addresses.
    """
    deadline = time.monotonic() + PATIENCE_S
    found: set[str] = set()
    async with httpx.AsyncClient(trust_env=False) as client:
        while len(found) != count or found == other_than:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.5)
            try:
                verifiers = (await client.get(f"http://127.0.0.1:{port}/ready")).json()["verifiers"]
            except httpx.TransportError:
                continue
            found = {verifier["address"] for verifier in verifiers if verifier["up"]}
    return found


def _topics(events: int, replay: int, count: int) -> list[str]:
    """Return the topics that verifiers publish at so many ports from the given ones on."""
    from tests.support.kv_subscriber import Subscriber

    topics = []
    for number in range(count):
        endpoints = (f"tcp://127.0.0.1:{port + number}" for port in (events, replay))
        with contextlib.closing(Subscriber(*endpoints)) as subscriber:
            topics.append(subscriber.replay(0)[0].topic)
    return topics


def _kill_stack(address: str) -> None:
    """Kill what supervises the verifier at ``address`` within its actor."""
    (process,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"serve", "--verifier-address", address} <= set(process.info["cmdline"] or ())
    ]
    process.kill()


def _actors() -> set[str]:
    """Return the names of the actors that live, as the dashboard shows them."""
    from ray.util import list_named_actors

    found: Any = list_named_actors(all_namespaces=True)
    return {item["name"] for item in found}
