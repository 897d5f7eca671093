"""All verifiers of one gateway: which one a sequence starts on, and where it goes on when its verifier is lost.

It knows no text, and nothing of what a sequence emitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from foretoken.errors import QueueFullError, UnavailableError
from gateway.messages import OutputSink, SequenceSpec, VerifierInfo
from gateway.resumable_sequence import Binding, Placement
from gateway.verifier_client import SILENCE_LIMIT_S, VerifierClient

logger = logging.getLogger(__name__)

# Figures are asked for at most so often for the sake of requests.
REFRESH_EVERY_S = 1.0


class VerifierPool:
    """One session with each verifier. All methods are called on the event loop that ``run`` runs on."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        resume_attempts: int,
        wait_s: float,
        on_change: Callable[[bool], Awaitable[None]] | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """``wait_s``: seconds that a new request waits while no verifier is up; a lost one waits until its deadline.
        ``on_change`` is awaited with ``is_up``, each time that a verifier comes or goes.
        """
        self.clients = [
            VerifierClient(address, on_change=self._changed, silence_limit_s=silence_limit_s) for address in addresses
        ]
        self._resume_attempts = resume_attempts
        self._wait_s = wait_s
        self._on_change = on_change
        self._up = asyncio.Event()
        # Oldest first; each with the timer that ends its wait.
        self._waiting: dict[Placement, asyncio.TimerHandle | None] = {}
        self._placements: set[Placement] = set()
        self._refreshed_at = 0.0
        self._refreshing: asyncio.Task[object] | None = None

    @property
    def is_up(self) -> bool:
        """Whether some verifier takes sequences now."""
        return any(client.is_up for client in self.clients)

    @property
    def info(self) -> VerifierInfo:
        """Figures of a verifier that is up, or else the latest ones. Raises UnavailableError before the first."""
        for client in sorted(self.clients, key=lambda client: not client.is_up):
            with contextlib.suppress(UnavailableError):
                return client.info
        raise UnavailableError(f"not ready: {self.clients[0].reason}")

    @property
    def num_sequences(self) -> int:
        """Sequences of this gateway that run or wait, at a verifier or for one."""
        return len(self._placements)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a verifier."""
        return len(self._waiting)

    async def run(self) -> None:
        """Keep all sessions until cancelled."""
        async with asyncio.TaskGroup() as group:
            for client in self.clients:
                group.create_task(client.run())

    async def wait_info(self) -> VerifierInfo:
        """``info``, waiting ``wait_s`` for a first verifier. Raises UnavailableError if none comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await self._up.wait()
        return self.info

    async def wait_up(self) -> None:
        """Return once some verifier is up."""
        await self._up.wait()

    async def fetch_infos(self) -> dict[str, VerifierInfo | None]:
        """Fresh figures of each verifier by its address; None for one that does not answer."""

        async def fetch(client: VerifierClient) -> VerifierInfo | None:
            with contextlib.suppress(UnavailableError):
                return await client.fetch_info()
            return None

        infos = await asyncio.gather(*(fetch(client) for client in self.clients))
        return {client.address: info for client, info in zip(self.clients, infos, strict=True)}

    async def refresh_infos(self) -> None:
        """Have fresh figures in ``info``, but not more often than REFRESH_EVERY_S, however many requests want them."""
        now = asyncio.get_running_loop().time()
        if self._refreshing is None or (self._refreshing.done() and now - self._refreshed_at >= REFRESH_EVERY_S):
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self.fetch_infos())
        # One asker may go away, the others want it still.
        await asyncio.shield(self._refreshing)

    def check_room(self, num_sequences: int) -> None:
        """Raise QueueFullError if verifiers are up and none of them has room for so many new sequences."""
        up = [client for client in self.clients if client.is_up]
        if up and not any(client.has_room(num_sequences) for client in up):
            raise QueueFullError("the queue is full")

    def start(self, specs: Iterable[tuple[SequenceSpec, OutputSink]]) -> list[Placement]:
        """Start the sequences of one request, all on the same verifier; they wait if none is up.

        Raises QueueFullError if the queues of all that are up are known to be full.
        """
        binding = Binding()
        placements = [
            Placement(spec, sink, self, binding, resume_attempts=self._resume_attempts) for spec, sink in specs
        ]
        self.check_room(len(placements))
        client = self._pick(binding, num_new=len(placements))
        self._placements.update(placements)
        for placement in placements:
            if client is None:
                self._wait(placement)
            else:
                placement.submit_to(client)
        return placements

    def fail_all(self, reason: str) -> None:
        """Drop every sequence; each client is told ``reason`` as an UnavailableError."""
        for placement in list(self._placements):
            placement.fail(reason)

    def place(self, placement: Placement) -> None:
        """Submit to a verifier that runs the right model and is up; wait for one if there is none.

        A sequence that began with a model which no verifier runs any more, though all are there, ends with an error.
        """
        client = self._pick(placement.binding)
        if client is not None:
            self._stop_waiting(placement)
            placement.submit_to(client)
        elif all(client.is_up and not _fits(client, placement.binding) for client in self.clients):
            placement.fail("the verifier was lost, and another model runs now")
        else:
            self._wait(placement)

    def forget(self, placement: Placement) -> None:
        """It has ended, or nobody wants it any more."""
        self._stop_waiting(placement)
        self._placements.discard(placement)

    def _pick(self, binding: Binding, num_new: int = 0) -> VerifierClient | None:
        """The verifier with the fewest sequences of ours among those that may take these."""
        fitting = [c for c in self.clients if c.is_up and c.has_room(num_new) and _fits(c, binding)]
        return min(fitting, key=lambda client: client.num_sequences, default=None)

    def _wait(self, placement: Placement) -> None:
        if placement in self._waiting:
            return
        loop = asyncio.get_running_loop()
        ends_at = placement.deadline
        if not placement.was_lost:
            ends_at = min(loop.time() + self._wait_s, ends_at or float("inf"))
        timer = None if ends_at is None else loop.call_at(ends_at, self._give_up, placement)
        self._waiting[placement] = timer
        placement.on_waiting()

    def _stop_waiting(self, placement: Placement) -> None:
        timer = self._waiting.pop(placement, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, placement: Placement) -> None:
        """The wait was too long."""
        reasons = "; ".join(client.reason for client in self.clients if not client.is_up)
        if placement.was_lost:
            placement.fail(f"the verifier was lost and none came up before the request's deadline: {reasons}")
        else:
            placement.fail(f"not ready: {reasons}")

    async def _changed(self) -> None:
        """A verifier came up, went down, or takes no more."""
        if self.is_up:
            self._up.set()
        else:
            self._up.clear()
        num_waiting = len(self._waiting)
        for placement in list(self._waiting):
            if placement in self._waiting:
                self.place(placement)
        if len(self._waiting) < num_waiting:
            logger.info("sequences go on", extra={"num_sequences": num_waiting - len(self._waiting)})
        if self._on_change is not None:
            await self._on_change(self.is_up)


def _fits(client: VerifierClient, binding: Binding) -> bool:
    return binding.fingerprint in ("", client.fingerprint)
