"""Send random requests to a running server, and report what it
must not do: python -m tests.chaos.fuzz.

A request may be refused. It must not end in an internal error, nor in an error that is not in the
shape of its API. After the run, fixed requests must have the answers that they had before it.
docs/chaos.md has the command and figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import httpx
import psutil

from tests.support.fuzzed_requests import ENDLESS_RPC, FuzzedRequests, RestRequest, RpcRequest

CONCURRENCY = 16
# One in so many requests is an RPC.
RPC_SHARE = 4
TIMEOUT_S = 120.0
# How often memory is shown, in requests.
SHOWN_EVERY = 10_000
# Statuses of a server that is busy, or whose model takes too long; 529 is Anthropic's.
_BUSY = (503, 504, 529)
# The server is busy, or the key has used up its limit: a fixed request is sent again.
_AGAIN = (429, *_BUSY)
AGAIN_S = 1.0
_FIXED = {"prompt": "def read_json(path):\n", "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
FIXED_REQUESTS: dict[str, dict[str, Any]] = {
    f"{sampling}, {'drafts' if speculates else 'no drafts'}": {
        **_FIXED,
        **fields,
        "speculative": {"enabled": speculates},
    }
    for sampling, fields in (("greedy", {"temperature": 0}), ("seeded", {"temperature": 0.8, "seed": 7}))
    for speculates in (True, False)
}
# Python's client then gives INTERNAL instead of the status that the server sent: grpc issue 36066.
_WRITE_FAILED = 'Failed "execute_batch"'
_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


class Outcomes:
    """Counts how requests ended, and keeps the first faults."""

    def __init__(self, max_faults: int = 20) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._max_faults = max_faults

    def add(self, outcome: str, fault: str = "") -> None:
        self.counts[outcome] += 1
        if fault and len(self.faults) < self._max_faults:
            self.faults.append(fault)


async def send_rest(client: httpx.AsyncClient, request: RestRequest, outcomes: Outcomes) -> None:
    """Send one REST request and count its end."""
    # An absolute URL may have any path; httpx takes a relative one that begins with // for a host.
    url = httpx.URL(scheme="http", host=client.base_url.host, port=client.base_url.port).copy_with(
        raw_path=request.path.encode()
    )
    answer = await client.request(request.method, url, content=request.content, headers=request.headers)
    outcomes.add(f"HTTP {answer.status_code}", rest_fault(request, answer))


def rest_fault(request: RestRequest, answer: httpx.Response) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    fault = ""
    if answer.status_code >= 500 and answer.status_code not in _BUSY:
        fault = f"status {answer.status_code}"
    elif answer.status_code >= 400 and request.method != "HEAD" and not _is_error(request.path, answer.content):
        fault = "not an error object"
    elif answer.status_code == 200 and b'"internal error"' in answer.content:
        fault = "an internal error in the stream"
    return fault and f"{fault}: {request!r}: {answer.content[:300]!r}"


def _is_error(path: str, content: bytes) -> bool:
    is_anthropic = path.startswith("/v1/messages")
    try:
        answer = json.loads(content)
        error = answer["error"]
        has_shape = answer["type"] == "error" if is_anthropic else {"param", "code"} <= set(error)
        return has_shape and isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, LookupError, TypeError):
        return False


async def send_rpc(channel: grpc.aio.Channel, request: RpcRequest, outcomes: Outcomes) -> None:
    """Make one call and count its end."""
    method: Any
    messages: Any
    if len(request.messages) == 1:
        method, (messages,) = channel.unary_stream(request.path), request.messages
    else:
        method, messages = channel.stream_stream(request.path), iter(request.messages)
    call = method(messages, metadata=request.metadata, timeout=TIMEOUT_S)
    outcome, fault = "OK", ""
    try:
        async for _ in call:
            if request.path == ENDLESS_RPC:
                call.cancel()
                break
    except grpc.aio.AioRpcError as error:
        outcome = error.code().name
        if _WRITE_FAILED in (error.debug_error_string() or ""):
            outcome = "ended before all messages were sent"
        elif error.code() in _FAULTS:
            fault = f"{outcome} {error.details()}: {request!r}"
    outcomes.add(f"gRPC {outcome}", fault)


class FixedAnswerError(Exception):
    """A fixed request was refused before the run."""


async def fixed_answers(client: httpx.AsyncClient, key: str = "") -> dict[str, str]:
    """Return the choices of every fixed request as JSON, or the error, by the request's name."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answers = {}
    for name, body in FIXED_REQUESTS.items():
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = await client.post("/v1/completions", json=body, headers=headers)
            if answer.status_code not in _AGAIN or time.monotonic() > deadline:
                break
            await asyncio.sleep(AGAIN_S)
        if answer.status_code == 200:
            answers[name] = json.dumps(answer.json()["choices"])
        else:
            answers[name] = f"status {answer.status_code}: {answer.text}"
    return answers


async def fuzz(
    url: str,
    grpc_address: str,
    *,
    seed: int,
    num_requests: int,
    keys: Sequence[str] = (),
    operator_key: str = "",
    on_count: Callable[[int], Any] = lambda _: None,
) -> Outcomes:
    """Send requests from a seed, several at once.

    Most show a key that their path needs, if it is given. The first key is that of the fixed
    requests. Raises FixedAnswerError if one is refused before the run.
    """
    key = keys[0] if keys else ""
    requests, outcomes = FuzzedRequests(seed, keys, operator_key), Outcomes()
    numbers = iter(range(num_requests))
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with (
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as client,
        grpc.aio.insecure_channel(grpc_address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        before = await fixed_answers(client, key)
        refused = [f"{name}: {answer}" for name, answer in before.items() if answer.startswith("status ")]
        if refused:
            raise FixedAnswerError("\n".join(refused))

        async def work() -> None:
            for number in numbers:
                call: Awaitable[None]
                if number % RPC_SHARE == 0:
                    call = send_rpc(channel, requests.rpc(), outcomes)
                else:
                    call = send_rest(client, requests.rest(), outcomes)
                await call
                on_count(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())
        after = await fixed_answers(client, key)
    for name, answer in after.items():
        is_same = answer == before[name]
        fault = "" if is_same else f"{name}: another answer after the run: {answer}, before it {before[name]}"
        outcomes.add(f"fixed answer {'kept' if is_same else 'changed'}", fault)
    return outcomes


def memory_line(pid: int) -> str:
    """Return the resident megabytes of each child of ``foretoken serve``, by its command's name."""
    sizes = []
    for child in psutil.Process(pid).children():
        words = child.cmdline()
        name = next((after for word, after in itertools.pairwise(words) if word == "foretoken"), "")
        if name:
            sizes.append(f"{name} {child.memory_info().rss / 1e6:.1f}")
    return ", ".join(sizes) + " MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:50051")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--key", action="append", default=[], help="a client's key; repeatable; fixed requests show the first"
    )
    parser.add_argument("--operator-key", default="")
    parser.add_argument("--pid", type=int, help="foretoken serve's; shows the memory of its processes")
    given = parser.parse_args()
    began = time.monotonic()

    def show(number: int) -> None:
        if number % SHOWN_EVERY == 0:
            memory = memory_line(given.pid) if given.pid else ""
            print(f"{number} requests in {time.monotonic() - began:.0f} s {memory}", flush=True)

    run = fuzz(
        given.url,
        given.grpc,
        seed=given.seed,
        num_requests=given.requests,
        keys=given.key,
        operator_key=given.operator_key,
        on_count=show,
    )
    try:
        outcomes = asyncio.run(run)
    except FixedAnswerError as error:
        print(f"a fixed request was refused before the run:\n{error}")
        return 1
    print(f"{given.requests} requests of seed {given.seed} in {time.monotonic() - began:.0f} s")
    for name, count in sorted(outcomes.counts.items()):
        print(f"{count:8d} {name}")
    print(f"{len(outcomes.faults)} faults", *outcomes.faults, sep="\n")
    return 1 if outcomes.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
