"""Several gateway processes on one port: service, common counts, deaths, drain, foreigners."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from foretoken import liveness
from foretoken.config import build, to_environment, to_flags
from foretoken.free_ports import free_ports
from foretoken.telemetry import Family, parse
from gateway.access.key_file import entry_text
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from gateway.worker_metrics import fetch_text, liveness_socket
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.scripted_verifier import ABORT, LENGTH, Player, ScriptedVerifier, serving, steps
from tests.support.environment import child_environment

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = child_environment()
URL = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4}


def values(families: list[Family], name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples called ``name``, by labels other than the model's name."""
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sorted((k, v) for k, v in s.labels.items() if k != "model_name")): s.value for s in samples}


@dataclass
class Workers:
    """A running parent with its workers and their verifier."""

    settings: GatewaySettings
    verifier: ScriptedVerifier
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def processes(self) -> dict[Path, psutil.Process]:
        """Return the live workers, by their sockets."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                if "--worker-socket" in words:
                    found[Path(words[words.index("--worker-socket") + 1])] = child
        return found

    async def own_counts(self, path: Path, name: str) -> float:
        """Return the sum of one worker's samples of a metric; 0 while it does not answer."""
        answer = await fetch_text(path, 5)
        return sum(values(parse(answer[1]), name).values()) if answer else 0.0

    async def metrics(self) -> list[Family]:
        return parse((await self.get("/metrics")).text)

    async def get(self, path: str) -> httpx.Response:
        """Send a GET on a new connection: the kernel chooses the worker."""
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
            return await client.get(path)

    async def post(self) -> int:
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
            return (await client.post(URL, json=BODY)).status_code

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        while not await condition():
            assert self.process.poll() is None
            await asyncio.sleep(0.05)

    async def both_are_ready(self) -> bool:
        """Return whether both workers listen and have the verifier; many requests reach both."""
        with contextlib.suppress(httpx.TransportError):
            answers = [(await self.get("/ready")).status_code for _ in range(8)]
            return self.verifier.num_sessions >= 2 and set(answers) == {200} and len(self.processes()) == 2
        return False


def start(settings: GatewaySettings) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "foretoken", "gateway", *to_flags(settings), "--log-level", "warning"]
    return subprocess.Popen(command, env=ENVIRONMENT | to_environment(settings), stderr=subprocess.PIPE)


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings, tokenizer: Tokenizer) -> AsyncIterator[Workers]:
    settings = settings.model_copy(update={"gateway_workers": 2, "drain_timeout_s": 600.0})
    verifier = ScriptedVerifier(tokenizer.vocab_size)
    async with serving(verifier, Path(settings.verifiers[0].removeprefix("unix:"))):
        process = start(settings)
        try:
            workers = Workers(settings, verifier, process)
            await workers.until(workers.both_are_ready)
            yield workers
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)


async def test_both_serve_and_metrics_add_up_through_a_death(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with running(settings, tokenizer) as workers:
        workers.verifier.script = steps([65, 66], [67])
        num_requests = 0

        async def both_served() -> bool:
            nonlocal num_requests
            assert await workers.post() == 200
            num_requests += 1
            return all([await workers.own_counts(path, "foretoken_prompt_tokens_total") > 0 for path in paths])

        paths = list(workers.processes())
        await workers.until(both_served)
        # The public gRPC port is shared as well.
        for _ in range(20):
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.grpc_port}", options=options) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                request = gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=[5, 6, 7]))
                assert [response async for response in stub.Generate(request)][-1].HasField("complete")
        num_requests += 20

        async def all_is_counted() -> bool:
            """Return whether all is counted; a late worker counts as it last did."""
            families = await workers.metrics()
            expected = {
                "prompt_tokens_total": 3 * num_requests,
                "generation_tokens_total": 3 * num_requests,
                "request_success_total": num_requests,
                "e2e_request_latency_seconds_count": num_requests,
                "inter_token_latency_seconds_count": num_requests,
            }
            buckets = values(families, "foretoken_e2e_request_latency_seconds_bucket")
            return (
                # The verifier's figures appear once.
                list(values(families, "foretoken_num_requests_running").values()) == [3]
                and list(values(families, "foretoken_gateway_num_requests").values()) == [0]
                and {name: sum(values(families, f"foretoken_{name}").values()) for name in expected} == expected
                and buckets[("le", "+Inf"),] == num_requests
            )

        # Any worker may answer.
        for _ in range(4):
            await workers.until(all_is_counted)

        path, victim = next(iter(workers.processes().items()))
        victim.kill()

        async def restarted() -> bool:
            # Never refused: the other one listens. The victim's connections may be reset.
            with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                assert (await workers.get("/health")).status_code == 200
            process = workers.processes().get(path)
            return process is not None and process.pid != victim.pid and bool(await fetch_text(path, 5))

        await workers.until(restarted)
        await workers.until(all_is_counted)
        for _ in range(20):
            assert await workers.post() == 200
        num_requests += 20
        await workers.until(all_is_counted)


async def test_sigterm_drains_all_workers_at_once(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    go_on = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await go_on.wait()
        player.tokens([66])
        player.finish(LENGTH)

    async with running(settings, tokenizer) as workers, contextlib.AsyncExitStack() as stack:
        workers.verifier.script = play
        lines: list[AsyncIterator[str]] = []

        async def both_are_busy() -> bool:
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=workers.url, timeout=None))
            response = await stack.enter_async_context(client.stream("POST", URL, json={**BODY, "stream": True}))
            assert response.status_code == 200
            lines.append(response.aiter_lines())
            assert (await anext(lines[-1])).startswith("data: ")
            return all([await workers.own_counts(p, "foretoken_gateway_num_requests") > 0 for p in workers.processes()])

        await workers.until(both_are_busy)
        paths = list(workers.processes())
        workers.process.send_signal(signal.SIGTERM)

        async def nobody_takes_requests() -> bool:
            return {await workers.post() for _ in range(12)} == {503}

        await workers.until(nobody_takes_requests)
        # All drain, none has ended, and each still reports to its parent that it lives.
        assert list(workers.processes()) == paths
        for number in range(2):
            assert await liveness.last_turn(liveness_socket(paths[0].parent, number), 600) is not None
        go_on.set()
        for stream in lines:
            assert [line async for line in stream if line][-1] == "data: [DONE]"
        assert await asyncio.to_thread(workers.process.wait) == 0
        assert not paths[0].parent.exists()


async def test_workers_share_keys_and_what_they_use(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """One held request of a key counts in both; a hangup gives both the new file."""
    secret, own, path = "a tenant's secret", "own-secret", tmp_path / "keys.toml"
    path.write_text(entry_text("tenant", secret, max_concurrent_requests=1))
    settings = build(GatewaySettings, settings.model_dump() | {"api_keys": [own], "api_key_file": path})
    go_on = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await go_on.wait()
        player.finish(LENGTH)

    async with running(settings, tokenizer) as workers, httpx.AsyncClient(base_url=workers.url, timeout=None) as held:
        workers.verifier.script = play

        async def codes(key: str) -> set[int]:
            """Return the statuses of many connections, which reach both workers."""
            found = set()
            for _ in range(12):
                async with httpx.AsyncClient(base_url=workers.url, timeout=None) as client:
                    found.add((await client.post(URL, json=BODY, headers={"x-api-key": key})).status_code)
            return found

        async with held.stream("POST", URL, json={**BODY, "stream": True}, headers={"x-api-key": secret}) as answer:
            lines = answer.aiter_lines()
            assert answer.status_code == 200 and (await anext(lines)).startswith("data: ")
            assert await codes(secret) == {429}
            go_on.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await codes(own) == {200}
        assert await codes("wrong") == {401}
        path.write_text(entry_text("other", "another secret"))
        workers.process.send_signal(signal.SIGHUP)

        async def both_have_the_new_file() -> bool:
            return await codes("another secret") == {200} and await codes(secret) == {401}

        await workers.until(both_have_the_new_file)
        shown = [word for process in workers.processes().values() for word in process.cmdline()]
        assert shown and not [word for word in shown if own in word or secret in word]


async def test_a_second_gateway_on_either_port_is_refused(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with running(settings, tokenizer) as workers:
        (free,) = free_ports(1)
        for taken, flag in (({"grpc_port": free}, "--port"), ({"port": free}, "--grpc-port")):
            for count in (1, 2):
                second = start(workers.settings.model_copy(update={**taken, "gateway_workers": count}))
                _, errors = await asyncio.to_thread(second.communicate)
                assert second.returncode == 2, errors
                (line,) = errors.decode().splitlines()
                assert line.startswith("foretoken: cannot listen on 127.0.0.1:")
                assert line.endswith(f"in use; choose another with {flag}")
        assert await workers.post() == 200


async def test_workers_that_refuse_their_settings_end_the_parent(settings: GatewaySettings, tmp_path: Path) -> None:
    process = start(settings.model_copy(update={"gateway_workers": 2, "model": tmp_path}))
    _, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 2
    assert {line.partition(":")[0] for line in errors.decode().splitlines()} == {"foretoken"}, errors
    assert "tokenizer.json" in errors.decode() and "Traceback" not in errors.decode()


async def test_sigkill_of_the_parent_leaves_nothing(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with running(settings, tokenizer) as workers:
        processes = workers.processes()
        workers.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, list(processes.values()), 60)
        assert alive == []
        folder = next(iter(processes)).parent
        while folder.exists():
            await asyncio.sleep(0.02)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", settings.port))


async def test_a_port_that_is_held_may_be_bound_by_the_holders_workers_only() -> None:
    from foretoken.errors import ConfigError
    from gateway.sockets import hold, listen

    (port,) = free_ports(1)
    with hold("127.0.0.1", port, "--port"):
        # Also while nobody listens yet.
        with pytest.raises(ConfigError, match="in use"), listen("127.0.0.1", port):
            pass
        with (
            pytest.raises(ConfigError, match="choose another with --grpc-port"),
            hold("127.0.0.1", port, "--grpc-port"),
        ):
            pass
        with listen("127.0.0.1", port, reuse_port=True), listen("127.0.0.1", port, reuse_port=True):
            pass


async def test_a_request_is_aborted_in_whichever_process_it_runs(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async def play(player: Player) -> None:
        player.tokens([65, 66])
        await player.aborted.wait()
        player.finish(ABORT)

    async with running(settings, tokenizer) as workers:
        workers.verifier.script = play
        paths = list(workers.processes())

        async def post(name: str) -> httpx.Response:
            async with httpx.AsyncClient(base_url=workers.url, timeout=None) as client:
                return await client.post("/generate", json={"input_ids": [5], "rid": name})

        async def abort(**body: object) -> int:
            async with httpx.AsyncClient(base_url=workers.url, timeout=None) as client:
                return int((await client.post("/abort_request", json=body)).json()["num_aborted"])

        # Enough requests that each worker has some, whatever connections the kernel gives it.
        names: list[str] = []
        answers: list[asyncio.Task[httpx.Response]] = []

        async def each_has_some() -> bool:
            names.append(f"client-{len(names)}")
            answers.append(asyncio.create_task(post(names[-1])))
            return all([await workers.own_counts(path, "foretoken_gateway_num_requests") > 0 for path in paths])

        await workers.until(each_has_some)
        await workers.verifier.until(lambda: len(workers.verifier.submitted) == len(names))
        for name, answer in zip(names[:-1], answers[:-1], strict=True):
            assert await abort(rid=name) == 1
            assert (await answer).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert await abort(rid=names[0]) == 0
        assert not answers[-1].done()
        assert await abort(abort_all=True) == 1
        assert (await answers[-1]).json()["output_ids"] == [65, 66]


async def test_the_operator_sees_the_requests_of_all_processes(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "operator").write_text("an operator's key")
    settings = build(GatewaySettings, settings.model_dump() | {"admin_api_key_file": tmp_path / "operator"})
    async with running(settings, tokenizer) as workers:
        workers.verifier.script = steps([65], [66])
        paths = list(workers.processes())
        sent = 0

        async def each_had_some() -> bool:
            nonlocal sent
            async with httpx.AsyncClient(base_url=workers.url, timeout=None) as client:
                assert (await client.post(URL, json=BODY)).status_code == 200
            sent += 1
            return all([await workers.own_counts(path, "foretoken_request_success_total") > 0 for path in paths])

        await workers.until(each_had_some)
        async with httpx.AsyncClient(base_url=workers.url, timeout=None) as client:
            found = (await client.get("/v1/activity", headers={"authorization": "Bearer an operator's key"})).json()
        assert len(found["requests"]) == sent >= 2
        ends = [request["ended_at"] for request in found["requests"]]
        assert ends == sorted(ends, reverse=True)
