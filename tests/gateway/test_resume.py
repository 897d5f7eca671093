"""Streams that outlive their verifier: what a client sees is what it sees undisturbed, but for a pause."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway import generation
from gateway.config import GatewaySettings
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import events
from tests.gateway.scripted_verifier import ABORT, LENGTH, STOP, Player, Script, ScriptedVerifier, serving, steps

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
TEXT = "hello wörld 日本語 stop here"


def logprob(token_id: int) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=token_id, logprob=-math.log(token_id + 2), rank=1, top_ids=[token_id], top_logprobs=[-0.5]
    )


class Deployment:
    """A gateway, and verifiers that come and go at the addresses it knows."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, settings: GatewaySettings, tokenizer: Tokenizer):
        self.gateway, self.http, self.settings, self.tokenizer = gateway, http, settings, tokenizer
        self.verifiers: list[ScriptedVerifier] = []
        self._servers: dict[int, AsyncExitStack] = {}

    async def start(
        self, script: Script, number: int = 0, *, fingerprint: str = "fp", queue_room: int | None = None
    ) -> ScriptedVerifier:
        """A new verifier at address ``number``, up. With ``queue_room`` it has no heartbeats."""
        verifier = ScriptedVerifier(self.tokenizer.vocab_size)
        verifier.queue_room, verifier.heartbeats = queue_room, queue_room is None
        verifier.script = script
        verifier.info.model_fingerprint = fingerprint
        stack = self._servers[number] = AsyncExitStack()
        await stack.enter_async_context(serving(verifier, Path(self.settings.verifiers[number].removeprefix("unix:"))))
        self.verifiers.append(verifier)
        await self.gateway.verifiers.clients[number].wait_up()
        return verifier

    async def kill(self, number: int = 0) -> None:
        await self._servers.pop(number).aclose()
        client = self.gateway.verifiers.clients[number]
        await self.until(lambda: not client.is_up)

    async def close(self) -> None:
        for stack in self._servers.values():
            await stack.aclose()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await self.http.get("/health")

    @property
    def attempts(self) -> list[tuple[int, int, list[int]]]:
        """Choice, attempt and tokens so far of all that was submitted, in order."""
        return [(s.choice_index, s.attempt, list(s.output_token_ids)) for v in self.verifiers for s in v.submitted]


@asynccontextmanager
async def deployment(
    settings: GatewaySettings, tokenizer: Tokenizer, num_verifiers: int = 1, **more: Any
) -> AsyncIterator[Deployment]:
    folder = Path(settings.verifiers[0].removeprefix("unix:")).parent
    addresses = tuple(f"unix:{folder}/v{number}.sock" for number in range(num_verifiers))
    settings = settings.model_copy(update={"verifiers": addresses, **more})
    async with (
        Gateway(settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as http,
    ):
        running = Deployment(gateway, http, settings, tokenizer)
        try:
            yield running
        finally:
            await running.close()


def playing(
    outputs: list[list[int]], cuts: list[int | None], *, with_logprobs: bool = False, stats: Any = None
) -> Script:
    """Plays ``outputs[choice]`` token by token from where the sequence stands. An attempt that finds fewer than
    ``cuts[choice]`` tokens stays silent from there on, until it is killed (None: it plays to the end).
    """

    async def play(player: Player) -> None:
        sequence = player.sequence
        output, cut = outputs[sequence.choice_index], cuts[sequence.choice_index]
        done = len(sequence.output_token_ids)
        assert list(sequence.output_token_ids) == output[:done]
        wants_prompt = with_logprobs and not done
        prompt = [logprob(token_id) for token_id in sequence.prompt_token_ids[1:]] if wants_prompt else []
        for index in range(done, len(output)):
            if player.aborted.is_set():
                break
            if cut is not None and done < cut <= index:
                return
            token_id = output[index]
            player.tokens(
                [token_id],
                logprobs=[logprob(token_id)] if with_logprobs else (),
                prompt_logprobs=prompt,
                num_cached_tokens=7 if not done and index == 0 else 0 if index == done else None,
            )
            prompt = []
            await asyncio.sleep(0)
        player.finish(ABORT if player.aborted.is_set() else LENGTH, stats)

    return play


async def undisturbed(running: Deployment, ask: Callable[[], Any], outputs: list[list[int]], **more: Any) -> Any:
    await running.start(playing(outputs, [None] * len(outputs), **more))
    answer = await ask()
    await running.kill()
    running.verifiers.clear()
    return answer


async def disturbed(
    running: Deployment, ask: Callable[[], Any], outputs: list[list[int]], cuts: list[int | None], **more: Any
) -> Any:
    """The answer when the verifier dies once each choice has come to its cut."""
    script = playing(outputs, cuts, **more)
    played = []

    async def play(player: Player) -> None:
        await script(player)
        played.append(player)

    await running.start(play)
    asked = asyncio.create_task(ask())
    await running.until(lambda: len(played) == len(outputs))
    # What was put out is on its way before the verifier goes.
    pool = running.gateway.verifiers
    kept = sorted(cut for cut in cuts if cut is not None)
    await running.until(lambda: sorted(len(p._emitted) for p in pool._placements) == kept)
    await running.kill()
    await running.start(playing(outputs, [None] * len(outputs), **more))
    return await asked


def without_ids(body: Any) -> Any:
    """An answer without what differs from request to request: ids, times, seeds drawn."""
    if isinstance(body, dict):
        skipped = ("id", "created", "metrics", "e2e_latency")
        return {key: without_ids(value) for key, value in body.items() if key not in skipped}
    return [without_ids(item) for item in body] if isinstance(body, list) else body


def joined(chunks: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """What a stream says of each choice: text, logprobs, finish reasons, whatever its chunks' borders."""
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = choices.setdefault(choice["index"], ["", {}, []])
            entry[0] += choice["text"]
            for key, values in (choice.get("logprobs") or {}).items():
                entry[1].setdefault(key, []).extend(values)
            if choice["finish_reason"]:
                entry[2].append((choice["finish_reason"], choice["stop_reason"]))
    return choices


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string across the cut": {"stop": ["語 stop"]},
    "min tokens": {"stop": ["o"], "min_tokens": 4},
    "logprobs": {"logprobs": 1},
    "prompt logprobs already sent": {"logprobs": 1, "echo": True},
    "token sources": {"return_token_sources": True},
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
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


@pytest.mark.parametrize("cuts", [[None, 2, 1], [1, None, None], [1, 1, 1]])
async def test_choices_of_different_lengths_go_on_each_by_itself(
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
        # The formula is tokens by steps, both since the resume.
        assert last["meta_info"]["spec_accept_length"] == (len(output) - 5) / 4


async def silent(player: Player) -> None:
    """Two tokens, then nothing more."""
    player.tokens([65, 66][len(player.sequence.output_token_ids) :])


async def ask(running: Deployment, **more: Any) -> httpx.Response:
    return await running.http.post(URL, json={"prompt": "a", "max_tokens": 20, "stream": True, **more})


async def test_accepted_resumes_are_counted_and_waiting_is_not(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer, resume_attempts=2) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        for losses in range(3):
            await running.verifiers[-1].until(lambda: len(running.verifiers[-1].submitted) == 1)
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
    async with deployment(settings, tokenizer, request_timeout_s=1.0) as running:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: bool(running.attempts))
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


async def test_a_new_request_waits_for_a_verifier_and_then_runs(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        await running.kill()
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
        assert (await running.http.get("/ready")).status_code == 503
        await running.start(steps([65], [66], reason=STOP))
        assert (await asked).status_code == 200
        assert running.attempts == [(0, 0, [])]


async def test_requests_to_a_gateway_that_has_just_started_wait_too(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer, max_concurrent_requests=2) as running:
        models = asyncio.create_task(running.http.get("/v1/models"))
        asked = asyncio.create_task(ask(running))
        admission = running.gateway.core.admission
        await running.until(lambda: admission.num_requests == 2)
        # What waits is bounded as what runs is.
        assert (await ask(running)).status_code == 429
        await running.start(steps([65], [66], reason=STOP))
        assert (await asked).status_code == (await models).status_code == 200
        assert admission.num_requests == 0


async def test_a_new_request_does_not_wait_for_ever(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer, verifier_wait_s=0.0) as running:
        await running.start(silent)
        await running.kill()
        answer = await ask(running)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert running.gateway.verifiers.num_sequences == 0


async def test_a_stream_goes_on_at_the_other_verifier(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode(TEXT)
    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        first, second = [await running.start(playing([output], [4]), number) for number in range(2)]
        asked = asyncio.create_task(ask(running, max_tokens=50))
        await running.until(lambda: len(running.attempts) == 1)
        used = 0 if first.submitted else 1
        other = (second, first)[used]
        other.script = playing([output], [None])
        await running.until(lambda: any(len(p._emitted) == 4 for p in running.gateway.verifiers._placements))
        await running.kill(used)
        chunks = events((await asked).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        assert [(s.attempt, len(s.output_token_ids)) for s in other.submitted] == [(1, 4)]
        ready = (await running.http.get("/ready")).json()
        assert [verifier["up"] for verifier in ready["verifiers"]] == [bool(used), not used]


async def test_the_choices_of_a_request_run_on_one_verifier_and_requests_on_the_emptier(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        verifiers = [await running.start(lambda player: player.aborted.wait(), number) for number in range(2)]
        asked = []
        for count in range(1, 4):
            asked.append(asyncio.create_task(ask(running, n=3)))
            await running.until(lambda count=count: len(running.attempts) == 3 * count)
        assert sorted(len(verifier.submitted) for verifier in verifiers) == [3, 6]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await running.until(lambda: running.gateway.verifiers.num_sequences == 0)


async def test_a_verifier_that_drains_gets_nothing_new_and_finishes(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    release = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await release.wait()
        player.tokens([66])
        player.finish(STOP)

    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        draining = await running.start(play, 0)
        asked = asyncio.create_task(ask(running))
        await draining.until(lambda: len(draining.submitted) == 1)
        draining.drain()
        await running.until(lambda: not running.gateway.verifiers.is_up)
        assert (await running.http.get("/ready")).status_code == 503
        other = await running.start(steps([67], reason=STOP), 1)
        for _ in range(3):
            assert (await ask(running)).status_code == 200
        assert (len(draining.submitted), len(other.submitted)) == (1, 3)
        release.set()
        assert "error" not in (await asked).text and len(running.attempts) == 4


async def test_a_refusal_is_no_attempt(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    """What reaches a verifier just as it begins to drain goes to another, and may be lost as often as before."""

    async def refuse(player: Player) -> None:
        player.error(grpc.StatusCode.UNAVAILABLE, "draining")

    async with deployment(settings, tokenizer, resume_attempts=0) as running:
        refusing = await running.start(refuse)
        asked = asyncio.create_task(ask(running))
        await refusing.until(lambda: len(refusing.submitted) == 1)
        await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
        await running.kill()
        await running.start(steps([65], reason=STOP))
        assert "error" not in (await asked).text
        assert [attempt for _, attempt, _ in running.attempts] == [0, 0]


async def test_a_stream_never_goes_on_with_another_model(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(silent, fingerprint="old")
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: bool(running.attempts))
        await running.kill()
        new = await running.start(steps([65], reason=STOP), fingerprint="new")
        *_, last = events((await asked).text)
        assert "another model" in last["error"]["message"] and not new.submitted
        assert (await ask(running)).status_code == 200


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
        placements = running.gateway.verifiers._placements
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
        await running.until(lambda: bool(running.attempts))
        await running.kill()
        await running.gateway.drain()
        *_, last = events((await asked).text)
        assert last["error"]["message"] == "the server is shutting down"


async def test_what_would_be_refused_is_refused_at_once_and_a_resume_never_is(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode(TEXT)
    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        script = playing([output, output], [3, 3])

        async def play(player: Player) -> None:
            assert full.queue_room is not None
            full.queue_room -= 1
            await script(player)

        full = await running.start(play, 0, queue_room=2)
        asked = asyncio.create_task(ask(running, n=2, max_tokens=50))
        await running.until(lambda: len(full.submitted) == 2)
        answer = await ask(running)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert len(full.submitted) == 2
        assert (await running.http.post(URL, content=b"{")).status_code == 429
        # Another with room for one takes one, and then both that were lost.
        other = await running.start(playing([output, output], [None, None]), 1, queue_room=1)
        assert (await ask(running, n=2)).status_code == 429
        await running.until(lambda: sum(len(p._emitted) == 3 for p in running.gateway.verifiers._placements) == 2)
        await running.kill(0)
        chunks = events((await asked).text)
        assert [entry[0] for entry in joined(chunks).values()] == [TEXT, TEXT]
        assert [sequence.attempt for sequence in other.submitted] == [1, 1]
