"""Envoy in front of two gateways and three verifiers:
clients see no error, whatever ends behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken.free_ports import free_ports
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.integration.conftest import build_checkpoint
from tests.integration.stack import ENVIRONMENT
from tests.kubernetes.envoy import DESTINATION, GATEWAY, Envoy, envoy

pytestmark = [pytest.mark.kubernetes, pytest.mark.anyio]
PROMPT, TOKENS = "for i in range(10):\n    print(i)\n", 250


class Deployment:
    """Processes as the chart's pods have them: verifiers, and gateways that know them all."""

    def __init__(self, folder: Path) -> None:
        self._model, self.log = build_checkpoint(folder / "tiny"), folder / "log"
        self._all: list[subprocess.Popen[bytes]] = []
        sockets = [f"unix:{folder}/v{number}.sock" for number in range(3)]
        self.verifiers = [
            self._start("verifier", "--address", each, "--threads", "1", "--drain-timeout", "1") for each in sockets
        ]
        ports = [free_ports(2) for _ in range(2)]
        self.rest, self.grpc = ([f"127.0.0.1:{pair[kind]}" for pair in ports] for kind in range(2))
        known = [word for each in sockets for word in ("--verifier", each)]
        self.gateways = [
            self._start(
                *("gateway", "--served-model-name", f"tiny,gateway-{number}", *known),
                *("--port", str(port), "--grpc-port", str(grpc_port)),
            )
            for number, (port, grpc_port) in enumerate(ports)
        ]

    def _start(self, service: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "foretoken", service, str(self._model), *flags]
        with self.log.open("ab") as log:
            self._all.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log))
        return self._all[-1]

    def wait_up(self) -> None:
        """Return once both gateways have all verifiers."""
        for address in self.rest:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    verifiers = httpx.get(f"http://{address}/ready", trust_env=False).json()["verifiers"]
                    if all(verifier["up"] for verifier in verifiers):
                        break
                assert all(process.poll() is None for process in self._all), self.log.read_text()

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()

    def busiest(self, among: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        return max(among, key=lambda process: sum(psutil.Process(process.pid).cpu_times()[:2]))

    def num_resumed(self, address: str) -> float:
        """Return how many sequences a gateway has resumed."""
        text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=None).text
        lines = [line for line in text.splitlines() if line.startswith("foretoken_sequences_resumed_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        deployment.wait_up()
        yield deployment
    finally:
        deployment.close()


@pytest.fixture(scope="module")
def front(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    with envoy(tmp_path_factory.mktemp("envoy"), deployment.rest, deployment.grpc) as front:
        for cluster, addresses in (("rest", deployment.rest), ("grpc", deployment.grpc)):
            front.wait_healthy(cluster, set(addresses))
        yield front


@pytest.fixture
async def http(front: Envoy) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{front.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None, limits=limits) as http:
        yield http


@pytest.fixture
async def channel(front: Envoy) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        yield channel


async def stream_rest(http: httpx.AsyncClient, seed: int) -> str:
    """Return the text of a streamed completion, whose every chunk must be sound."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
    text, ends = "", []
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                ends += filter(None, [chunk["choices"][0]["finish_reason"]])
    assert ends == ["length"]
    return text


async def stream_grpc(channel: grpc.aio.Channel, seed: int) -> str:
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)
    request = gateway_pb2.GenerateRequest(text=PROMPT, sampling=sampling)
    text, is_complete = "", False
    async for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
        text += response.chunk.text
        is_complete |= response.HasField("complete")
    assert is_complete
    return text


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_grpc_health_and_h2c_go_through(channel: grpc.aio.Channel) -> None:
    assert await health(channel, GATEWAY) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await health(channel, "no.such.Service")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    assert len(await stream_grpc(channel, 1)) > 0


async def test_the_destinations_header_chooses_the_gateway(
    deployment: Deployment, http: httpx.AsyncClient, channel: grpc.aio.Channel
) -> None:
    for number, (rest, grpc_address) in enumerate(zip(deployment.rest, deployment.grpc, strict=True)):
        for _ in range(3):
            models = (await http.get("/v1/models", headers={DESTINATION: rest})).json()["data"]
            assert f"gateway-{number}" in [model["id"] for model in models]
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for other in range(2):
            sampling = common_pb2.SamplingParams(max_tokens=2)
            request = gateway_pb2.GenerateRequest(text=PROMPT, model=f"gateway-{other}", sampling=sampling)
            call = stub.Generate(request, metadata=((DESTINATION, grpc_address),))
            if other == number:
                assert [response async for response in call]
                continue
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                [response async for response in call]
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    # An address that nobody has is no gateway's answer.
    (free,) = free_ports(1)
    assert (await http.get("/v1/models", headers={DESTINATION: f"127.0.0.1:{free}"})).status_code == 503


class Load:
    """Clients that ask again and again, each for a text that it knows."""

    def __init__(self, http: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        self._asks = {"rest": lambda seed: stream_rest(http, seed), "grpc": lambda seed: stream_grpc(channel, seed)}
        self.num_answers = 0
        self._news = asyncio.Condition()
        self._is_over = False

    async def run(self, expected: dict[int, str]) -> None:
        """Ask with every seed by both ways at once, until ``end``.

        Each answer must be the expected text.
        """
        async with asyncio.TaskGroup() as group:
            for seed, text in expected.items():
                for way in self._asks:
                    group.create_task(self._repeat(way, seed, text))

    async def more(self, count: int) -> None:
        """Return after ``count`` more answers."""
        wanted = self.num_answers + count
        async with self._news:
            await self._news.wait_for(lambda: self.num_answers >= wanted)

    def end(self) -> None:
        self._is_over = True

    async def _repeat(self, way: str, seed: int, text: str) -> None:
        while not self._is_over:
            assert await self._asks[way](seed) == text, way
            async with self._news:
                self.num_answers += 1
                self._news.notify_all()


async def test_no_client_sees_a_verifier_die_or_drain_or_a_gateway_drain(
    deployment: Deployment, front: Envoy, http: httpx.AsyncClient, channel: grpc.aio.Channel
) -> None:
    """This is the last test of this deployment: of it, one verifier and one gateway are left."""
    expected = {seed: await stream_rest(http, seed) for seed in range(4)}
    assert len(set(expected.values())) == len(expected)
    load = Load(http, channel)

    async def disturb() -> None:
        await load.more(8)
        killed = deployment.busiest(deployment.verifiers)
        killed.kill()
        await load.more(8)
        drained = deployment.busiest([each for each in deployment.verifiers if each is not killed])
        drained.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(drained.wait) == 0
        await load.more(8)
        assert sum([await asyncio.to_thread(deployment.num_resumed, each) for each in deployment.rest]) > 0
        gateway = deployment.gateways[0]
        gateway.send_signal(signal.SIGTERM)
        await asyncio.to_thread(front.wait_healthy, "grpc", {deployment.grpc[1]})
        await asyncio.to_thread(front.wait_healthy, "rest", {deployment.rest[1]})
        assert await asyncio.to_thread(gateway.wait) == 0
        await load.more(8)
        load.end()

    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(expected))
        group.create_task(disturb())
    assert await health(channel, GATEWAY) == health_pb2.HealthCheckResponse.SERVING
