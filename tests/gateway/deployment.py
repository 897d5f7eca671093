"""A real gateway, and scripted verifiers that come, die and come back at the addresses it knows."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.config import GatewaySettings
from gateway.discovery.source import VerifierSource
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from gateway.verifier_client import VerifierClient
from protos import common_pb2
from tests.gateway.scripted_verifier import ABORT, LENGTH, Player, Script, ScriptedVerifier, serving
from tests.support.tcp_clients import JSON_TYPE

URL = "/v1/completions"
TEXT = "hello wörld 日本語 stop here"


def logprob(token_id: int) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=token_id, logprob=-math.log(token_id + 2), rank=1, top_ids=[token_id], top_logprobs=[-0.5]
    )


class Deployment:
    """A gateway, and verifiers that come and go at ``addresses``."""

    def __init__(
        self,
        gateway: Gateway,
        http: httpx.AsyncClient,
        settings: GatewaySettings,
        tokenizer: Tokenizer,
        addresses: tuple[str, ...],
    ) -> None:
        self.gateway, self.http, self.settings, self.tokenizer = gateway, http, settings, tokenizer
        self.addresses = addresses
        self.verifiers: list[ScriptedVerifier] = []
        self._servers: dict[int, AsyncExitStack] = {}

    async def start(
        self,
        script: Script,
        number: int = 0,
        *,
        fingerprint: str = "fp",
        queue_room: int | None = None,
        awaits_drafters: bool = False,
        drafters: Sequence[str] = (),
    ) -> ScriptedVerifier:
        """Start a new verifier at address ``number``, and wait
        for its session if the gateway knows it.

        With ``queue_room`` it has no heartbeats. ``drafters``: names in place of ``ngram`` alone.
        """
        verifier = ScriptedVerifier(self.tokenizer.vocab_size)
        verifier.queue_room, verifier.heartbeats = queue_room, queue_room is None
        verifier.script, verifier.awaits_drafters = script, awaits_drafters
        verifier.gateway = self.gateway
        verifier.info.model_fingerprint = fingerprint
        if drafters:
            del verifier.info.drafters[:]
            for name in drafters:
                verifier.info.drafters.add(name=name, state="attached")
        stack = self._servers[number] = AsyncExitStack()
        await stack.enter_async_context(serving(verifier, Path(self.addresses[number].removeprefix("unix:"))))
        self.verifiers.append(verifier)
        if (client := self.client(number)) is not None:
            await client.wait_up()
        return verifier

    def client(self, number: int) -> VerifierClient | None:
        """Return the gateway's client for address ``number``; None if it knows none."""
        known = {client.address: client for client in self.gateway.verifiers.clients}
        return known.get(self.addresses[number])

    async def kill(self, number: int = 0) -> None:
        await self._servers.pop(number).aclose()
        client = self.client(number)
        await self.until(lambda: client is None or not client.is_up)

    async def close(self) -> None:
        for stack in self._servers.values():
            await stack.aclose()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.http.get("/health")

    async def until_tokens_come(self) -> None:
        """Return once the gateway has tokens of a request, so that its stream begins."""
        await self.until(lambda: any(sequence._emitted for sequence in self.gateway.verifiers._sequences))

    @property
    def attempts(self) -> list[tuple[int, int, list[int]]]:
        """Return choice, attempt and tokens so far of everything submitted, in order."""
        return [(s.choice_index, s.attempt, list(s.output_token_ids)) for v in self.verifiers for s in v.submitted]


@asynccontextmanager
async def deployment(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    num_verifiers: int = 1,
    *,
    source: VerifierSource | None = None,
    **more: Any,
) -> AsyncIterator[Deployment]:
    """Run a gateway that knows ``num_verifiers`` addresses, or what ``source`` or ``more`` says."""
    folder = Path(settings.verifiers[0].removeprefix("unix:")).parent
    addresses = tuple(f"unix:{folder}/v{number}.sock" for number in range(num_verifiers))
    settings = settings.model_copy(update={"verifiers": addresses, **more})
    async with (
        Gateway(settings, source) as gateway,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.port}", timeout=None, headers=JSON_TYPE, verify=False
        ) as http,
    ):
        running = Deployment(gateway, http, settings, tokenizer, addresses)
        try:
            yield running
        finally:
            await running.close()


def playing(
    outputs: list[list[int]], cuts: list[int | None], *, with_logprobs: bool = False, stats: Any = None
) -> Script:
    """Play ``outputs[choice]`` token by token from where the sequence stands.

    An attempt that finds fewer than ``cuts[choice]`` tokens stays silent from that cut on, until it
    is killed (None: it plays to the end).
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
            await player.taken()
        player.finish(ABORT if player.aborted.is_set() else LENGTH, stats)

    return play


def joined(chunks: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Return a stream's text, logprobs and finish reasons by choice, without chunk borders."""
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


async def silent(player: Player) -> None:
    """Play two tokens, then nothing more."""
    player.tokens([65, 66][len(player.sequence.output_token_ids) :])


async def ask(running: Deployment, **more: Any) -> httpx.Response:
    return await running.http.post(URL, json={"prompt": "a", "max_tokens": 20, "stream": True, **more})
