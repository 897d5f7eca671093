"""Start each sequence on a verifier, and resume it on another when its verifier is lost.

The pool knows no text and no emitted tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from foretoken.errors import QueueFullError, UnavailableError
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from gateway.discovery.source import VerifierSource
from gateway.messages import OutputSink, SequenceSpec, VerifierInfo
from gateway.resumable_sequence import Binding, ResumableSequence
from gateway.routing.defaults import DEFAULT_LOAD_BOUND
from gateway.verifier_client import VerifierClient
from gateway.verifier_set import VerifierSet

logger = logging.getLogger(__name__)

# Requests cause at most one round of GetInfo in this time.
REFRESH_EVERY_S = 1.0


class VerifierPool:
    """Keeps a session with each verifier. Call all methods on the event loop of ``run``."""

    def __init__(
        self,
        source: VerifierSource,
        *,
        resume_attempts: int,
        wait_s: float,
        on_change: Callable[[bool], Awaitable[None]] | None = None,
        credentials: LinkCredentials = NO_CREDENTIALS,
        load_bound: float = DEFAULT_LOAD_BOUND,
    ) -> None:
        """A new request waits ``wait_s`` for a verifier; a lost one until its deadline.

        ``on_change`` is awaited with ``is_ready`` each time a verifier comes or goes, or has its
        drafters.
        """

        def make_client(address: str, on_figures: Callable[[VerifierClient], None]) -> VerifierClient:
            return VerifierClient(address, on_change=self._changed, on_figures=on_figures, credentials=credentials)

        # Which verifiers there are.
        self.known = VerifierSet(source, make_client, self._changed, load_bound=load_bound)
        self._resume_attempts = resume_attempts
        self._wait_s = wait_s
        self._on_change = on_change
        self._up = asyncio.Event()
        # Whether a verifier takes sequences now and, at first, none that does awaits drafters. Once
        # ready, it depends on no drafter: a verifier that restarts counts as soon as it is up.
        self.is_ready = False
        self._has_been_ready = False
        # Oldest first, with the timer that ends each wait.
        self._waiting: dict[ResumableSequence, asyncio.TimerHandle | None] = {}
        self._sequences: set[ResumableSequence] = set()
        self._refreshed_at = 0.0
        self._refreshing: asyncio.Task[object] | None = None

    @property
    def clients(self) -> list[VerifierClient]:
        """A client for each verifier, those included that leave."""
        return self.known.clients

    @property
    def is_up(self) -> bool:
        """Return whether a verifier takes sequences now."""
        return any(client.is_up for client in self.clients)

    @property
    def info(self) -> VerifierInfo:
        """Figures of a verifier that is up, else the latest.

        Raises UnavailableError before the first.
        """
        for client in sorted(self.clients, key=lambda client: not client.is_up):
            with contextlib.suppress(UnavailableError):
                return client.info
        raise UnavailableError(f"not ready: {self.known.reason}")

    @property
    def num_sequences(self) -> int:
        """This gateway's sequences that run, or wait at a verifier or for one."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a verifier."""
        return len(self._waiting)

    async def run(self) -> None:
        """Keep all sessions until cancelled."""
        await self.known.run()

    async def wait_info(self) -> VerifierInfo:
        """Return ``info`` after waiting ``wait_s`` at most.

        Raises UnavailableError if no verifier comes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await self._up.wait()
        return self.info

    async def wait_up(self) -> None:
        """Return when a verifier is up."""
        await self._up.wait()

    async def fetch_infos(self) -> dict[str, VerifierInfo | None]:
        """Fetch each verifier's figures, by address; None for a verifier that does not answer.

        Verifiers that come or go meanwhile are not among them, or still are.
        """

        async def fetch(client: VerifierClient) -> VerifierInfo | None:
            with contextlib.suppress(UnavailableError):
                return await client.fetch_info()
            return None

        clients = self.clients
        infos = await asyncio.gather(*(fetch(client) for client in clients))
        return {client.address: info for client, info in zip(clients, infos, strict=True)}

    async def refresh_infos(self) -> None:
        """Refresh ``info``, at most once in REFRESH_EVERY_S however many requests ask."""
        now = asyncio.get_running_loop().time()
        if self._refreshing is None or (self._refreshing.done() and now - self._refreshed_at >= REFRESH_EVERY_S):
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self.fetch_infos())
        # If one caller is cancelled, the others still need the answer.
        await asyncio.shield(self._refreshing)

    def check_room(self, num_sequences: int) -> None:
        """Raise QueueFullError if verifiers are up and no queue has room for the new sequences."""
        if self.is_up and not self.known.has_room(num_sequences):
            raise QueueFullError("the queue is full")

    def start(self, specs: Iterable[tuple[SequenceSpec, OutputSink]]) -> list[ResumableSequence]:
        """Start one request's sequences, all on the same verifier; they wait if none is up.

        Raises QueueFullError if all verifiers that are up are known to have full queues.
        """
        binding = Binding()
        sequences = [
            ResumableSequence(spec, sink, self, binding, resume_attempts=self._resume_attempts) for spec, sink in specs
        ]
        self.check_room(len(sequences))
        client = self.known.route(sequences[0].prefix_keys(), model="", num_new=len(sequences))
        self._sequences.update(sequences)
        for sequence in sequences:
            if client is None:
                self._wait(sequence)
            else:
                sequence.submit_to(client)
        return sequences

    def fail_all(self, reason: str) -> None:
        """Drop every sequence, and send ``reason`` to each client as an UnavailableError."""
        for sequence in list(self._sequences):
            sequence.fail(reason)

    def place(self, sequence: ResumableSequence) -> None:
        """Submit to a verifier that is up and runs the right model, or wait for one.

        If all verifiers are up and none runs the sequence's model, the sequence ends with an error.
        """
        model = sequence.binding.fingerprint
        client = self.known.route(sequence.prefix_keys(), model=model, num_new=0)
        staying = [client for client in self.clients if not client.is_leaving]
        if client is not None:
            self._stop_waiting(sequence)
            sequence.submit_to(client)
        elif staying and all(client.is_up and client.fingerprint != model for client in staying):
            sequence.fail("the verifier was lost, and another model runs now")
        else:
            self._wait(sequence)

    def forget(self, sequence: ResumableSequence) -> None:
        """Free what is held for a sequence that ended or that nobody wants any more."""
        self._stop_waiting(sequence)
        self._sequences.discard(sequence)

    def _wait(self, sequence: ResumableSequence) -> None:
        if sequence in self._waiting:
            return
        loop = asyncio.get_running_loop()
        ends_at = sequence.deadline
        if not sequence.was_lost:
            ends_at = min(loop.time() + self._wait_s, ends_at or float("inf"))
        timer = None if ends_at is None else loop.call_at(ends_at, self._give_up, sequence)
        self._waiting[sequence] = timer
        sequence.on_waiting()

    def _stop_waiting(self, sequence: ResumableSequence) -> None:
        timer = self._waiting.pop(sequence, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, sequence: ResumableSequence) -> None:
        """Fail a sequence that waited too long."""
        if sequence.was_lost:
            sequence.fail(f"the verifier was lost and none came up before the request's deadline: {self.known.reason}")
        else:
            sequence.fail(f"not ready: {self.known.reason}")

    async def _changed(self) -> None:
        """Place waiting sequences: a verifier came up, went down, or takes no more."""
        if self.is_up:
            self._up.set()
        else:
            self._up.clear()
        awaits_drafters = any(client.is_up and client.awaits_drafters for client in self.clients)
        self.is_ready = self.is_up and (self._has_been_ready or not awaits_drafters)
        self._has_been_ready |= self.is_ready
        num_waiting = len(self._waiting)
        for sequence in list(self._waiting):
            if sequence in self._waiting:
                self.place(sequence)
        if len(self._waiting) < num_waiting:
            logger.info("sequences go on", extra={"num_sequences": num_waiting - len(self._waiting)})
        if self._on_change is not None:
            await self._on_change(self.is_ready)
