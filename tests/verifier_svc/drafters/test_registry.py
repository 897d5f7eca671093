"""Real n-gram drafter services attach and detach over real gRPC while a verifier serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken import rpc
from foretoken.corpora import token_bytes
from foretoken.drafting import TargetInfo
from foretoken.limits import ModelLimits
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.engine_harness import Harness
from tests.support.hash_target import HashTarget
from tests.support.mirror_drafter import MirrorDrafter
from tests.support.services import serving, verifier_info
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.registry import DrafterRegistry
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import DraftSource
from verifier_svc.service import VerifierService

pytestmark = pytest.mark.anyio
VOCAB = 40
NUM_TOKENS = 150
# As in the harness.
EPOCH = 41
TARGET = TargetInfo("test", VOCAB, max_model_len=256, max_batch_slots=8, max_nodes=8, block_size=4, num_blocks=200)


def ngram() -> NgramDrafter:
    return NgramDrafter(NgramSettings(capacity=2048))


@dataclass
class Verifier:
    """A verifier that serves without a drafter."""

    stub: Any
    harness: Harness
    sources: list[DraftSource]

    async def attach(self, name: str, address: str, transport: str = "") -> verifier_pb2.DrafterState:
        message = verifier_pb2.AttachDrafterRequest(name=name, address=address, transport=transport)
        return (await self.stub.AttachDrafter(message)).drafter

    async def detach(self, name: str) -> None:
        await self.stub.DetachDrafter(verifier_pb2.DetachDrafterRequest(name=name))

    async def drafters(self) -> dict[str, verifier_pb2.DrafterState]:
        info = await self.stub.GetInfo(verifier_pb2.GetInfoRequest())
        return {drafter.name: drafter for drafter in info.drafters}

    async def until(self, name: str, state: str, num_attaches: int = 1) -> verifier_pb2.DrafterState:
        while True:
            drafter = (await self.drafters())[name]
            if (drafter.state, drafter.num_attaches) == (state, num_attaches):
                return drafter
            await asyncio.sleep(0.01)

    async def generate(
        self, drafter: str = "auto", *, enabled: bool = True, **more: Any
    ) -> tuple[list[int], list[int]]:
        """Return the output and the token sources."""
        options = common_pb2.SpeculationOptions(drafter=drafter, enabled=enabled)
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        message = verifier_pb2.Sequence(
            request_id="r", prompt_token_ids=[1, 2, 3], sampling=sampling, speculation=options, **more
        )
        ids: list[int] = []
        sources: list[int] = []
        async for response in self.stub.Generate(verifier_pb2.GenerateRequest(sequence=message)):
            ids += response.tokens.token_ids
            sources += response.tokens.sources
        return ids, sources


@pytest.fixture
async def verifier() -> AsyncIterator[Verifier]:
    harness = Harness(HashTarget(VOCAB, 200, 4, spread=2.0), vocab_size=VOCAB, num_blocks=200, block_size=4)
    info = verifier_info(ModelLimits(VOCAB, 256))
    sources: list[DraftSource] = []
    make = partial(DrafterClient, target=TARGET, epoch=EPOCH)

    def make_source(endpoint: DrafterEndpoint) -> DraftSource:
        sources.append(make(endpoint))
        return sources[-1]

    corpora = DrafterCorpora(())
    keeping = asyncio.create_task(corpora.keep())
    registry = DrafterRegistry(harness.engine.send, harness.engine.speculator.drafter, make_source, corpora)
    server = rpc.async_server()
    service = VerifierService(harness.engine, info, corpora=corpora, drafters=registry)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
    port = rpc.bind(server, "127.0.0.1:0")
    harness.engine.start()
    await server.start()
    async with rpc.async_channel(f"127.0.0.1:{port}") as channel:
        yield Verifier(verifier_pb2_grpc.VerifierServiceStub(channel), harness, sources)
    keeping.cancel()
    await server.stop(None)
    await asyncio.to_thread(harness.engine.stop)
    for source in sources:
        await asyncio.to_thread(source.close)


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("drafter-")]


@pytest.mark.parametrize("transport", ["shared-memory", "grpc"])
async def test_attached_used_detached_and_attached_again(verifier: Verifier, tmp_path: Path, transport: str) -> None:
    address = f"unix:{tmp_path / 'd'}"
    plain, _ = await verifier.generate(enabled=False)
    async with serving(ngram(), address):
        state = await verifier.attach("late", address, transport)
        assert (state.name, state.transport) == ("late", transport) and state.state in ("connecting", "attached")
        await verifier.until("late", "attached")
        # The drafter drafts from what it has learned by then: the same text twice.
        outputs = [await verifier.generate("late", prediction_token_ids=plain) for _ in range(2)]
        assert [ids for ids, _ in outputs] == [plain, plain]
        assert sum(outputs[0][1]) > 20 and set(outputs[1][1]) == {0, 1}
        before = (await verifier.drafters())["late"]
        assert before.num_accepted_tokens > 20

        running = asyncio.create_task(verifier.generate("late", prediction_token_ids=plain))
        await verifier.detach("late")
        assert (await running)[0] == plain
        assert client_threads() == [], "its thread is gone when the call returns"
        assert (await verifier.generate("late", prediction_token_ids=plain)) == (plain, [0] * NUM_TOKENS)
        gone = (await verifier.drafters())["late"]
        assert (gone.state, gone.num_attaches, dict(gone.gauges)) == ("detached", 1, {})

        await verifier.attach("other", address, transport)
        await verifier.until("other", "attached")
        await verifier.detach("other")
        await verifier.attach("late", address, transport)
        after = await verifier.until("late", "attached", num_attaches=2)
        assert after.num_accepted_tokens >= gone.num_accepted_tokens >= before.num_accepted_tokens
        again = await verifier.generate("late", prediction_token_ids=plain)
        assert again[0] == plain and set(again[1]) == {0, 1}
        assert list(await verifier.drafters()) == ["late", "other"]


async def test_a_drafter_that_is_attached_already_stays_as_it_is(verifier: Verifier, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd'}"
    # Asked again while nothing listens there, and when it has attached itself.
    await verifier.attach("late", address)
    assert (await verifier.attach("late", address, "shared-memory")).state == "connecting"
    async with serving(ngram(), address):
        await verifier.until("late", "attached")
        again = await verifier.attach("late", address)
        assert (again.state, again.num_attaches) == ("attached", 1)
        assert len(verifier.sources) == 1 and client_threads() == ["drafter-late"]
        for other in ({"address": f"{address}2"}, {"transport": "grpc"}):
            with pytest.raises(grpc.aio.AioRpcError) as taken:
                await verifier.attach(**{"name": "late", "address": address} | other)
            assert taken.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await verifier.drafters())["late"].state == "attached"
        await verifier.detach("late")
        await verifier.attach("late", address)
        await verifier.until("late", "attached", num_attaches=2)


async def test_a_drafter_that_is_not_there_yet_or_starts_again(verifier: Verifier, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd'}"
    plain, _ = await verifier.generate(enabled=False)
    await verifier.attach("late", address)
    # Its name may be used at once.
    assert await verifier.generate("late") == (plain, [0] * NUM_TOKENS)
    for number in (1, 2):
        async with serving(ngram(), address):
            await verifier.until("late", "attached", num_attaches=number)
            ids, sources = await verifier.generate("late", prediction_token_ids=plain)
            assert ids == plain and sum(sources) > 20
    await verifier.until("late", "connecting", num_attaches=2)


async def test_gauges_are_carried_while_it_is_attached(verifier: Verifier, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd'}"
    async with serving(ngram(), address):
        await verifier.attach("late", address)
        await verifier.until("late", "attached")
        await verifier.generate("late")
        while not (gauges := (await verifier.drafters())["late"].gauges) or gauges["ngram_nodes"] == 0:
            await asyncio.sleep(0.05)
        assert gauges["ngram_capacity"] == 2048
    drafter = await verifier.until("late", "connecting")
    assert dict(drafter.gauges) == {}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "A b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "auto"}, "name"),
        ({"name": "merge"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"address": ""}, "address"),
        ({"address": "unix:relative"}, "address"),
        ({"address": "host"}, "address"),
        ({"address": "host:0"}, "address"),
        ({"address": "unix:/" + "a" * 300}, "address"),
        ({"transport": "pigeon"}, "transport"),
        ({"transport": "in-process"}, "transport"),
    ],
)
async def test_refused(verifier: Verifier, fields: dict[str, str], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await verifier.attach(**{"name": "a", "address": "unix:/nowhere/d"} | fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata() or ())[rpc.FIELD_METADATA_KEY] == field
    assert await verifier.drafters() == {} and verifier.sources == []


async def test_a_name_that_is_taken_and_one_that_is_not(verifier: Verifier, tmp_path: Path) -> None:
    await verifier.attach("a", "127.0.0.1:1")
    with pytest.raises(grpc.aio.AioRpcError) as taken:
        await verifier.attach("a", f"unix:{tmp_path / 'd'}")
    assert taken.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert client_threads() == ["drafter-a"]
    await verifier.detach("a")
    for name in ("a", "b"):
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await verifier.detach(name)
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_names_in_requests(verifier: Verifier) -> None:
    """An unknown name is refused; a sequence that began while the name was known goes on."""
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await verifier.generate("a")
    assert unknown.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    plain, _ = await verifier.generate(enabled=False)
    for name in ("a", "a+b"):
        resumed, _ = await verifier.generate(name, attempt=1, output_token_ids=plain[:40])
        assert resumed == plain[40:]
    await verifier.attach("a", "127.0.0.1:1")
    await verifier.detach("a")
    assert (await verifier.generate("a"))[0] == plain
    with pytest.raises(grpc.aio.AioRpcError, match="available: auto, merge;"):
        await verifier.generate("b")


async def test_a_verifier_whose_drafters_do_not_change(verifier: Verifier) -> None:
    assert (await verifier.generate(enabled=False))[0]
    server = rpc.async_server()
    info = verifier_info(ModelLimits(VOCAB, 256))
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierService(verifier.harness.engine, info), server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.async_channel(f"127.0.0.1:{port}") as channel:
        closed = Verifier(verifier_pb2_grpc.VerifierServiceStub(channel), verifier.harness, [])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await closed.attach("a", "127.0.0.1:1")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await server.stop(None)


async def test_corpora_follow_a_name_to_its_next_drafter(verifier: Verifier, tmp_path: Path) -> None:
    one, two, other = (f"unix:{tmp_path / name}" for name in ("one", "two", "other"))
    stub = verifier.stub

    async def held(name: str) -> list[tuple[str, int]]:
        listed = await stub.ListCorpora(verifier_pb2.ListCorporaRequest(drafter=name))
        return [(corpus.name, corpus.num_tokens) for corpus in listed.corpora]

    second = ngram()
    async with serving(ngram(), one), serving(second, two), serving(MirrorDrafter(), other):
        await verifier.attach("a", one)
        await verifier.until("a", "attached")
        add = verifier_pb2.AddCorpusRequest(name="docs", token_ids=token_bytes([1, 2, 3]))
        assert (await stub.AddCorpus(add)).corpus.drafter == "a"
        await verifier.detach("a")
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await held("a")
        assert gone.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # A drafter that holds no corpora is sent none.
        await verifier.attach("a", other)
        await verifier.until("a", "attached", num_attaches=2)
        await verifier.detach("a")
        await verifier.attach("a", two)
        while not second.corpora.list():
            await asyncio.sleep(0.02)
        assert await held("a") == [("docs", 3)]
