"""The Ray Serve application under load: nodes die, verifiers
come and go, and a new head is rolled out.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.stack import HEAD, MODEL, TOKEN_MAP
from tests.integration.conftest import build_checkpoint
from tests.ray_cluster.cluster import PATIENCE_S, Application, RayCluster, num_replicas, ray_cluster, running
from tests.ray_cluster.load import NUM_CLIENTS, Pressure, draw

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.ray,
    pytest.mark.timeout(3600),
    # Ray's own.
    pytest.mark.filterwarnings("ignore"),
]


@dataclass(frozen=True)
class Form:
    """How long nodes die, and how many verifiers on how many nodes have load meanwhile."""

    num_nodes: int
    num_verifiers: int
    seconds: float
    # From one kill to the next one, or longer if not all verifiers are back.
    period_s: float

    @classmethod
    def of(cls, config: pytest.Config) -> Form:
        """Return the long form if --ray-minutes is given, else the short one."""
        minutes: float = config.getoption("--ray-minutes")
        return cls(3, 6, 60 * minutes, period_s=120.0) if minutes else cls(2, 3, 60.0, period_s=30.0)


ARGUMENTS: dict[str, Any] = {
    "model": str(MODEL),
    "threads": 1,
    "speculative-algorithm": "NGRAM",
    "drafter-placement": "in-process",
    "max-running-requests": 8,
    "verifier-wait": 300,
    "drain-timeout": 120,
    "insecure-links": True,
    "log-level": "info",
}
WITH_HEAD = {
    **{name: value for name, value in ARGUMENTS.items() if name != "speculative-algorithm"},
    "drafter": [f"name=head,algorithm=EAGLE3,model={HEAD},token_map={TOKEN_MAP}"],
}


def verifiers(least: int, most: int) -> dict[str, Any]:
    """Return the options of so many verifiers, by the load."""
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "initial_replicas": least,
            # The load wants more than four, and one client wants one.
            "target_ongoing_requests": 2,
            "upscale_delay_s": 1,
            "downscale_delay_s": 3,
            "look_back_period_s": 3,
            "policy": {"policy_function": "foretoken.ray.scaling:by_demand"},
        }
    }


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    with ray_cluster(Form.of(request.config).num_nodes) as cluster:
        yield cluster


async def test_no_token_changes_while_nodes_die_and_verifiers_come_and_go(
    cluster: RayCluster, request: pytest.FixtureRequest
) -> None:
    form = Form.of(request.config)
    application = Application(cluster)
    application.deploy(ARGUMENTS, verifiers(form.num_verifiers, form.num_verifiers))
    try:
        await application.until(lambda details: details["status"] == "RUNNING", "running")
        pressure = await Pressure.prepare(application.url, "", draw(60, with_grpc=False))
        await _lose_nodes(cluster, application, pressure, form)
        assert await _metric(application, "sequences_resumed_total") > 0
        pressure.check()
        await _scale(application, pressure)
        await _update(application, pressure)
        pressure.check()
        assert await _metric(application, "num_requests_running") == 0
    finally:
        application.shutdown()


async def test_a_stream_never_changes_its_model_in_an_update(cluster: RayCluster, tmp_path: Path) -> None:
    models = [build_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("old", "new"))]
    arguments = [{**ARGUMENTS, "model": str(model), "served-model-name": "tiny"} for model in models]
    application = Application(cluster)
    application.deploy(arguments[0], {"num_replicas": 2})
    try:
        await application.until(lambda details: details["status"] == "RUNNING", "running")
        before = await _ask_tiny(application, "named-by-a-client")
        assert "named-by-a-client" in await asyncio.to_thread(_log, "ServeReplica:foretoken:Gateway")
        assert "verifier is ready" in await asyncio.to_thread(_log, "ServeReplica:foretoken:Verifier")
        updated = asyncio.Event()
        clients = [asyncio.create_task(_ask_until(application, updated)) for _ in range(NUM_CLIENTS)]
        application.deploy(arguments[1], {"num_replicas": 2})
        await application.until(lambda details: details["status"] == "DEPLOYING", "being updated")
        await application.until(lambda details: details["status"] == "RUNNING", "updated")
        updated.set()
        answers = [answer for some in await asyncio.gather(*clients) for answer in some]
        after = await _ask_tiny(application)
        assert before != after
        assert set(answers) == {before, after}
    finally:
        application.shutdown()


async def _ask_until(application: Application, end: asyncio.Event) -> list[str]:
    """Ask without a pause, and once more after the end; return the texts."""
    answers = []
    while not end.is_set():
        answers.append(await _ask_tiny(application))
    return [*answers, await _ask_tiny(application)]


async def _ask_tiny(application: Application, request_id: str = "any") -> str:
    """Return the text of a stream that takes seconds. Raises for an error."""
    body = {"model": "tiny", "prompt": "for i in", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
    text = ""
    async with (
        httpx.AsyncClient(trust_env=False, base_url=application.url, timeout=PATIENCE_S) as client,
        client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers={"x-request-id": request_id}
        ) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
    return text


def _log(actors: str) -> str:
    """Return what actors of that name have logged, as the dashboard shows it."""
    from ray.util.state import get_log, list_actors

    found: Any = list_actors(filters=[("class_name", "=", actors), ("state", "=", "ALIVE")])
    assert found
    return "".join(text for actor in found for text in get_log(actor_id=actor.actor_id, suffix="err", tail=-1))


async def _lose_nodes(cluster: RayCluster, application: Application, pressure: Pressure, form: Form) -> None:
    """Kill a node and add one, each time until all verifiers are back."""
    count, pauses = form.num_verifiers, []
    ends = time.monotonic() + form.seconds
    async with pressure.by(NUM_CLIENTS):
        while (began := time.monotonic()) < ends:
            before = running(await application.until(lambda details: len(running(details)) == count, "whole"))
            cluster.replace_node()
            after = await application.until(partial(_is_whole_again, before, count), "whole again")
            assert after["status"] == "RUNNING"
            pauses.append(time.monotonic() - began)
            num_answers = pressure.tally.total("done")
            print(f"{cluster.num_killed} nodes killed, whole after {pauses[-1]:.0f} s, {num_answers} answers")
            assert not pressure.tally.failures, pressure.tally.failures[0]
            await asyncio.sleep(max(began + form.period_s - time.monotonic(), 0.0))
    print(f"{cluster.num_killed} nodes killed in {form.seconds / 60:.0f} minutes")
    print(f"{count} verifiers again after {statistics.median(pauses):.0f} s (median), {max(pauses):.0f} s at most")
    print(f"{await _metric(application, 'sequences_resumed_total'):.0f} streams resumed")


def _is_whole_again(before: set[str], count: int, details: dict[str, Any]) -> bool:
    now = running(details)
    return len(now) == count and now != before


async def _scale(application: Application, pressure: Pressure) -> None:
    """Go from one verifier to four and back, by the load alone."""
    async with pressure.by(1):
        application.deploy(ARGUMENTS, verifiers(1, 4))
        await application.until(lambda details: num_replicas(details) == 1, "one verifier")
        async with pressure.by(2 * NUM_CLIENTS):
            await application.until(lambda details: len(running(details)) == 4, "four verifiers")
        await application.until(lambda details: num_replicas(details) == 1, "one verifier again")


async def _update(application: Application, pressure: Pressure) -> None:
    """Roll out verifiers with another drafter, and gateways with them."""
    async with pressure.by(2):
        application.deploy(ARGUMENTS, verifiers(2, 2))
        before = running(await application.until(lambda details: len(running(details)) == 2, "two verifiers"))
        application.deploy(WITH_HEAD, verifiers(2, 2))
        await application.until(
            lambda details: (
                len(running(details)) == num_replicas(details) == 2
                and not running(details) & before
                and details["status"] == "RUNNING"
            ),
            "updated",
        )
    assert await _drafters(application) == {"head"}


async def _drafters(application: Application) -> set[str]:
    async with httpx.AsyncClient(trust_env=False, base_url=application.url) as client:
        verifiers = (await client.get("/ready")).json()["verifiers"]
    return {drafter["name"] for verifier in verifiers for drafter in verifier["drafters"]}


async def _metric(application: Application, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False, base_url=application.url) as client:
        text = (await client.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^foretoken_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
