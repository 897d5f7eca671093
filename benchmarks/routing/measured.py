"""Replay a made-up trace over real verifiers, and hold the simulator against what they did.

    python -m benchmarks.routing.measured [--verifiers 2] [--requests 400] [--check]

It starts a gateway and CPU verifiers with the demo model, without drafters, one thread each. A first
trace teaches what a step costs on this machine, with all verifiers at work. A second one is simulated
with these costs and then served, faster than it can be, so that throughput is the verifiers' own. It
prints hit rate, throughput and shares of requests of both. With ``--check`` the exit status is 1 if
hit rate or throughput is off by more than 10%. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import grpc
import httpx
import numpy as np
import numpy.typing as npt

from benchmarks import environment
from benchmarks.routing import simulator, trace
from benchmarks.routing.modelled_fleet import ModelledFleet
from benchmarks.routing.modelled_verifier import Costs
from benchmarks.routing.trace import Mix, Request
from benchmarks.stack import READY_TIMEOUT_S, ServerProcess, free_ports, running_server
from protos import verifier_pb2, verifier_pb2_grpc

DEMO = environment.ROOT / "models" / "demo" / "target"
VOCAB_SIZE = 8192
BLOCK_TOKENS = 16
ROWS, CHUNK_TOKENS, CACHE_TOKENS = 32, 256, 32_768
MOST_OFF = 0.1
# Figures are read so often while costs are learned.
POLL_S = 0.25
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
class Figures:
    """A verifier's counters, when they were read, and its sequences then."""

    read_s: float
    num_steps: int
    generated: int
    looked_up: int
    hits: int
    num_sequences: int

    @classmethod
    def of(cls, info: verifier_pb2.GetInfoResponse) -> Figures:
        return cls(
            time.monotonic(),
            info.num_steps,
            info.num_generated_tokens,
            info.num_prefix_cache_queries,
            info.num_prefix_cache_hits,
            info.num_running + info.num_waiting,
        )

    def __sub__(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Deployment:
    """The servers of one measurement."""

    url: str
    addresses: tuple[str, ...]

    async def figures(self) -> list[Figures]:
        """Return each verifier's counters."""

        async def fetch(address: str) -> Figures:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = verifier_pb2_grpc.VerifierServiceStub(channel)
                return Figures.of(await stub.GetInfo(verifier_pb2.GetInfoRequest()))

        return list(await asyncio.gather(*map(fetch, self.addresses)))

    async def serve(self, requests: Sequence[Request]) -> float:
        """Send requests at their times, wait for all answers, and return the seconds that it took."""
        limits = httpx.Limits(max_connections=None)
        began = time.monotonic()

        async def ask(client: httpx.AsyncClient, request: Request) -> None:
            await asyncio.sleep(began + request.at_s - time.monotonic())
            body = {
                "prompt": trace.token_ids(request, BLOCK_TOKENS, VOCAB_SIZE),
                "max_tokens": request.output_length,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()

        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(ask(client, request) for request in requests))
        return time.monotonic() - began


@contextlib.contextmanager
def deployment(num_verifiers: int) -> Iterator[Deployment]:
    """Run a gateway and verifiers; yield them when they serve."""
    port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = tuple(f"unix:{folder}/v{number}.sock" for number in range(num_verifiers))
        flags = ["--threads", "1", "--max-running-requests", str(ROWS), "--chunked-prefill-size", str(CHUNK_TOKENS)]
        flags += ["--max-total-tokens", str(CACHE_TOKENS), "--block-size", str(BLOCK_TOKENS)]
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
        servers[-1].wait_until(lambda: _all_up(url, num_verifiers), READY_TIMEOUT_S)
        yield Deployment(url, addresses)


def _all_up(url: str, count: int) -> bool:
    try:
        answer = httpx.get(f"{url}/ready", trust_env=False)
    except httpx.TransportError:
        return False
    up = [verifier for verifier in answer.json()["verifiers"] if verifier["up"]]
    return len(up) == count


async def learn_costs(servers: Deployment, requests: Sequence[Request]) -> Costs:
    """Serve requests, and fit what a step, a row and a prompt token cost to the counters meanwhile."""
    samples: list[Figures] = []

    async def poll() -> None:
        last = await servers.figures()
        while True:
            await asyncio.sleep(POLL_S)
            now = await servers.figures()
            for new, old in zip(now, last, strict=True):
                # Only of a verifier that never was idle is the whole time its work's.
                if new.num_sequences and old.num_sequences:
                    samples.append(new - old)
            last = now

    polling = asyncio.create_task(poll())
    try:
        await servers.serve(requests)
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    return fitted(samples)


def fitted(samples: Sequence[Figures]) -> Costs:
    """Return the costs that explain best how long the samples' work took, by least squares."""
    work = np.array([[s.num_steps, s.generated, s.looked_up - s.hits] for s in samples], float)
    seconds = np.array([s.read_s for s in samples])
    step_s, row_s, token_s = _nonnegative(work, seconds)
    return Costs(step_s, row_s, token_s, rows=ROWS, cache_tokens=CACHE_TOKENS, chunk_tokens=CHUNK_TOKENS)


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


async def measure(servers: Deployment, count: int) -> bool:
    """Learn, simulate, serve and print; return whether the simulator was right."""
    costs = await learn_costs(servers, made(count, seed=1))
    print(f"costs             step {1e3 * costs.step_s:.2f} ms, row {1e6 * costs.row_s:.0f} us, ", end="")
    print(f"prompt token {1e6 * costs.token_s:.0f} us")
    requests = made(count, seed=2)
    fleet = ModelledFleet(costs, servers.addresses, BLOCK_TOKENS, vocab_size=VOCAB_SIZE)
    run = fleet.replay(requests)
    predicted = simulator.report(fleet, run, requests, BLOCK_TOKENS)
    before = await servers.figures()
    seconds = await servers.serve(requests)
    done = [new - old for new, old in zip(await servers.figures(), before, strict=True)]
    hit_rate = sum(figures.hits for figures in done) / sum(figures.looked_up for figures in done)
    throughput = sum(request.output_length for request in requests) / seconds
    expected = sum(request.output_length for request in requests) / run.ends_s
    shares = [figures.looked_up / sum(f.looked_up for f in done) for figures in done]
    modelled = [verifier.counts.prompt_tokens for verifier in fleet.verifiers]
    print(f"hit rate          {hit_rate:.3f} measured, {predicted.hit_rate:.3f} simulated")
    print(f"throughput        {throughput:.0f} tokens/s measured, {expected:.0f} simulated")
    print(
        f"prompt shares     {_percents(shares)} measured, {_percents([n / sum(modelled) for n in modelled])} simulated"
    )
    return abs(predicted.hit_rate / hit_rate - 1) <= MOST_OFF and abs(expected / throughput - 1) <= MOST_OFF


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold the routing simulator against real verifiers.")
    parser.add_argument("--verifiers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the simulator is off by more than 10%%")
    options = parser.parse_args(argv)
    with deployment(options.verifiers) as servers:
        is_right = asyncio.run(measure(servers, options.requests))
    return 0 if is_right or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
