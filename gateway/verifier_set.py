"""Keep a session with each verifier that the source names, and choose one for each request.

Verifiers come and go while requests run. One that the source no longer names is drained: its
streams go on there, and when the last has ended, so does the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from gateway.discovery.source import VerifierSource
from gateway.routing.defaults import DEFAULT_LOAD_BOUND
from gateway.routing.fleet import Fleet
from gateway.routing.router import Router, RoutingReason
from gateway.verifier_client import VerifierClient

logger = logging.getLogger(__name__)

# Makes the client of an address, which reports to the callback.
MakeClient = Callable[[str, Callable[[VerifierClient], None]], VerifierClient]


class VerifierSet:
    """The verifiers there are. Call all methods on the event loop of ``run``."""

    def __init__(
        self,
        source: VerifierSource,
        make_client: MakeClient,
        on_change: Callable[[], Awaitable[None]],
        *,
        load_bound: float = DEFAULT_LOAD_BOUND,
    ) -> None:
        """``on_change`` is awaited when verifiers were added or begin to leave."""
        self._source = source
        # How often each reason decided.
        self.num_routed: Counter[str] = Counter(dict.fromkeys(RoutingReason, 0))
        self._make_client = make_client
        self._on_change = on_change
        self._fleet = Fleet()
        self._router = Router(self._fleet, load_bound=load_bound)
        # By number in the fleet, and each one's task.
        self._clients: dict[int, VerifierClient] = {}
        self._numbers: dict[VerifierClient, int] = {}
        self._tasks: dict[VerifierClient, asyncio.Task[None]] = {}

    @property
    def clients(self) -> list[VerifierClient]:
        """Those that the source names or that still have streams, in the order they came."""
        return list(self._numbers)

    @property
    def reason(self) -> str:
        """Why no verifier is up."""
        reasons = [client.reason for client in self.clients if not client.is_up]
        return "; ".join(reasons) or self._source.reason or "no verifier is known yet"

    async def run(self) -> None:
        """Follow the source and keep all sessions until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for addresses in self._source.changes():
                await self._follow(addresses, group)

    def route(self, keys: Iterable[int], *, model: str, num_new: int) -> VerifierClient | None:
        """Return the verifier for a request, as ``Router.route`` does."""
        decision = self._router.route(keys, model=model, num_new=num_new)
        if decision is None:
            return None
        self.num_routed[decision.reason] += 1
        return self._clients[decision.number]

    def has_room(self, num_new: int) -> bool:
        """Return whether some verifier that is up has room in its queue."""
        return bool(self._fleet.open_for("", num_new).any())

    async def _follow(self, addresses: frozenset[str], group: asyncio.TaskGroup) -> None:
        """Add what is new, and drain what is missing."""
        known = {client.address: client for client in self.clients}
        for address in sorted(addresses - known.keys()):
            client = self._make_client(address, self._take_figures)
            number = self._numbers[client] = self._fleet.add(address)
            self._clients[number] = client
            self._tasks[client] = group.create_task(client.run())
            logger.info("verifier listed", extra={"verifier": address})
        for address, client in known.items():
            if address in addresses:
                await client.stay()
            elif not client.is_leaving:
                logger.info("verifier leaves", extra={"verifier": address, "num_sequences": client.num_sequences})
                await client.leave()
                self._take_figures(client)
        await self._on_change()

    def _take_figures(self, client: VerifierClient) -> None:
        """Pass a client's figures to the fleet. End it if it leaves and has no more streams."""
        number = self._numbers.get(client)
        if number is None:
            return
        if client.is_leaving and not client.num_sequences:
            del self._numbers[client], self._clients[number]
            self._fleet.remove(number)
            self._tasks.pop(client).cancel()
            return
        if not client.is_up:
            self._fleet.close(number)
            return
        figures, load = client.figures, client.figures.load
        num_sequences = client.num_sequences + figures.num_others
        if load is None:
            self._fleet.update(number, load=num_sequences, room=figures.room)
        else:
            fill = 1 - load.num_free_blocks / max(load.num_blocks, 1)
            self._fleet.update(number, load=num_sequences, rows=load.max_running, fill=fill, room=figures.room)
        self._fleet.open(number, client.fingerprint)
