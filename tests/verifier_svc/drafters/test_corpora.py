"""The verifier sends corpora to real drafter services, and again to one that lost them by dying."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken import rpc
from foretoken.corpora import CorpusInfo, token_bytes, token_ids_from
from foretoken.errors import InvalidRequestError, NotFoundError, PreconditionError, UnavailableError
from foretoken.limits import MAX_CORPUS_TOKENS, ModelLimits
from protos import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.support.engine_harness import Harness
from tests.support.hash_target import HashTarget
from tests.support.mirror_drafter import MirrorDrafter
from tests.support.services import serving, verifier_info
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.source import DraftSource
from verifier_svc.service import VerifierService

pytestmark = pytest.mark.anyio


@dataclass
class Source:
    """The part of a DraftSource that these tests use."""

    name: str
    algorithm: str = "NGRAM"
    num_attaches: int = 1


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def ngram(max_tokens: int = 1000) -> NgramDrafter:
    return NgramDrafter(NgramSettings(capacity=2048, external_corpus_max_tokens=max_tokens))


def desk(path: Path, *sources: Source) -> DrafterCorpora:
    endpoints = [DrafterEndpoint(name="ngram", address=f"unix:{path}")]
    return DrafterCorpora(cast("list[DraftSource]", list(sources) or [Source("ngram")]), endpoints)


async def test_add_list_remove(tmp_path: Path) -> None:
    drafter, corpora = ngram(), desk(tmp_path / "d")
    async with serving(drafter, f"unix:{tmp_path / 'd'}"):
        assert await corpora.add("", "docs", ids(1, 2, 3), append=False) == ("ngram", CorpusInfo("docs", 3))
        assert await corpora.add("ngram", "docs", ids(4, 5), append=True) == ("ngram", CorpusInfo("docs", 5))
        await corpora.add("", "code", ids(6), append=False)
        assert await corpora.list("") == [("ngram", CorpusInfo("docs", 5)), ("ngram", CorpusInfo("code", 1))]
        await corpora.remove("", "docs")
        assert drafter.corpora.list() == (CorpusInfo("code", 1),)
        with pytest.raises(NotFoundError) as missing:
            await corpora.remove("", "docs")
        assert missing.value.field == "name"


async def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    drafter, corpora = ngram(4), desk(tmp_path / "d")
    async with serving(drafter, f"unix:{tmp_path / 'd'}"):
        await corpora.add("", "docs", ids(1, 2, 3), append=False)
        with pytest.raises(PreconditionError, match="of 4 that this drafter may hold"):
            await corpora.add("", "docs", ids(1, 2), append=True)
    again = ngram()
    async with serving(again, f"unix:{tmp_path / 'd'}"):
        await corpora._remotes["ngram"].restore()
        assert again.corpora.list() == (CorpusInfo("docs", 3),)


async def test_a_drafter_that_died_gets_its_corpora_back(tmp_path: Path) -> None:
    source = Source("ngram")
    corpora = desk(tmp_path / "d", source)
    keeping = asyncio.create_task(corpora.keep())
    async with serving(ngram(), f"unix:{tmp_path / 'd'}"):
        await corpora.add("", "a", ids(1, 2, 3), append=False)
        await corpora.add("", "a", ids(7, 8), append=True)
        await corpora.add("", "b", ids(4), append=False)
        await corpora.add("", "gone", ids(5), append=False)
        await corpora.remove("", "gone")
    with pytest.raises(UnavailableError):
        await corpora.add("", "late", ids(1), append=False)
    reborn = ngram()
    async with serving(reborn, f"unix:{tmp_path / 'd'}"):
        source.num_attaches += 1
        while len(reborn.corpora.list()) < 2:
            await asyncio.sleep(0.02)
        assert sorted(reborn.corpora.list(), key=lambda info: info.name) == [CorpusInfo("a", 5), CorpusInfo("b", 1)]
        # Two texts as before: nothing is matched from one to the other.
        assert reborn.corpora.index.tokens.tolist()[:7] == [-1, 1, 2, 3, -1, 7, 8]
    keeping.cancel()


async def test_a_drafter_that_lost_nothing_is_sent_nothing(tmp_path: Path) -> None:
    drafter, corpora = ngram(), desk(tmp_path / "d")
    async with serving(drafter, f"unix:{tmp_path / 'd'}"):
        await corpora.add("", "a", ids(1, 2, 3), append=False)
        before = drafter.corpora.index
        assert await corpora._remotes["ngram"].restore() == 0
        assert drafter.corpora.index is before


async def test_which_drafter(tmp_path: Path) -> None:
    async with serving(ngram(), f"unix:{tmp_path / 'd'}"):
        corpora = desk(tmp_path / "d", Source("eagle", "EAGLE3"), Source("ngram"))
        assert (await corpora.add("", "a", ids(1), append=False))[0] == "ngram"
        with pytest.raises(InvalidRequestError, match="available: eagle, ngram"):
            await corpora.list("other")
        with pytest.raises(PreconditionError):
            await corpora.list("eagle")
    with pytest.raises(PreconditionError):
        await DrafterCorpora(()).list("")


async def test_a_drafter_in_this_process() -> None:
    drafter = ngram()
    corpora = DrafterCorpora(cast("list[DraftSource]", [Source("ngram")]), (), {"ngram": drafter})
    await corpora.add("", "a", ids(1, 2), append=False)
    assert drafter.corpora.list() == (CorpusInfo("a", 2),)
    assert await corpora.list("ngram") == [("ngram", CorpusInfo("a", 2))]
    await corpora.remove("", "a")
    assert drafter.corpora.list() == ()


async def test_one_elsewhere_that_follows_a_drafter_in_this_process_gets_its_corpora(tmp_path: Path) -> None:
    corpora = DrafterCorpora(cast("list[DraftSource]", [Source("ngram")]), (), {"ngram": ngram()})
    await corpora.add("", "a", ids(1, 2), append=False)
    await corpora.add("", "a", ids(3), append=True)
    await corpora.add("", "gone", ids(5), append=False)
    await corpora.remove("", "gone")
    corpora.detach("ngram")
    follower, source = ngram(), Source("ngram")
    async with serving(follower, f"unix:{tmp_path / 'd'}"):
        corpora.attach(cast("DraftSource", source), f"unix:{tmp_path}/d")
        source.num_attaches += 1
        keeping = asyncio.create_task(corpora.keep())
        # Two texts, one after the other.
        while follower.corpora.list() != (CorpusInfo("a", 3),):
            await asyncio.sleep(0.02)
        keeping.cancel()


async def test_all_drafters_are_listed_unless_one_is_named(tmp_path: Path) -> None:
    """A drafter that was never attached may be of any kind; nobody waits for it."""
    inside, sources = ngram(), [Source("new", ""), Source("eagle", "EAGLE3"), Source("ngram"), Source("inside")]
    endpoints = [DrafterEndpoint(name=name, address=f"unix:{tmp_path / name}") for name in ("new", "eagle", "ngram")]
    corpora = DrafterCorpora(cast("list[DraftSource]", sources), endpoints, {"inside": inside})
    async with serving(ngram(), f"unix:{tmp_path / 'ngram'}"):
        assert await corpora.add("", "docs", ids(1, 2), append=False) == ("ngram", CorpusInfo("docs", 2))
        await corpora.add("inside", "docs", ids(3), append=False)
        both = [("ngram", CorpusInfo("docs", 2)), ("inside", CorpusInfo("docs", 1))]
        assert await corpora.list("") == both
        assert await corpora.list("inside") == both[1:]
    with pytest.raises(UnavailableError, match=r"^drafter ngram: "):
        await corpora.list("")


async def test_a_drafter_of_another_kind_says_so(tmp_path: Path) -> None:
    corpora = desk(tmp_path / "d")
    async with serving(MirrorDrafter(), f"unix:{tmp_path / 'd'}"):
        with pytest.raises(PreconditionError, match="holds no corpora"):
            await corpora.list("ngram")


async def test_drafter_refuses_hostile_calls(tmp_path: Path) -> None:
    async with serving(ngram(), f"unix:{tmp_path / 'd'}"), rpc.async_channel(f"unix:{tmp_path / 'd'}") as channel:
        stub: Any = drafter_pb2_grpc.DrafterServiceStub(channel)
        for name, data in (("Bad", b""), ("", b""), ("a" * 65, b""), ("ok", b"123"), ("ok", b"\xff\xff\xff\xff")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.AddCorpus(drafter_pb2.AddCorpusRequest(name=name, token_ids=data))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_token_ids_on_the_wire() -> None:
    assert token_ids_from(token_bytes([1, 2, 300])).tolist() == [1, 2, 300]
    assert token_bytes([1, 256]) == b"\1\0\0\0\0\1\0\0"
    with pytest.raises(InvalidRequestError):
        token_ids_from(token_bytes([5]), vocab_size=5)
    with pytest.raises(InvalidRequestError):
        token_ids_from(bytes(4 * MAX_CORPUS_TOKENS + 4))
    for bad in ([-1], [2**31]):
        with pytest.raises(InvalidRequestError):
            token_bytes(bad)


async def test_verifier_service(tmp_path: Path) -> None:
    engine = Harness(HashTarget(40, 10, 4), vocab_size=40, num_blocks=10, block_size=4).engine
    info = verifier_info(ModelLimits(40, 64, ("ngram",)))
    server = rpc.async_server()
    service = VerifierService(engine, info, None, desk(tmp_path / "d"))
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
    rpc.bind(server, f"unix:{tmp_path / 'v'}")
    await server.start()
    async with serving(ngram(), f"unix:{tmp_path / 'd'}"), rpc.async_channel(f"unix:{tmp_path / 'v'}") as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        add = verifier_pb2.AddCorpusRequest(name="a", token_ids=token_bytes([1, 2, 39]))
        assert (await stub.AddCorpus(add)).corpus == verifier_pb2.Corpus(name="a", num_tokens=3, drafter="ngram")
        add.append = True
        assert (await stub.AddCorpus(add)).corpus.num_tokens == 6
        for bad in ({"token_ids": token_bytes([40])}, {"name": "A"}, {"drafter": "other"}):
            fields: dict[str, Any] = {"name": "a", "token_ids": b""} | bad
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.AddCorpus(verifier_pb2.AddCorpusRequest(**fields))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        listed = await stub.ListCorpora(verifier_pb2.ListCorporaRequest())
        assert list(listed.corpora) == [verifier_pb2.Corpus(name="a", num_tokens=6, drafter="ngram")]
        await stub.RemoveCorpus(verifier_pb2.RemoveCorpusRequest(name="a"))
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await stub.RemoveCorpus(verifier_pb2.RemoveCorpusRequest(name="a"))
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop(None)
