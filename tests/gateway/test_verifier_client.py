"""The session with the verifier: identities, offsets, breaks, silence, restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from foretoken import rpc
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.free_ports import free_ports
from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams, SpeculationOptions
from gateway.messages import Finished, NewTokens, SequenceSpec
from gateway.verifier_client import (
    NOT_THERE,
    RESTARTING,
    SILENCE_LIMIT_S,
    STARTING,
    VerifierClient,
    _SilenceWatch,
)
from protos import verifier_pb2_grpc
from tests.gateway.scripted_verifier import LENGTH, Player, ScriptedVerifier, serving, steps

pytestmark = pytest.mark.anyio


class Sink:
    """A sink that collects the events of one sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sources: list[int] = []
        self.finished: Finished | None = None
        self.error: ForetokenError | None = None
        self.refused = ""
        self.lost = ""
        self.ended = asyncio.Event()

    def on_tokens(self, tokens: NewTokens) -> None:
        self.ids += tokens.ids
        self.sources += tokens.sources

    def on_finished(self, finished: Finished) -> None:
        self.finished = finished
        self.ended.set()

    def on_error(self, error: ForetokenError) -> None:
        self.error = error
        self.ended.set()

    def on_refused(self, reason: str) -> None:
        self.refused = reason
        self.ended.set()

    def on_lost(self, reason: str) -> None:
        self.lost = reason
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

    async def on_change() -> None:
        changes.append(client.is_up)

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
        assert sink.lost and sink.error is None and not client.is_up
        with pytest.raises(UnavailableError):
            client.submit(spec(), Sink())
        with pytest.raises(UnavailableError):
            await client.fetch_info()
    assert changes == [True, False, True, False]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_end_of_a_client_that_just_connects_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC takes a cancellation for its own while it prepares a
    call, and then reports why the call failed.
    """
    reading, again = asyncio.Event(), asyncio.Event()

    class Call:
        async def __aiter__(self) -> AsyncIterator[Any]:
            if reading.is_set():
                again.set()
                await asyncio.Event().wait()
            reading.set()
            try:
                await asyncio.Event().wait()
                yield
            except asyncio.CancelledError:
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
                ) from None

        async def write(self, message: Any) -> None:
            raise AssertionError("nothing was submitted")

        def cancel(self) -> None:
            pass

    class Stub:
        def __init__(self, channel: Any) -> None:
            self.Session = Call

    monkeypatch.setattr(verifier_pb2_grpc, "VerifierServiceStub", Stub)
    task = asyncio.create_task(VerifierClient(f"127.0.0.1:{free_ports(1)[0]}").run())
    await reading.wait()
    task.cancel()
    connects = asyncio.create_task(again.wait())
    await asyncio.wait({task, connects}, return_when=asyncio.FIRST_COMPLETED)
    assert task.cancelled() and not again.is_set()
    connects.cancel()


async def reason_of(client: VerifierClient, reason: str) -> None:
    """Wait until there is no session because of ``reason``."""
    while client.is_up or client.reason != reason:
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_one_that_loads_is_told_apart_from_one_that_is_not_there(kind: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'v.sock'}" if kind == "unix" else f"127.0.0.1:{free_ports(1)[0]}"
    client = VerifierClient(address)
    running = asyncio.create_task(client.run())
    try:
        for waits_for in ((NOT_THERE, STARTING), ("the verifier cannot be reached: UNAVAILABLE", RESTARTING)):
            await reason_of(client, waits_for[0])
            # As the service does: it binds, loads its model, and serves only then.
            server = rpc.async_server()
            rpc.bind(server, address)
            await reason_of(client, waits_for[1])
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(vocab_size=100), server)
            await server.start()
            await client.wait_up()
            await server.stop(None)
            rpc.remove_socket(address)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_silent_verifier_is_a_dead_one(tmp_path: Path) -> None:
    async with connected(tmp_path / "s", silence_limit_s=0.5) as (verifier, client):
        verifier.script = lambda player: player.aborted.wait()
        sink = Sink()
        client.submit(spec(), sink)
        verifier.heartbeats = False
        await sink.ended.wait()
        assert "silent" in sink.lost
        # The next session stays, however slow the machine is.
        client._silence_limit_s = SILENCE_LIMIT_S
        verifier.heartbeats = True
        verifier.script = steps([7])
        await client.wait_up()
        assert verifier.num_sessions > 1
        finished = (await play(client, spec("again"))).finished
        assert finished is not None and finished.reason is FinishReason.LENGTH


async def test_a_gateway_that_was_stopped_itself_does_not_take_its_verifier_for_dead() -> None:
    class Call:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    call = Call()
    watch = _SilenceWatch(call, 0.2)
    # As by SIGSTOP and SIGCONT: this process stands still, and then the timer is long overdue.
    time.sleep(1.0)
    loop = asyncio.get_running_loop()
    read = asyncio.Event()
    loop.call_later(0.05, lambda: (watch.touch(), read.set()))
    await read.wait()
    assert not call.cancelled
    # A verifier that is still silent is found.
    while not watch.expired:
        await asyncio.sleep(0.01)
    assert call.cancelled


async def test_a_question_that_a_break_cuts_off_is_unavailable_and_no_cancellation(tmp_path: Path) -> None:
    class Mute(ScriptedVerifier):
        """A verifier that answers only the first question."""

        num_questions = 0

        async def GetInfo(self, request: Any, context: Any) -> Any:
            self.num_questions += 1
            if self.num_questions > 1:
                asked.set()
                await asyncio.Event().wait()
            return self.info

    asked = asyncio.Event()
    client = VerifierClient(f"unix:{tmp_path / 's'}", silence_limit_s=0.5)
    task = asyncio.create_task(client.run())
    verifier = Mute(vocab_size=100)
    async with serving(verifier, tmp_path / "s"):
        await client.wait_up()
        question = asyncio.create_task(client.fetch_info())
        await asked.wait()
        verifier.heartbeats = False
        with pytest.raises(UnavailableError):
            await question
        question = asyncio.create_task(client.fetch_info())
        asked.clear()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(UnavailableError):
            await question
