"""Verifiers come and go while a gateway runs, and requests go where their prefix is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config import GatewaySettings
from gateway.discovery.pushed_set import PushedSet
from gateway.messages import VerifierInfo
from gateway.tokenizer import Tokenizer
from gateway.verifier_client import VerifierClient
from protos import verifier_pb2
from tests.gateway.conftest import events
from tests.gateway.deployment import TEXT, Deployment, ask, deployment, playing, silent
from tests.gateway.scripted_verifier import ScriptedVerifier, steps

pytestmark = pytest.mark.anyio

LONG_PROMPT = "def add(first, second): return first + second " * 4


def served(verifier: ScriptedVerifier) -> int:
    return len(verifier.submitted)


async def decisions(running: Deployment) -> dict[str, float]:
    """Return the counts of the gateway's metric by reason."""
    name = "foretoken_gateway_routing_decisions_total{"
    lines = [line for line in (await running.http.get("/metrics")).text.splitlines() if line.startswith(name)]
    return {line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_a_file_says_which_verifiers_there_are(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A verifier that the file no longer names finishes its stream and gets nothing new."""
    path = tmp_path / "verifiers"
    more = {"verifiers": (f"file:{path}",), "discovery_interval_s": 0.1, "verifier_wait_s": 0.0}
    async with deployment(settings, tokenizer, num_verifiers=2, **more) as running:
        await running.until(lambda: "cannot be read" in running.gateway.verifiers.known.reason)
        answer = await ask(running)
        assert answer.status_code == 503 and "cannot be read" in answer.json()["error"]["message"]
        go_on = asyncio.Event()
        output = tokenizer.encode(TEXT)

        async def play(player: object) -> None:
            await go_on.wait()
            await playing([output], [None])(player)  # type: ignore[arg-type]

        old = await running.start(play, 0)
        path.write_text(f"{running.addresses[0]}\n")
        await running.until(lambda: running.gateway.verifiers.is_up)
        asked = asyncio.create_task(ask(running, max_tokens=50))
        await running.until(lambda: served(old) == 1)
        new = await running.start(steps([65]), 1)
        path.write_text(f"{running.addresses[1]}\n")
        await running.until(lambda: (client := running.client(0)) is not None and client.is_leaving)
        await running.until(lambda: running.gateway.verifiers.is_up)
        for _ in range(3):
            assert (await ask(running)).status_code == 200
        assert (served(old), served(new)) == (1, 3)
        assert not old.num_ended_sessions
        go_on.set()
        chunks = events((await asked).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        await running.until(lambda: running.client(0) is None and old.num_ended_sessions == 1)
        assert [verifier["address"] for verifier in (await running.http.get("/ready")).json()["verifiers"]] == [
            running.addresses[1]
        ]


async def test_a_program_can_say_it_too_and_change_its_mind(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    source = PushedSet()
    async with deployment(settings, tokenizer, num_verifiers=2, source=source) as running:
        first = await running.start(silent, 0)
        second = await running.start(silent, 1)
        source.set(running.addresses[:1])
        await running.until(lambda: running.gateway.verifiers.is_up)
        streams = [asyncio.create_task(ask(running))]
        await running.until(lambda: served(first) == 1)
        source.set(running.addresses[1:])
        await running.until(lambda: running.client(1) is not None and running.gateway.verifiers.is_up)
        streams.append(asyncio.create_task(ask(running)))
        await running.until(lambda: served(second) == 1)
        # The first comes back in the session that it never lost, and is the emptier one by then.
        source.set(running.addresses)
        await running.until(lambda: all(client.is_up for client in running.gateway.verifiers.clients))
        streams += [asyncio.create_task(ask(running)) for _ in range(2)]
        await running.until(lambda: served(first) + served(second) == 4)
        assert (served(first), served(second), first.num_sessions) == (2, 2, 1)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize("path", ["/ready", "/version", "/metrics"])
@pytest.mark.parametrize(("before", "after"), [([0], [0, 1]), ([0, 1], [1])])
async def test_verifiers_may_come_and_go_while_they_are_asked_for_figures(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    before: list[int],
    after: list[int],
) -> None:
    source = PushedSet()
    async with deployment(settings, tokenizer, num_verifiers=2, source=source) as running:
        for number in range(2):
            await running.start(silent, number)

        async def change(numbers: list[int]) -> None:
            source.set([running.addresses[number] for number in numbers])
            wanted = [number in numbers for number in range(2)]
            await running.until(
                lambda: (
                    [(client := running.client(number)) is not None and client.is_up for number in range(2)] == wanted
                )
            )

        await change(before)
        known = running.gateway.verifiers.clients
        asked, answers = asyncio.Event(), asyncio.Event()
        fetch_info = VerifierClient.fetch_info

        async def held(client: VerifierClient) -> VerifierInfo:
            # A new session asks too.
            if client in known:
                asked.set()
                await answers.wait()
            return await fetch_info(client)

        monkeypatch.setattr(VerifierClient, "fetch_info", held)
        answer = asyncio.create_task(running.http.get(path))
        await asked.wait()
        await change(after)
        answers.set()
        assert (await answer).status_code == 200


async def test_a_leaving_verifier_that_dies_hands_its_stream_over(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    source = PushedSet()
    output = tokenizer.encode(TEXT)
    async with deployment(settings, tokenizer, num_verifiers=2, source=source) as running:
        await running.start(playing([output], [4]), 0)
        source.set(running.addresses[:1])
        await running.until(lambda: running.gateway.verifiers.is_up)
        asked = asyncio.create_task(ask(running, max_tokens=50))
        await running.until(lambda: any(len(s._emitted) == 4 for s in running.gateway.verifiers._sequences))
        other = await running.start(playing([output], [None]), 1)
        source.set(running.addresses[1:])
        await running.until(lambda: running.client(1) is not None and running.gateway.verifiers.is_up)
        await running.kill(0)
        chunks = events((await asked).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        assert [(s.attempt, len(s.output_token_ids)) for s in other.submitted] == [(1, 4)]
        assert [client.address for client in running.gateway.verifiers.clients] == [running.addresses[1]]


async def test_a_stream_never_goes_to_a_new_verifier_with_another_model(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    """A rolling update: the old model's last verifier dies while it drains."""
    source = PushedSet()
    async with deployment(settings, tokenizer, num_verifiers=2, source=source) as running:
        await running.start(silent, 0, fingerprint="old")
        source.set(running.addresses[:1])
        await running.until(lambda: running.gateway.verifiers.is_up)
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: len(running.attempts) == 1)
        new = await running.start(steps([65]), 1, fingerprint="new")
        source.set(running.addresses[1:])
        await running.until(lambda: running.client(1) is not None and running.gateway.verifiers.is_up)
        await running.kill(0)
        *_, last = events((await asked).text)
        assert "another model" in last["error"]["message"] and not new.submitted
        assert (await ask(running)).status_code == 200


async def test_a_conversation_stays_where_its_prefix_is(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async with deployment(settings, tokenizer, num_verifiers=4) as running:
        verifiers = [await running.start(steps([65]), number) for number in range(4)]
        assert len(tokenizer.encode(LONG_PROMPT)) > 40
        for turn in range(4):
            prompt = LONG_PROMPT + "hello " * turn
            assert (await ask(running, prompt=prompt, max_tokens=2)).status_code == 200
        assert sorted(map(served, verifiers)) == [0, 0, 0, 4]
        assert await decisions(running) == {"affinity": 4, "spread": 0, "load": 0, "only": 0}
        for name in range(60):
            assert (await ask(running, prompt=LONG_PROMPT, max_tokens=2, cache_salt=str(name))).status_code == 200
        assert min(map(served, verifiers)) > 0
        home = max(range(4), key=lambda number: served(verifiers[number]))
        await running.kill(home)
        await ask(running)
        assert (await decisions(running))["load"] == 1


async def test_load_that_verifiers_tell_of_other_gateways_counts(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async with deployment(settings, tokenizer, num_verifiers=2) as running:
        verifiers = [await running.start(steps([65]), number) for number in range(2)]
        await ask(running, prompt=LONG_PROMPT)
        home = 0 if verifiers[0].submitted else 1
        for number, num_running in ((home, 60), (1 - home, 2)):
            verifiers[number].load = verifier_pb2.Load(
                num_running=num_running, num_waiting=3, max_running=32, num_blocks=100, num_free_blocks=60
            )
        figures = [client.figures for client in running.gateway.verifiers.clients]
        await running.until(lambda: sorted(figure.num_others for figure in figures) == [5, 63])
        await ask(running, prompt=LONG_PROMPT)
        assert served(verifiers[1 - home]) == 1
        # Nearly all of its blocks are in use, so the busy one is better.
        verifiers[1 - home].load.num_free_blocks = 1
        await running.until(lambda: any(f.load is not None and f.load.num_free_blocks == 1 for f in figures))
        await ask(running, prompt=LONG_PROMPT)
        assert await decisions(running) == {"affinity": 1, "spread": 1, "load": 1, "only": 0}
