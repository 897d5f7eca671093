"""The session with the verifier: identities, offsets, breaks, silence, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from foretoken.errors import ForetokenError, UnavailableError
from foretoken.sampling import SamplingParams, SpeculationOptions
from gateway.messages import Finished, FinishReason, SequenceSpec, TokenLogprobs
from gateway.verifier_client import VerifierClient
from protos import verifier_pb2
from tests.gateway.scripted_verifier import LENGTH, Player, ScriptedVerifier, serving, steps

pytestmark = pytest.mark.anyio


class Sink:
    """Collects the events of one sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sources: list[int] = []
        self.finished: Finished | None = None
        self.error: ForetokenError | None = None
        self.ended = asyncio.Event()

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        sources: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        self.ids += token_ids
        self.sources += sources

    def on_finished(self, finished: Finished) -> None:
        self.finished = finished
        self.ended.set()

    def on_error(self, error: ForetokenError) -> None:
        self.error = error
        self.ended.set()


def spec(request_id: str = "r", choice_index: int = 0, **fields: object) -> SequenceSpec:
    return SequenceSpec(request_id, choice_index, (1, 2), SamplingParams(), SpeculationOptions(), **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def connected(path: Path, silence_limit_s: float = 5.0) -> AsyncIterator[tuple[ScriptedVerifier, VerifierClient]]:
    verifier = ScriptedVerifier(vocab_size=100)
    async with serving(verifier, path) as address:
        client = VerifierClient(address, silence_limit_s=silence_limit_s)
        task = asyncio.create_task(client.run())
        await client.wait_up()
        try:
            yield verifier, client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def play(client: VerifierClient, request: SequenceSpec) -> Sink:
    sink = Sink()
    client.submit(request, sink)
    async with asyncio.timeout(20):
        await sink.ended.wait()
    return sink


async def test_events_find_their_sequence(tmp_path: Path) -> None:
    async def script(player: Player) -> None:
        player.tokens([player.sequence.choice_index, 9])
        player.finish(LENGTH)

    async with connected(tmp_path / "s") as (verifier, client):
        verifier.script = script
        sinks = await asyncio.gather(*(play(client, spec(choice_index=choice)) for choice in range(3)))
        assert [sink.ids for sink in sinks] == [[0, 9], [1, 9], [2, 9]]
        assert client.num_sequences == 0
        assert client.info.limits.drafter_names == ("ngram",)


async def test_other_attempts_and_overlaps_are_dropped(tmp_path: Path) -> None:
    async def script(player: Player) -> None:
        player.tokens([10, 11, 12], offset=5)
        player.tokens([99], offset=8, attempt=1)
        player.tokens([11, 12, 13], offset=6, sources=[1, 2, 0])
        player.tokens([13], offset=8)
        player.finish(LENGTH)

    async with connected(tmp_path / "s") as (verifier, client):
        verifier.script = script
        sink = await play(client, spec(attempt=2, output_ids=(1, 2, 3, 4, 5)))
        assert (sink.ids, sink.sources) == ([10, 11, 12, 13], [1, 1, 0, 0])
        assert list(verifier.submitted[0].output_token_ids) == [1, 2, 3, 4, 5]


async def test_a_gap_is_an_internal_error_and_ends_the_sequence(tmp_path: Path) -> None:
    async def script(player: Player) -> None:
        player.tokens([10], offset=0)
        player.tokens([12], offset=2)

    async with connected(tmp_path / "s") as (verifier, client):
        verifier.script = script
        sink = await play(client, spec())
        assert sink.ids == [10] and sink.error is not None and sink.error.http_status == 500
        await verifier.until(lambda: len(verifier.aborts) == 1)
        verifier.script = steps([1])
        assert (await play(client, spec("other"))).ids == [1]


async def test_dropped_sequences_get_nothing_more(tmp_path: Path) -> None:
    async def script(player: Player) -> None:
        await player.aborted.wait()
        player.tokens([1])
        player.finish(LENGTH)

    async with connected(tmp_path / "s") as (verifier, client):
        verifier.script = script
        sink = Sink()
        client.submit(spec(), sink)
        client.drop("r", 0)
        client.drop("r", 0)
        verifier.script = steps([1])
        await play(client, spec("later"))
        assert (sink.ids, sink.finished, sink.error) == ([], None, None)
        assert len(verifier.aborts) == 1 and not verifier.aborts[0].HasField("kept_tokens")


async def test_a_restarted_verifier_is_found_again(tmp_path: Path) -> None:
    changes: list[bool] = []

    async def on_change(up: bool) -> None:
        changes.append(up)

    client = VerifierClient(f"unix:{tmp_path / 's'}", on_change=on_change)
    with pytest.raises(UnavailableError):
        client.submit(spec(), Sink())
    task = asyncio.create_task(client.run())
    for attempt in range(2):
        verifier = ScriptedVerifier(vocab_size=100 + attempt)
        verifier.script = lambda player: player.aborted.wait()
        async with serving(verifier, tmp_path / "s"):
            await client.wait_up()
            assert client.info.vocab_size == 100 + attempt
            sink = Sink()
            client.submit(spec(), sink)
            await verifier.until(lambda verifier=verifier: len(verifier.submitted) == 1)
        await sink.ended.wait()
        assert isinstance(sink.error, UnavailableError) and not client.is_up
        with pytest.raises(UnavailableError):
            client.submit(spec(), Sink())
        with pytest.raises(UnavailableError):
            await client.fetch_info()
    assert changes == [True, False, True, False]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_silent_verifier_is_a_dead_one(tmp_path: Path) -> None:
    async with connected(tmp_path / "s", silence_limit_s=0.5) as (verifier, client):
        verifier.script = lambda player: player.aborted.wait()
        sink = Sink()
        client.submit(spec(), sink)
        verifier.heartbeats = False
        await sink.ended.wait()
        assert sink.error is not None and "silent" in sink.error.message
        verifier.heartbeats = True
        verifier.script = steps([7])
        await client.wait_up()
        assert verifier.num_sessions == 2
        finished = (await play(client, spec("again"))).finished
        assert finished is not None and finished.reason is FinishReason.LENGTH


async def test_figures_that_are_asked_for_as_the_session_breaks_are_unavailable(tmp_path: Path) -> None:
    """A bug once: the channel's end cancels the call, and the cancellation ended the caller's own request."""
    asked = asyncio.Event()

    class Slow(ScriptedVerifier):
        async def GetInfo(
            self, request: verifier_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
        ) -> verifier_pb2.GetInfoResponse:
            if asked.is_set():
                await asyncio.Event().wait()
            return self.info

    verifier = Slow(vocab_size=100)
    async with serving(verifier, tmp_path / "v.sock") as address:
        client = VerifierClient(address)
        session = asyncio.create_task(client.run())
        await client.wait_up()
        asked.set()
        fetching = asyncio.create_task(client.fetch_info())
        await asyncio.sleep(0)
        session.cancel()
        with pytest.raises(UnavailableError, match="does not answer"):
            await fetching
        await asyncio.gather(session, return_exceptions=True)
