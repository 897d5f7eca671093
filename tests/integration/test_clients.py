"""Clients misbehave against the whole stack: their resources are freed, others get their text."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from foretoken import rpc
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.integration.stack import Stack, running
from tests.support.tcp_clients import connect_slow, raw_post, read_until_cut, relay, reset

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
PROMPT = "for i in range(10):\n"
MAX_RUNNING, MAX_QUEUED = 4, 32
CLIENT_TIMEOUT_S = 2


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {
        "--max-running-requests": MAX_RUNNING,
        "--max-queued-requests": MAX_QUEUED,
        "--client-timeout": CLIENT_TIMEOUT_S,
        "--log-level": "info",
    }
    words = [str(word) for pair in options.items() for word in pair]
    with running(checkpoint, tmp_path_factory.mktemp("clients") / "log", *words) as stack:
        yield stack


async def until_verifier(stack: Stack, condition: Callable[[verifier_pb2.GetInfoResponse], bool]) -> None:
    async with rpc.async_channel(f"unix:{stack.runtime_folder()}/verifier.sock") as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        while not condition(await stub.GetInfo(verifier_pb2.GetInfoRequest())):
            await asyncio.sleep(0.01)


async def assert_free(stack: Stack) -> None:
    """Assert that every block is free and nothing runs or waits, in verifier and gateway."""
    await until_verifier(
        stack, lambda now: (now.num_running, now.num_waiting, now.num_free_blocks) == (0, 0, now.num_blocks)
    )
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as client:
        while 'foretoken_gateway_num_requests{model_name="tiny"} 0.0' not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | fields


async def text_alone(stack: Stack, **fields: Any) -> str:
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as client:
        answer = await client.post(URL, json=body(**fields))
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("phase", "stream", "how"),
    [("prefill", False, "close"), ("decode", True, "reset"), ("decode", False, "close"), ("queued", True, "reset")],
)
async def test_a_client_that_leaves_frees_its_blocks_and_harms_nobody(
    stack: Stack, phase: str, stream: bool, how: str
) -> None:
    expected = await text_alone(stack, max_tokens=300)
    beside = asyncio.create_task(text_alone(stack, max_tokens=300))
    count = 3 * MAX_RUNNING if phase == "queued" else 2
    prompt = PROMPT * 150 if phase == "prefill" else PROMPT
    # As many tokens as the context has room for, one a step: a busy client must find them all there.
    max_tokens = 2000 if phase == "prefill" else 3900
    fields = {"speculative": {"enabled": phase == "prefill"}, "logprobs": 5}
    readers, writers = [], []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(raw_post(URL, body(max_tokens, prompt=prompt, stream=stream, **fields)))
        readers.append(reader)
        writers.append(writer)
    if phase == "decode" and stream:
        for reader in readers:
            await reader.readuntil(b"data: ")
    # The others are there too, be they first or last.
    await until_verifier(stack, lambda now: now.num_running + now.num_waiting >= count)
    for writer in writers:
        if how == "reset":
            reset(writer)
        else:
            writer.close()
    assert await beside == expected
    await assert_free(stack)


@pytest.mark.parametrize("how", ["cancel", "reset", "deadline"])
async def test_a_grpc_caller_that_leaves_frees_its_blocks(stack: Stack, how: str) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=3500, temperature=0, ignore_eos=True)
    # One token a step: none is complete before its caller leaves.
    plain = common_pb2.SpeculationOptions(enabled=False)
    request = gateway_pb2.GenerateRequest(text=PROMPT, sampling=sampling, speculation=plain)
    async with relay(stack.grpc_port) as between:
        options = [("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{between.port}", options=options) as channel:
            stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
            # More than run at once: with a deadline, some of them pass it in the queue.
            calls = [stub.Generate(request, timeout=0.5 if how == "deadline" else None) for _ in range(8)]
            if how == "deadline":
                codes = []
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        async for _ in call:
                            pass
                    codes.append(caught.value.code())
                assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED] * len(calls)
            else:
                await calls[0].read()
                if how == "reset":
                    between.reset()
                for call in calls:
                    call.cancel()
            await assert_free(stack)


async def test_a_silent_reader_goes_on_or_is_cut(stack: Stack) -> None:
    """Several choices with logprobs exceed the buffers on the way."""
    fields = body(1000, n=8, logprobs=20, stream=True)
    with await connect_slow(stack.port) as silent:
        await asyncio.get_running_loop().sock_sendall(silent, raw_post(URL, fields))
        # Others are served meanwhile.
        assert await text_alone(stack, max_tokens=20)
        await assert_free(stack)
        is_whole = (await read_until_cut(silent)).endswith(b"0\r\n\r\n")
        assert not is_whole


@pytest.mark.slow
async def test_two_hundred_at_once_over_a_queue_of_32(stack: Stack) -> None:
    expected = await text_alone(stack, max_tokens=600)
    gateway = psutil.Process(stack.service("gateway").pid)
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None, limits=limits) as client:

        async def ask() -> httpx.Response:
            return await client.post(URL, json=body(600))

        await asyncio.gather(*[ask() for _ in range(200)])
        await assert_free(stack)
        before = gateway.memory_info().rss
        answers = await asyncio.gather(*[ask() for _ in range(200)])
        grown = gateway.memory_info().rss - before
    counts = Counter(answer.status_code for answer in answers)
    assert set(counts) == {200, 429}
    assert counts[200] >= MAX_QUEUED
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected
        else:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    # The first burst has allocated what such a burst needs.
    assert grown < 16 << 20
    await assert_free(stack)
    # The gateway refuses at its own limit, the verifier at its queue's: how
    # many each, their speeds decide.
    lines = lines_of_requests(stack)
    assert Counter(line["outcome"] for line in lines)["resource_exhausted"] > 0
    assert {line["outcome"] for line in lines if line["message"] == "request refused"} <= {"resource_exhausted"}


def test_every_request_has_left_one_line(stack: Stack) -> None:
    """This is the last test of this stack."""
    lines = lines_of_requests(stack)
    ids = Counter(line["request_id"] for line in lines if line["message"] == "request")
    assert ids and set(ids.values()) == {1}
    outcomes = Counter(line["outcome"] for line in lines)
    assert outcomes["cancelled"] >= 20
    assert set(outcomes) <= {"ok", "cancelled", "resource_exhausted", "deadline_exceeded"}


def lines_of_requests(stack: Stack) -> list[dict[str, Any]]:
    """Return the log's lines of requests, those without an id only if they were refused."""
    lines = [json.loads(line) for line in stack.log.read_text().splitlines() if line.startswith("{")]
    return [
        line
        for line in lines
        if line.get("message") == "request refused" or (line.get("message") == "request" and "request_id" in line)
    ]
