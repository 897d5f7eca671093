"""Replay a made-up trace over real verifiers, and hold the simulator against what they did.

    python -m benchmarks.routing.measured [--verifiers 2] [--requests 400] [--check]

It starts a gateway and CPU verifiers with the demo model, without drafters, one thread each. A
first trace teaches how much CPU time a step, a row and a prompt token take. A second one, with
fresh servers, comes faster than it can be served, so that throughput is the verifiers' own, and
is then simulated with these costs. Throughput counts until 80% of the requests are answered:
after that some have no more work. The verifiers share the machine's cores with the gateway, with
the client and with whatever else runs. How fast these cores are and how many are left is no
matter of routing, so both are read from the second trace: the costs are scaled to its CPU time,
and cores are counted while all verifiers have work. It prints hit rate, throughput and shares of
prompt tokens, measured and simulated. With ``--check`` the exit status is 1 if hit rate or
throughput is off by more than 10%.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import psutil

from benchmarks import environment
from benchmarks.routing import simulator, trace
from benchmarks.routing.modelled_fleet import ModelledFleet
from benchmarks.routing.modelled_verifier import Costs, SharedCores
from benchmarks.routing.trace import Mix, Request
from benchmarks.stack import READY_TIMEOUT_S, ServerProcess, cpu_seconds, running_server
from foretoken.free_ports import free_ports
from protos import verifier_pb2, verifier_pb2_grpc

DEMO = environment.ROOT / "models" / "demo" / "target"
VOCAB_SIZE = 8192
BLOCK_TOKENS = 16
ROWS, CHUNK_TOKENS, CACHE_TOKENS = 32, 256, 32_768
MOST_OFF = 0.1
# Throughput counts until this share of the requests is answered.
COUNTED = 0.8
# Figures are read so often while a trace is served.
POLL_S = 2.0
MIX = Mix(
    rate=60.0,
    seconds=60.0,
    num_systems=6,
    system_tokens=256,
    turn_tokens=64,
    reply_tokens=24,
    think_s=1.0,
    block_tokens=BLOCK_TOKENS,
    most_tokens=1024,
)


@dataclass(frozen=True, slots=True)
class VerifierReading:
    """A verifier's counters, sequences and CPU seconds, and when they were read."""

    read_s: float
    cpu_s: float
    num_steps: int
    generated: int
    looked_up: int
    hits: int
    num_sequences: int

    @classmethod
    def of(cls, info: verifier_pb2.GetInfoResponse, process: psutil.Process) -> VerifierReading:
        return cls(
            time.monotonic(),
            sum(cpu_seconds(process).values()),
            info.num_steps,
            info.num_generated_tokens,
            info.num_prefix_cache_queries,
            info.num_prefix_cache_hits,
            info.num_running + info.num_waiting,
        )

    def __sub__(self, other: VerifierReading) -> VerifierReading:
        return VerifierReading(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class BusySample(NamedTuple):
    """Each verifier's differences of counters, and whether all had sequences at begin and end."""

    figures: list[VerifierReading]
    are_busy: bool


@dataclass(frozen=True)
class Deployment:
    """The servers of one measurement."""

    url: str
    addresses: tuple[str, ...]
    processes: tuple[psutil.Process, ...]

    async def figures(self) -> list[VerifierReading]:
        """Return each verifier's counters."""

        async def fetch(address: str, process: psutil.Process) -> VerifierReading:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = verifier_pb2_grpc.VerifierServiceStub(channel)
                return VerifierReading.of(await stub.GetInfo(verifier_pb2.GetInfoRequest()), process)

        return list(await asyncio.gather(*map(fetch, self.addresses, self.processes)))

    async def serve(self, requests: Sequence[Request]) -> list[tuple[float, int]]:
        """Send requests at their times.

        Returns when each was answered, in seconds since the beginning, and its
        tokens, in the order of the answers.
        """
        limits = httpx.Limits(max_connections=None)
        began = time.monotonic()

        async def ask(client: httpx.AsyncClient, request: Request) -> tuple[float, int]:
            await asyncio.sleep(began + request.at_s - time.monotonic())
            body = {
                "prompt": trace.token_ids(request, BLOCK_TOKENS, VOCAB_SIZE),
                "max_tokens": request.output_length,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return time.monotonic() - began, request.output_length

        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits, trust_env=False) as client:
            return sorted(await asyncio.gather(*(ask(client, request) for request in requests)))


@contextlib.contextmanager
def deployment(num_verifiers: int) -> Iterator[Deployment]:
    """Run a gateway and verifiers; yield them when they serve."""
    port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = tuple(f"unix:{folder}/v{number}.sock" for number in range(num_verifiers))
        flags = ["--threads", "1", "--max-running-requests", str(ROWS), "--chunked-prefill-size", str(CHUNK_TOKENS)]
        flags += ["--max-total-tokens", str(CACHE_TOKENS), "--block-size", str(BLOCK_TOKENS)]
        # How long a step takes depends on what else runs here; without a limit, its prompts do not.
        flags += ["--max-step-ms", "0"]
        command = [sys.executable, "-P", "-m", "foretoken"]
        servers: list[ServerProcess] = []
        for address in addresses:
            verifier = [*command, "verifier", str(DEMO), "--address", address, *flags]
            servers.append(stack.enter_context(running_server("a verifier", verifier)))
        listed = Path(folder) / "verifiers"
        listed.write_text("\n".join(addresses))
        ports = ["--port", str(port), "--grpc-port", str(grpc_port), "--gateway-workers", "1"]
        gateway = [*command, "gateway", str(DEMO), "--verifier", f"file:{listed}", *ports]
        servers.append(stack.enter_context(running_server("the gateway", gateway)))
        url = f"http://127.0.0.1:{port}"
        servers[-1].wait_until(lambda: _all_up(url, num_verifiers), READY_TIMEOUT_S * num_verifiers)
        yield Deployment(url, addresses, tuple(psutil.Process(server.pid) for server in servers[:-1]))


def _all_up(url: str, count: int) -> bool:
    try:
        answer = httpx.get(f"{url}/ready", trust_env=False)
    except httpx.TransportError:
        return False
    up = [verifier for verifier in answer.json()["verifiers"] if verifier["up"]]
    return len(up) == count


@contextlib.asynccontextmanager
async def watched(servers: Deployment) -> AsyncIterator[list[BusySample]]:
    """Yield a list that gets a sample every ``POLL_S`` during the block."""
    samples: list[BusySample] = []

    async def poll() -> None:
        last = await servers.figures()
        while True:
            await asyncio.sleep(POLL_S)
            now = await servers.figures()
            are_busy = all(figures.num_sequences for figures in (*last, *now))
            samples.append(BusySample([new - old for new, old in zip(now, last, strict=True)], are_busy))
            last = now

    polling = asyncio.create_task(poll())
    try:
        yield samples
    finally:
        polling.cancel()
        (ended,) = await asyncio.gather(polling, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended


async def learn_costs(servers: Deployment, requests: Sequence[Request]) -> Costs:
    """Serve requests, and fit what a step, a row and a prompt token cost to the counters since."""
    async with watched(servers) as samples:
        await servers.serve(requests)
    # Not only while all are busy: a few samples of full batches do not tell
    # a step's cost from its rows'.
    return fitted([figures for sample in samples for figures in sample.figures])


def fitted(samples: Sequence[VerifierReading]) -> Costs:
    """Return the costs that explain best the CPU time of the samples' work, by least squares."""
    seconds = np.array([figures.cpu_s for figures in samples])
    step_s, row_s, token_s = _nonnegative(_work(samples), seconds)
    found = Costs(
        step_s,
        row_s,
        token_s,
        rows=ROWS,
        cache_tokens=CACHE_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        limit_s=math.inf,
    )
    # A step that began in one sample and ended in the next makes all costs too low.
    return scaled(found, slowness(found, samples))


def slowness(costs: Costs, samples: Sequence[VerifierReading]) -> float:
    """Return the samples' CPU time over what their work takes at these costs."""
    expected_s = float((_work(samples) @ [costs.step_s, costs.row_s, costs.token_s]).sum())
    return sum(figures.cpu_s for figures in samples) / expected_s


def scaled(costs: Costs, times: float) -> Costs:
    """Return the costs of a machine that takes so many times as long."""
    return replace(costs, step_s=times * costs.step_s, row_s=times * costs.row_s, token_s=times * costs.token_s)


def _work(samples: Sequence[VerifierReading]) -> npt.NDArray[np.float64]:
    """Return steps, rows and computed prompt tokens: an array of shape (samples, 3)."""
    return np.array([[s.num_steps, s.generated, s.looked_up - s.hits] for s in samples], float)


def cores_used(samples: Sequence[BusySample]) -> float:
    """Return how many cores the verifiers had together while all had sequences.

    Raises SystemExit if they never had.
    """
    busy = [sample.figures for sample in samples if sample.are_busy]
    if not busy:
        raise SystemExit("at no time did all verifiers have requests: give more --requests")
    used_s = sum(figures.cpu_s for sample in busy for figures in sample)
    return used_s / sum(float(np.mean([figures.read_s for figures in sample])) for sample in busy)


def _nonnegative(work: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> list[float]:
    """Solve least squares; what comes out negative is left out."""
    kept = list(range(work.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(work[:, kept], seconds, rcond=None)
        if (found >= 0).all():
            break
        kept.remove(kept[int(found.argmin())])
    costs = [0.0] * work.shape[1]
    for index, cost in zip(kept, found, strict=True):
        costs[index] = float(cost)
    return costs


def made(count: int, seed: int) -> list[Request]:
    """Return the first ``count`` requests of a made-up trace."""
    mix = Mix(**{f.name: getattr(MIX, f.name) for f in fields(Mix)} | {"seed": seed})
    return trace.make(mix)[:count]


def throughput_of(answers: Sequence[tuple[float, int]]) -> float:
    """Return the tokens a second until ``COUNTED`` of the answers.

    Answers come with their times and tokens.
    """
    counted = answers[: round(COUNTED * len(answers))]
    return sum(num_tokens for _, num_tokens in counted) / counted[-1][0]


async def measure(servers: Deployment, costs: Costs, count: int) -> bool:
    """Serve, simulate and print; return whether the simulator was right."""
    requests = made(count, seed=2)
    before = await servers.figures()
    async with watched(servers) as samples:
        answers = await servers.serve(requests)
    done = [new - old for new, old in zip(await servers.figures(), before, strict=True)]
    cores = cores_used(samples)
    times = slowness(costs, done)
    print(f"cores             {cores:.2f} for {len(done)} verifiers")
    print(f"CPU time          {times:.2f} times what the first trace taught")
    costs = scaled(costs, times)
    fleet = ModelledFleet(costs, servers.addresses, BLOCK_TOKENS, vocab_size=VOCAB_SIZE, cores=SharedCores(cores))
    run = fleet.replay(requests)
    predicted = simulator.report(fleet, run, requests, BLOCK_TOKENS)
    hit_rate = sum(figures.hits for figures in done) / sum(figures.looked_up for figures in done)
    throughput = throughput_of(answers)
    expected = throughput_of([(sequence.ended_s, sequence.request.output_length) for sequence in run.finished])
    modelled = [verifier.counts for verifier in fleet.verifiers]
    print(f"hit rate          {hit_rate:.3f} measured, {predicted.hit_rate:.3f} simulated")
    print(f"until 80%         {answers[round(COUNTED * len(answers)) - 1][0]:.0f} s of {answers[-1][0]:.0f} s")
    print(f"throughput        {throughput:.0f} tokens/s measured, {expected:.0f} simulated")
    for name, real, simulated in (
        ("prompt tokens", [f.looked_up for f in done], [c.prompt_tokens for c in modelled]),
        ("CPU time", [f.cpu_s for f in done], [c.busy_s for c in modelled]),
    ):
        print(f"{name:<18}{_percents(real)} measured, {_percents(simulated)} simulated")
    return abs(predicted.hit_rate / hit_rate - 1) <= MOST_OFF and abs(expected / throughput - 1) <= MOST_OFF


def _percents(parts: Sequence[float]) -> str:
    return " ".join(f"{part / sum(parts):.0%}" for part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold the routing simulator against real verifiers.")
    parser.add_argument("--verifiers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the simulator is off by more than 10%%")
    options = parser.parse_args(argv)
    with deployment(options.verifiers) as servers:
        costs = asyncio.run(learn_costs(servers, made(options.requests, seed=1)))
    print(f"CPU time          step {1e3 * costs.step_s:.2f} ms, row {1e6 * costs.row_s:.0f} us, ", end="")
    print(f"prompt token {1e6 * costs.token_s:.0f} us")
    with deployment(options.verifiers) as servers:
        is_right = asyncio.run(measure(servers, costs, options.requests))
    return 0 if is_right or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
