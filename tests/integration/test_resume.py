"""Real verifiers die under real streams: the answers equal an undisturbed stack's, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from foretoken.free_ports import free_ports
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.integration.stack import ENVIRONMENT, EXACT, Stack, running

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPT = "for i in range(10):\n    print(i)\n"
# A random model stops at random: a stop string counts only after so many tokens.
LEAST = 500
REST: dict[str, dict[str, Any]] = {
    "greedy, streamed": {"temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True},
    "seeded, penalties and logprobs, streamed": {
        "temperature": 1.1,
        "seed": 5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logprobs": 2,
        "max_tokens": 700,
        "ignore_eos": True,
        "stream": True,
    },
    "three choices that stop apart, streamed": {
        "temperature": 1.3,
        "seed": 6,
        "n": 3,
        "stop": ["a", "0", "(", ":"],
        "min_tokens": LEAST,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    },
    "prompt logprobs, whole": {"temperature": 0.7, "seed": 7, "echo": True, "logprobs": 1, "max_tokens": 600},
    "a grammar, streamed": {
        "temperature": 1.0,
        "seed": 9,
        "guided_regex": "([a-f]{3}-[0-9]{3} ){140}",
        "max_tokens": 1500,
        "stream": True,
    },
    "min tokens, whole": {"temperature": 1.0, "seed": 8, "min_tokens": LEAST, "stop": ["e", "q"], "max_tokens": 900},
}


@dataclass
class Answer:
    """The answer sent to a client, without its chunk borders."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    ends: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)
    usage: Any = None

    def add(self, body: dict[str, Any]) -> None:
        assert "error" not in body, body
        for choice in body["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                self.logprobs.setdefault(index, {}).setdefault(key, []).extend(values)
            if choice["finish_reason"]:
                self.ends.setdefault(index, []).append((choice["finish_reason"], choice["stop_reason"]))
        self.usage = body.get("usage") or self.usage


class Clients:
    """Asks everything at once, over both protocols."""

    def __init__(self, port: int, grpc_port: int) -> None:
        self.num_chunks = 0
        self._num_grpc_chunks = 0
        self.grpc_id = ""
        self._port, self._grpc_port = port, grpc_port
        self._news = asyncio.Condition()

    async def ask_all(self) -> dict[str, Any]:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=None) as http,
            asyncio.TaskGroup() as group,
        ):
            tasks = {name: group.create_task(self._rest(http, body)) for name, body in REST.items()}
            tasks["grpc"] = group.create_task(self._generate())
        return {name: task.result() for name, task in tasks.items()}

    async def until_streaming(self, num_chunks: int) -> None:
        """Return after ``num_chunks`` chunks, some by gRPC: the rest of that answer is counted."""
        async with self._news:
            await self._news.wait_for(lambda: self.num_chunks >= num_chunks and self._num_grpc_chunks > 1)

    async def _count(self) -> None:
        async with self._news:
            self.num_chunks += 1
            self._news.notify_all()

    async def _rest(self, http: httpx.AsyncClient, fields: dict[str, Any]) -> Answer:
        # A tenant of its own: the cache does not depend on who came first.
        body = {"prompt": PROMPT, "cache_salt": json.dumps(fields), **fields}
        answer = Answer()
        if not body.get("stream"):
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answer.add(response.json())
            return answer
        body["stream_options"] = {"include_usage": True}
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200, await stream.aread()
            data = [line async for line in self._lines(stream)]
        assert data.pop() == "[DONE]"
        for line in data:
            answer.add(json.loads(line))
        return answer

    async def _lines(self, stream: httpx.Response) -> AsyncIterator[str]:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                await self._count()
                yield line.removeprefix("data: ")

    async def _generate(self) -> dict[str, Any]:
        """Return an answer by plain decode: a step a token."""
        sampling = common_pb2.SamplingParams(temperature=0.9, seed=9, max_tokens=800, ignore_eos=True, logprobs=1)
        self.grpc_id = uuid.uuid4().hex
        request = gateway_pb2.GenerateRequest(
            request_id=self.grpc_id,
            text=PROMPT,
            sampling=sampling,
            speculation=common_pb2.SpeculationOptions(enabled=False),
            cache_salt="grpc",
        )
        ids: list[int] = []
        logprobs: list[bytes] = []
        text = ""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._grpc_port}") as channel:
            async for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
                self._num_grpc_chunks += 1
                await self._count()
                chunk = response.chunk
                if response.HasField("chunk"):
                    assert chunk.offset == len(ids)
                    ids += chunk.token_ids
                    logprobs += [entry.SerializeToString(deterministic=True) for entry in chunk.logprobs]
                    text += chunk.text
        complete = response.complete
        return {
            "ids": ids,
            "text": text,
            "logprobs": logprobs,
            "reason": complete.reason,
            "usage": (complete.num_prompt_tokens, complete.num_cached_tokens, complete.num_output_tokens),
            "steps": complete.speculation.num_decode_steps,
        }


async def disturbed(clients: Clients, disturb: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Return all answers, disturbed while they stream."""
    asked = asyncio.create_task(clients.ask_all())
    # Few: on a busy machine these clients fall behind, and finished answers cannot be disturbed.
    await clients.until_streaming(30)
    await disturb()
    return await asked


async def num_resumes(stack: Stack, request_id: str) -> int:
    """Return the number from the gateway's log line, written soon after the stream's end."""
    while True:
        lines = [line for line in stack.log.read_text().splitlines() if request_id in line and line.endswith("}")]
        found = [entry for entry in map(json.loads, lines) if entry.get("client_request_id") == request_id]
        if found:
            return int(found[0]["resumes"])
        assert stack.process.poll() is None
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("resume") / "log", "--log-level", "info") as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, Any]:
    return asyncio.run(Clients(stack.port, stack.grpc_port).ask_all())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_verifier_that_dies_or_stops_is_replaced_and_every_answer_is_the_same(
    stack: Stack, expected: dict[str, Any], number: signal.Signals
) -> None:
    assert {reasons[0][0] for reasons in expected["three choices that stop apart, streamed"].ends.values()} == {"stop"}
    texts = expected["three choices that stop apart, streamed"].texts
    assert len({len(text) for text in texts.values()}) == 3
    assert expected["grpc"]["steps"] == len(expected["grpc"]["ids"]) - 1
    # Where other work keeps the cores busy, an answer may be over before these
    # clients have read its start.
    resumed = False
    while not resumed:
        verifier = stack.service("verifier")
        clients = Clients(stack.port, stack.grpc_port)

        async def disturb(verifier: psutil.Process = verifier) -> None:
            verifier.send_signal(number)

        answers = await disturbed(clients, disturb)
        assert_same_texts(answers, expected)
        resumed = await num_resumes(stack, clients.grpc_id) > 0
        # Only the rest was decoded, not the whole again.
        assert (answers["grpc"]["steps"] < expected["grpc"]["steps"]) == resumed
        assert not resumed or stack.service("verifier").pid != verifier.pid
        while stack.service("verifier").pid == verifier.pid:
            await asyncio.sleep(0.05)
    # The drafter was attached by the new verifier.
    while not await accepted_tokens(stack):
        assert stack.process.poll() is None


async def accepted_tokens(stack: Stack) -> int:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True, "speculative": EXACT}
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])


class Several:
    """Three verifiers that a file names, and one gateway, started by hand, without a supervisor."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.port, self.grpc_port = free_ports(2)
        self.log = folder / "log"
        self._checkpoint = checkpoint
        self.addresses = [f"unix:{folder}/v{number}.sock" for number in range(3)]
        self.file = folder / "verifiers"
        self.file.write_text("\n".join(self.addresses))
        with self.log.open("w") as log:
            self.verifiers = [
                self._start(log, "verifier", "--address", address, "--threads", "1", "--drain-timeout", "0")
                for address in self.addresses
            ]
            flags = ["--verifier", f"file:{self.file}", "--discovery-interval", "0.2"]
            ports = ("--port", str(self.port), "--grpc-port", str(self.grpc_port))
            self.gateway = self._start(log, "gateway", *flags, *ports)

    def _start(self, log: Any, service: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "foretoken", service, str(self._checkpoint), *flags]
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)

    def busiest(self) -> subprocess.Popen[bytes]:
        """Return the verifier that has used the CPU most."""
        return max(self.verifiers, key=lambda process: sum(psutil.Process(process.pid).cpu_times()[:2]))

    async def wait_up(self, count: int) -> list[str]:
        """Return the addresses of the gateway's verifiers once ``count`` are up."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=None) as http:
            while True:
                assert self.gateway.poll() is None, self.log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    verifiers = (await http.get("/ready")).json()["verifiers"]
                    if sum(verifier["up"] for verifier in verifiers) == count:
                        return sorted(verifier["address"] for verifier in verifiers)
                await asyncio.sleep(0.05)

    def close(self) -> None:
        for process in (self.gateway, *self.verifiers):
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_go_on_at_the_other_verifiers(
    checkpoint: Path, tmp_path: Path, expected: dict[str, Any], number: signal.Signals
) -> None:
    """After SIGTERM a verifier hands over the streams that it cannot finish in its drain."""
    several = Several(checkpoint, tmp_path)
    try:
        await several.wait_up(3)

        async def disturb() -> None:
            busy = several.busiest()
            busy.send_signal(number)
            status = await asyncio.to_thread(busy.wait)
            assert status == (0 if number == signal.SIGTERM else -number)

        assert_same_texts(await disturbed(Clients(several.port, several.grpc_port), disturb), expected)
        await several.wait_up(2)
        several.gateway.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(several.gateway.wait) == 0
    finally:
        several.close()


async def test_a_verifier_that_is_no_longer_listed_finishes_its_streams(
    checkpoint: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    several = Several(checkpoint, tmp_path)
    try:
        await several.wait_up(3)
        kept = []

        async def disturb() -> None:
            busy = several.verifiers.index(several.busiest())
            kept.extend(address for number, address in enumerate(several.addresses) if number != busy)
            several.file.write_text("\n".join(kept))

        assert_same_texts(await disturbed(Clients(several.port, several.grpc_port), disturb), expected)
        # Its session ended with its last stream, and it serves whoever comes next.
        assert await several.wait_up(2) == sorted(kept)
        assert all(verifier.poll() is None for verifier in several.verifiers)
        answers = await Clients(several.port, several.grpc_port).ask_all()
        assert_same_texts(answers, expected)
    finally:
        several.close()


def assert_same_texts(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in REST:
        assert answers[name] == expected[name], name
    assert {**answers["grpc"], "steps": 0} == {**expected["grpc"], "steps": 0}


async def test_a_gateway_that_is_killed_leaves_no_sequence_behind(stack: Stack, expected: dict[str, Any]) -> None:
    """This is the last test of this stack: its clients lose their connections."""
    clients = Clients(stack.port, stack.grpc_port)
    asked = asyncio.create_task(clients.ask_all())
    await clients.until_streaming(30)
    os.kill(stack.service("gateway").pid, signal.SIGKILL)
    with pytest.raises(ExceptionGroup):
        await asked
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as http:
        while True:
            with contextlib.suppress(httpx.TransportError):
                lines = (await http.get("/metrics")).text.splitlines()
                figures = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "{" in line}
                names = ("foretoken_num_requests_running", "foretoken_kv_cache_usage_perc")
                if [figures.get(name) for name in names] == [0, 0]:
                    break
            assert stack.process.poll() is None
            await asyncio.sleep(0.05)
    answers = await Clients(stack.port, stack.grpc_port).ask_all()
    assert answers == expected
