"""Pass on the corpora of this verifier's drafters.

A drafter that died lost them, and gets them again.

A drafter's own list says what it drafts from. The verifier also keeps what was added through it,
four bytes a token, as long as it lives. So a drafter is disposable and gets back what it had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from foretoken import rpc
from foretoken.corpora import Corpora, CorpusInfo, HoldsCorpora, token_bytes
from foretoken.drafter import Drafter
from foretoken.errors import ForetokenError, InvalidRequestError, PreconditionError
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from foretoken.tree import Int32
from protos import drafter_pb2, drafter_pb2_grpc
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.source import DraftSource

logger = logging.getLogger(__name__)

# Sorting millions of tokens takes seconds.
CALL_TIMEOUT_S = 120.0
# Between two looks at whether a drafter was attached anew.
LOOK_S = 0.5
ALGORITHM = "NGRAM"


class _Holder(Protocol):
    """A drafter's corpora, wherever it runs.

    Raises as ``foretoken.corpora.Corpora``, and UnavailableError.
    """

    async def add(self, name: str, token_ids: Int32, *, append: bool) -> CorpusInfo: ...

    async def remove(self, name: str) -> None: ...

    async def list(self) -> tuple[CorpusInfo, ...]: ...


# What was added through this process to the drafters of one name: each corpus's texts.
_Texts = dict[str, list[Int32]]


class _InProcess:
    """Of a drafter in this process, which cannot die alone."""

    def __init__(self, corpora: Corpora) -> None:
        self._corpora = corpora

    async def add(self, name: str, token_ids: Int32, *, append: bool) -> CorpusInfo:
        return await asyncio.to_thread(self._corpora.add, name, token_ids, append=append)

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(self._corpora.remove, name)

    async def list(self) -> tuple[CorpusInfo, ...]:
        return await asyncio.to_thread(self._corpora.list)


class _Remote:
    """Of a drafter in another process, by calls beside its attachment."""

    def __init__(self, address: str, texts: _Texts, credentials: LinkCredentials) -> None:
        self.address = address
        self._credentials = credentials
        self._texts = texts

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing that the drafter could have lost."""
        return not self._texts

    async def add(self, name: str, token_ids: Int32, *, append: bool) -> CorpusInfo:
        request = drafter_pb2.AddCorpusRequest(name=name, token_ids=token_bytes(token_ids), append=append)
        async with self._stub() as stub:
            corpus = (await stub.AddCorpus(request, timeout=CALL_TIMEOUT_S)).corpus
        return CorpusInfo(corpus.name, corpus.num_tokens)

    async def remove(self, name: str) -> None:
        async with self._stub() as stub:
            await stub.RemoveCorpus(drafter_pb2.RemoveCorpusRequest(name=name), timeout=CALL_TIMEOUT_S)

    async def list(self) -> tuple[CorpusInfo, ...]:
        async with self._stub() as stub:
            response = await stub.ListCorpora(drafter_pb2.ListCorporaRequest(), timeout=CALL_TIMEOUT_S)
        return tuple(CorpusInfo(corpus.name, corpus.num_tokens) for corpus in response.corpora)

    async def restore(self) -> int:
        """Send the drafter what it lost; return how many corpora."""
        held = {info.name: info.num_tokens for info in await self.list()}
        lost = [name for name, texts in self._texts.items() if held.get(name, -1) < sum(map(len, texts))]
        for name in lost:
            for number, text in enumerate(self._texts[name]):
                await self.add(name, text, append=number > 0)
        return len(lost)

    @contextlib.asynccontextmanager
    async def _stub(self) -> AsyncIterator[Any]:
        async with rpc.async_channel(self.address, self._credentials) as channel:
            try:
                yield drafter_pb2_grpc.DrafterServiceStub(channel)
            except grpc.aio.AioRpcError as error:
                raise rpc.error_from_rpc(error) from error


class DrafterCorpora:
    """All drafters of one verifier.

    Used on its event loop; changes of one drafter's corpora come one after another.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource],
        endpoints: Sequence[DrafterEndpoint] = (),
        in_process: Mapping[str, Drafter] | None = None,
        credentials: LinkCredentials = NO_CREDENTIALS,
    ) -> None:
        self._sources = {source.name: source for source in sources}
        # By drafter.
        self._texts: dict[str, _Texts] = {name: {} for name in self._sources}
        self._remotes = {
            endpoint.name: _Remote(endpoint.address, self._texts.setdefault(endpoint.name, {}), credentials)
            for endpoint in endpoints
        }
        self._in_process = dict(in_process or {})
        self._credentials = credentials
        self._locks = {name: asyncio.Lock() for name in self._sources}
        # By drafter: the attachment that has everything.
        self._kept = dict.fromkeys(self._remotes, 0)

    def attach(self, source: DraftSource, address: str) -> None:
        """Add a drafter in another process.

        Under a name that was detached it gets what that drafter held.
        """
        name = source.name
        self._sources[name] = source
        self._in_process.pop(name, None)
        self._remotes[name] = _Remote(address, self._texts.setdefault(name, {}), self._credentials)
        self._locks.setdefault(name, asyncio.Lock())
        self._kept[name] = 0

    def detach(self, name: str) -> None:
        """Remove a drafter. What it held is kept for the next drafter of that name."""
        self._sources.pop(name, None)

    async def add(self, drafter: str, name: str, token_ids: Int32, *, append: bool) -> tuple[str, CorpusInfo]:
        """Add a corpus.

        Raises as ``Corpora.add``; InvalidRequestError for an unknown drafter, UnavailableError if
        it is gone.
        """
        drafter, holder = self._holder(drafter)
        async with self._locks[drafter]:
            info = await holder.add(name, token_ids, append=append)
            texts = self._texts[drafter]
            texts[name] = [*(texts.get(name, []) if append else []), token_ids]
            return drafter, info

    async def remove(self, drafter: str, name: str) -> None:
        """Remove a corpus. Raises as ``Corpora.remove`` and as ``add``.

        It is forgotten here even if the drafter is gone or has lost it.
        """
        drafter, holder = self._holder(drafter)
        async with self._locks[drafter]:
            self._texts[drafter].pop(name, None)
            await holder.remove(name)

    async def list(self, drafter: str) -> list[tuple[str, CorpusInfo]]:
        """Return corpora and their drafters: of one, or of all that are known to hold some.

        Raises as ``add``.
        """
        known = [name for name, source in self._sources.items() if source.algorithm == ALGORITHM]
        if drafter or not known:
            known = [drafter]
        found: list[tuple[str, CorpusInfo]] = []
        for wanted in known:
            name, holder = self._holder(wanted)
            try:
                found += [(name, info) for info in await holder.list()]
            except ForetokenError as error:
                raise type(error)(f"drafter {name}: {error.message}", field=error.field) from error
        return found

    async def keep(self) -> None:
        """Send drafters that have attached again what they lost, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name, remote in tuple(self._remotes.items()):
                if name in self._sources:
                    await self._keep(name, remote)

    async def _keep(self, name: str, remote: _Remote) -> None:
        source = self._sources[name]
        num_attaches = source.num_attaches
        if remote.is_empty or num_attaches == self._kept[name] or source.algorithm != ALGORITHM:
            return
        try:
            async with self._locks[name]:
                num_sent = await remote.restore()
        except ForetokenError as error:
            logger.warning("drafter %s has not got its corpora back: %s; trying again", name, error)
            return
        if self._sources.get(name) is source:
            self._kept[name] = num_attaches
        if num_sent:
            logger.info("drafter %s has got %d corpora back", name, num_sent)

    def _holder(self, drafter: str) -> tuple[str, _Holder]:
        """Return the drafter of that name, or the first that holds corpora, as far as is known."""
        if drafter and drafter not in self._sources:
            raise InvalidRequestError(
                f"there is no drafter {drafter!r}; available: {', '.join(self._sources)}", field="drafter"
            )
        # One that was never attached may be of any kind: asked only where none is known.
        algorithms = [(name, source.algorithm) for name, source in self._sources.items()]
        known = [name for name, algorithm in algorithms if algorithm == ALGORITHM]
        for name in [drafter] if drafter else [*known, *(name for name, algorithm in algorithms if not algorithm)]:
            if name in self._remotes:
                return name, self._remotes[name]
            local = self._in_process.get(name)
            if isinstance(local, HoldsCorpora):
                return name, _InProcess(local.corpora)
        whose = f"the drafter {drafter!r} holds no corpora" if drafter else "no attached drafter holds corpora"
        raise PreconditionError(whose, field="drafter")
