"""Streams outlive their verifier: the client sees the undisturbed stream with a pause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gateway import generation
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc, verifier_pb2
from tests.gateway.conftest import events
from tests.gateway.deployment import TEXT, URL, Deployment, ask, deployment, joined, playing, silent
from tests.gateway.scripted_verifier import STOP, Player, steps

pytestmark = pytest.mark.anyio


async def undisturbed(running: Deployment, ask: Callable[[], Any], outputs: list[list[int]], **more: Any) -> Any:
    await running.start(playing(outputs, [None] * len(outputs), **more))
    answer = await ask()
    await running.kill()
    running.verifiers.clear()
    return answer


async def disturbed(
    running: Deployment, ask: Callable[[], Any], outputs: list[list[int]], cuts: list[int | None], **more: Any
) -> Any:
    """Return the answer if the verifier dies once each choice has reached its cut."""
    script = playing(outputs, cuts, **more)
    played = []

    async def play(player: Player) -> None:
        await script(player)
        played.append(player)

    await running.start(play)
    asked = asyncio.create_task(ask())
    await running.until(lambda: len(played) == len(outputs))
    # All output is on its way before the verifier goes.
    pool = running.gateway.verifiers
    kept = sorted(cut for cut in cuts if cut is not None)
    await running.until(lambda: sorted(len(p._emitted) for p in pool._sequences) == kept)
    await running.kill()
    await running.start(playing(outputs, [None] * len(outputs), **more))
    return await asked


def without_ids(body: Any) -> Any:
    """Return an answer without ids, times and drawn seeds, which differ between requests."""
    if isinstance(body, dict):
        skipped = ("id", "created", "metrics", "e2e_latency")
        return {key: without_ids(value) for key, value in body.items() if key not in skipped}
    return [without_ids(item) for item in body] if isinstance(body, list) else body


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string across the cut": {"stop": ["語 stop"]},
    "min tokens": {"stop": ["o"], "min_tokens": 4},
    "logprobs": {"logprobs": 1},
    "prompt logprobs already sent": {"logprobs": 1, "echo": True},
    "token sources": {"return_token_sources": True},
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_the_answer_is_that_without_the_death(
    settings: GatewaySettings, tokenizer: Tokenizer, name: str, stream: bool
) -> None:
    output = tokenizer.encode(TEXT)
    body = {"prompt": "def add", "max_tokens": 50, "seed": 1, "stream": stream, **REQUESTS[name]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    more = {"with_logprobs": "logprobs" in body}
    async with deployment(settings, tokenizer) as running:

        async def ask() -> Any:
            answer = await running.http.post(URL, json=body)
            assert answer.status_code == 200, answer.text
            return events(answer.text) if stream else answer.json()

        expected = await undisturbed(running, ask, [output], **more)
        # Every cut: in the middle of each character of several bytes, and of the stop string.
        num_tokens = (expected[-1] if stream else expected)["usage"]["completion_tokens"]
        for cut in range(1, num_tokens):
            running.verifiers.clear()
            answer = await disturbed(running, ask, [output], [cut], **more)
            await running.kill()
            if stream:
                assert joined(answer) == joined(expected)
                assert answer[-1]["usage"] == expected[-1]["usage"]
                assert answer[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
                assert len({chunk["id"] for chunk in answer}) == 1
            else:
                assert without_ids(answer) == without_ids(expected)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
            assert running.attempts == [(0, 0, []), (0, 1, output[:cut])]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_name_the_drafters_of_the_verifier_that_wrote_them(
    settings: GatewaySettings, tokenizer: Tokenizer, stream: bool
) -> None:
    """The verifiers number the same drafters differently."""
    output = tokenizer.encode(TEXT)[:6]
    trees = [
        verifier_pb2.VerifiedTree(token_ids=output[:3], parents=[-1, 0, 1], sources=[0, *sources], accepted=[1])
        for sources in ([1, 2], [2, 1])
    ]

    async def first(player: Player) -> None:
        player.tokens(output[:3], sources=[0, 1, 2], tree=trees[0])

    async def second(player: Player) -> None:
        # The gateway has not heard of the third one.
        player.tokens(output[3:], sources=[1, 2, 3], tree=trees[1])
        player.finish()

    body = {"prompt": "def add", "max_tokens": 6, "stream": stream}
    async with deployment(settings, tokenizer) as running:
        await running.start(first, drafters=("eagle3", "ngram"))
        wanted = {"return_token_sources": True, "return_draft_tree": True}
        asked = asyncio.create_task(running.http.post(URL, json={**body, **wanted}))
        pool = running.gateway.verifiers
        await running.until(lambda: [len(sequence._emitted) for sequence in pool._sequences] == [3])
        await running.kill()
        await running.start(second, drafters=("ngram", "eagle3"))
        text = (await asked).text
    choices = [chunk["choices"][0] for chunk in (events(text) if stream else [json.loads(text)])]
    assert [name for choice in choices for name in choice["token_drafters"]] == [
        None,
        *("eagle3", "ngram"),
        *("ngram", "eagle3", "drafter 3"),
    ]
    assert [number for choice in choices for number in choice["token_sources"]] == [0, 1, 2, 1, 2, 3]
    shown = [choice["draft_tree"]["drafters"] for choice in choices if choice["draft_tree"]]
    assert shown == [[None, "eagle3", "ngram"]] * len(shown) and len(shown) == (2 if stream else 1)


@pytest.mark.parametrize("cuts", [[None, 2, 1], [1, None, None], [1, 1, 1]])
async def test_choices_of_different_lengths_go_on_separately(
    settings: GatewaySettings, tokenizer: Tokenizer, cuts: list[int | None]
) -> None:
    """A choice that has ended stays ended; the others go on from where they were."""
    outputs = [tokenizer.encode(text) for text in ("hello stop", "hello wörld 🙂", "日本語 stop here")]
    body = {"prompt": "a", "n": 3, "stream": True, "max_tokens": 50, "stream_options": {"include_usage": True}}
    async with deployment(settings, tokenizer) as running:

        async def ask() -> Any:
            return events((await running.http.post(URL, json=body)).text)

        expected = await undisturbed(running, ask, outputs)
        answer = await disturbed(running, ask, outputs, cuts)
        assert joined(answer) == joined(expected)
        assert answer[-1]["usage"] == expected[-1]["usage"]
        resumed = [(index, 1, outputs[index][:cut]) for index, cut in enumerate(cuts) if cut is not None]
        assert running.attempts == [(0, 0, []), (1, 0, []), (2, 0, []), *resumed]


async def test_grpc_and_generate_go_on_too(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode(TEXT)
    stats = common_pb2.SpeculationStats(num_decode_steps=4)
    async with deployment(settings, tokenizer) as running:

        async def ask_grpc() -> list[gateway_pb2.GenerateResponse]:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.grpc_port}") as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                sampling = common_pb2.SamplingParams(max_tokens=50)
                return [r async for r in stub.Generate(gateway_pb2.GenerateRequest(text="a", sampling=sampling))]

        answer = await disturbed(running, ask_grpc, [output], [5])
        chunks = [response.chunk for response in answer[:-1]]
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == output
        assert "".join(chunk.text for chunk in chunks) == TEXT
        offsets = [chunk.offset for chunk in chunks]
        assert offsets == [sum(len(chunk.token_ids) for chunk in chunks[:k]) for k in range(len(chunks))]
        assert (answer[-1].complete.num_output_tokens, answer[-1].complete.num_cached_tokens) == (len(output), 7)
        await running.kill()

        async def ask_generate() -> Any:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 50}, "stream": True}
            return events((await running.http.post("/generate", json=body)).text)

        last = (await disturbed(running, ask_generate, [output], [5], stats=stats))[-1]
        assert (last["text"], last["output_ids"]) == (TEXT, output)
        # The formula divides tokens by steps, both since the resume.
        assert last["meta_info"]["spec_accept_length"] == (len(output) - 5) / 4


async def test_accepted_resumes_are_counted_and_waiting_is_not(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer, resume_attempts=2) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        for losses in range(3):
            await running.verifiers[-1].until(lambda: len(running.verifiers[-1].submitted) == 1)
            await running.until_tokens_come()
            await running.kill()
            if losses < 2:
                await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
                await running.start(silent)
        *_, last = events((await asked).text)
        assert last["error"]["type"] == "service_unavailable_error"
        assert "after 2 resumes" in last["error"]["message"]
        assert [attempt for _, attempt, _ in running.attempts] == [0, 1, 2]
        assert running.gateway.verifiers.num_sequences == 0


async def test_a_stream_whose_verifier_does_not_come_back_ends_at_its_deadline(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        await running.until_tokens_come()
        (placement,) = running.gateway.verifiers._sequences
        placement.deadline = asyncio.get_running_loop().time()
        await running.kill()
        *_, last = events((await asked).text)
        assert last["error"]["type"] == "service_unavailable_error" and "deadline" in last["error"]["message"]
        assert running.gateway.verifiers.num_sequences == 0


async def test_the_remaining_time_goes_with_a_resume(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer) as running:
        await disturbed(running, lambda: ask(running), [[65, 66, 67]], [1])
        first, second = (verifier.submitted[0] for verifier in running.verifiers)
        assert 0 < second.timeout_ms < first.timeout_ms <= 600_000
        assert second.model_fingerprint == "fp"


async def test_comments_keep_the_connection_open_while_a_stream_waits(
    settings: GatewaySettings, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "WAITING_NEWS_S", 0.01)
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        request = running.http.build_request("POST", URL, json={"prompt": "a", "stream": True})
        answer = await running.http.send(request, stream=True)
        lines = answer.aiter_lines()
        first = await anext(lines)
        await running.kill()
        comments = [first]
        while sum(line.startswith(":") for line in comments) < 3:
            comments.append(await anext(lines))
        await running.start(steps([67], reason=STOP))
        rest = [line async for line in lines]
        data = [json.loads(line[6:]) for line in [*comments, *rest] if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in data) == tokenizer.decode([65, 66, 67])
        assert rest[-2:] == ["data: [DONE]", ""]


async def test_an_output_that_was_complete_when_its_verifier_died_is_not_resumed(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running, max_tokens=2))
        placements = running.gateway.verifiers._sequences
        await running.until(lambda: any(len(placement._emitted) == 2 for placement in placements))
        await running.kill()
        chunks = events((await asked).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length" and len(running.attempts) == 1


async def test_a_client_that_leaves_while_its_stream_waits_is_forgotten(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: bool(running.attempts))
        await running.kill()
        await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await running.until(lambda: running.gateway.verifiers.num_sequences == 0)
        assert running.gateway.verifiers.num_waiting == 0
        await running.start(steps([65], reason=STOP))
        assert (await ask(running)).status_code == 200 and len(running.attempts) == 2


async def test_a_drained_gateway_fails_what_waits(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer, drain_timeout_s=0.0) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        await running.until_tokens_come()
        await running.kill()
        await running.gateway.drain()
        *_, last = events((await asked).text)
        assert last["error"]["message"] == "the server is shutting down"
