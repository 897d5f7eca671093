"""The pool chooses a verifier for each sequence, and queues requests that none can take now."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewaySettings
from gateway.grpc.api import SERVICE_NAME
from gateway.tokenizer import Tokenizer
from tests.gateway.conftest import events
from tests.gateway.deployment import TEXT, URL, Deployment, ask, deployment, joined, playing, silent
from tests.gateway.scripted_verifier import STOP, Player, steps

pytestmark = pytest.mark.anyio


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


async def is_ready(running: Deployment) -> bool:
    """Return what /ready says, which the health of the gRPC API must say too."""
    status = (await running.http.get("/ready")).status_code
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.settings.grpc_port}") as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (status == 200) == (health.status == health_pb2.HealthCheckResponse.SERVING)
    return status == 200


async def test_a_new_stack_is_ready_when_its_drafters_are_and_serves_before(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer) as running:
        verifier = await running.start(steps([65], reason=STOP), awaits_drafters=True)
        assert not await is_ready(running)
        assert (await ask(running)).status_code == 200
        verifier.awaits_drafters = False
        await running.until(lambda: running.gateway.verifiers.is_ready)
        assert await is_ready(running)


async def test_a_stack_that_was_ready_waits_for_no_drafter_when_its_verifier_restarts(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        assert await is_ready(running)
        await running.kill()
        assert not await is_ready(running)
        await running.start(silent, awaits_drafters=True)
        assert await is_ready(running)


async def test_a_stack_of_two_verifiers_waits_for_the_drafters_of_both(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        slow = await running.start(silent, 0, awaits_drafters=True)
        await running.start(silent, 1, awaits_drafters=True)
        running.verifiers[1].awaits_drafters = False
        await running.until(lambda: not running.gateway.verifiers.clients[1].awaits_drafters)
        assert not await is_ready(running)
        slow.awaits_drafters = False
        await running.until(lambda: running.gateway.verifiers.is_ready)


async def test_requests_to_a_gateway_that_has_just_started_wait_too(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer, max_concurrent_requests=2) as running:
        models = asyncio.create_task(running.http.get("/v1/models"))
        asked = asyncio.create_task(ask(running))
        admission = running.gateway.core.admission
        await running.until(lambda: admission.num_requests == 2)
        # Waiting requests are bounded like running ones.
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


async def test_a_stream_goes_on_at_the_other_verifier(
    settings: GatewaySettings, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = tokenizer.encode(TEXT)
    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        first, second = [await running.start(playing([output], [4]), number) for number in range(2)]
        asked = asyncio.create_task(ask(running, max_tokens=50))
        await running.until(lambda: len(running.attempts) == 1)
        used = 0 if first.submitted else 1
        other = (second, first)[used]
        other.script = playing([output], [None])
        await running.until(lambda: any(len(p._emitted) == 4 for p in running.gateway.verifiers._sequences))
        await running.kill(used)
        chunks = events((await asked).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        assert [(s.attempt, len(s.output_token_ids)) for s in other.submitted] == [(1, 4)]
        ready = (await running.http.get("/ready")).json()
        assert [verifier["up"] for verifier in ready["verifiers"]] == [bool(used), not used]
        (record,) = [record for record in caplog.records if record.getMessage() == "request"]
        assert vars(record)["verifiers"] == [running.addresses[used], running.addresses[1 - used]]


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
    """A sequence refused by a draining verifier goes to another without using an attempt."""

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
        # Another verifier with room for one takes one, and then both lost ones.
        other = await running.start(playing([output, output], [None, None]), 1, queue_room=1)
        assert (await ask(running, n=2)).status_code == 429
        await running.until(lambda: sum(len(p._emitted) == 3 for p in running.gateway.verifiers._sequences) == 2)
        await running.kill(0)
        chunks = events((await asked).text)
        assert [entry[0] for entry in joined(chunks).values()] == [TEXT, TEXT]
        assert [sequence.attempt for sequence in other.submitted] == [1, 1]
