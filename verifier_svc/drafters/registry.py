"""The drafters of a verifier while it serves: the operator attaches and detaches them.

What is attached so lasts until the verifier ends. The engine takes a change in between two steps;
sources are started and closed here, where no step waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from foretoken import limits
from foretoken.errors import InvalidRequestError
from verifier_svc.config import TRANSPORTS, DrafterEndpoint
from verifier_svc.drafters.changes import AttachDrafter, DetachDrafter
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.source import DraftSource

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DrafterRegistry:
    """Attaches and detaches the drafters of one engine, one at a time. Used on the event loop."""

    def __init__(
        self,
        send: Callable[[AttachDrafter | DetachDrafter], None],
        handle_of: Callable[[str], DrafterHandle],
        make_source: Callable[[DrafterEndpoint], DraftSource],
        corpora: DrafterCorpora,
    ) -> None:
        """
        Args:
            send: queues a change for the engine's next step.
            handle_of: the engine's handle of an attached drafter, by name.
            make_source: makes the source of a drafter in another process; it is not started yet.
        """
        self._send, self._handle_of = send, handle_of
        self._make_source = make_source
        self._corpora = corpora
        self._lock = asyncio.Lock()

    async def attach(self, name: str, address: str, transport: str) -> DrafterHandle:
        """Begin to attach a drafter; return it unchanged if it is there already, at this address.

        Raises InvalidRequestError naming the field, and as DrafterRouting.add.
        """
        endpoint = _endpoint(name, address, transport)
        return await self._to_the_end(self._attach(endpoint))

    async def detach(self, name: str) -> None:
        """Detach a drafter for good. Raises as DrafterRouting.remove."""
        await self._to_the_end(self._detach(name))

    async def _to_the_end(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Finish a change even if its caller goes away.

        So no source is left that is neither used nor closed.
        """
        return await asyncio.shield(asyncio.create_task(change))

    async def _attach(self, endpoint: DrafterEndpoint) -> DrafterHandle:
        async with self._lock:
            if (present := self._present(endpoint)) is not None:
                return present
            source = self._make_source(endpoint)
            done: Future[None] = Future()
            try:
                self._send(AttachDrafter(source, done))
                await asyncio.wrap_future(done)
            except BaseException:
                source.close()
                raise
            source.start()
            self._corpora.attach(source, endpoint.address)
        logger.info("drafter %s is to be attached at %s", endpoint.name, endpoint.address)
        return self._handle_of(endpoint.name)

    def _present(self, endpoint: DrafterEndpoint) -> DrafterHandle | None:
        """Return the drafter of the endpoint, unless it is detached, elsewhere or unknown."""
        try:
            handle = self._handle_of(endpoint.name)
        except KeyError:
            return None
        source = handle.source
        is_same = source.address == endpoint.address and endpoint.transport in ("auto", source.transport_name)
        return handle if is_same and not handle.is_detached else None

    async def _detach(self, name: str) -> None:
        async with self._lock:
            done: Future[DraftSource] = Future()
            self._send(DetachDrafter(name, done))
            source = await asyncio.wrap_future(done)
            self._corpora.detach(name)
            await asyncio.to_thread(source.close)
        logger.info("drafter %s is detached", name)


def _endpoint(name: str, address: str, transport: str) -> DrafterEndpoint:
    limits.check_drafter_name("name", name)
    limits.check_address("address", address)
    transport = transport or "auto"
    if transport not in TRANSPORTS:
        raise InvalidRequestError(f"transport must be one of {', '.join(TRANSPORTS)}", field="transport")
    return DrafterEndpoint(name=name, address=address, transport=transport)
