"""The one thread that owns the drafter and makes every call to it, for all transports.

Knows no gRPC.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from drafter_svc.rounds import SequenceRounds
from drafter_svc.session import AttachedVerifier, Session
from foretoken.corpora import Corpora
from foretoken.drafter import Drafter
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import UnavailableError
from foretoken.lost_context import exit_if_context_lost
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.doorbell import Doorbell, Waiter, default_spin_us

Result = TypeVar("Result")

# Seconds without a request after which the drafter counts as idle and prepares for later ones.
# Steps of a running sequence ask more often.
_QUIET_S = 0.2


class DrafterThread:
    """Runs the drafter.

    Its methods may be called from any thread; their futures resolve in this one.
    """

    def __init__(
        self, make_drafter: Callable[[], Drafter], spin_us: int | None = None, *, counts_rounds: bool = False
    ) -> None:
        """Start the thread.

        It calls ``make_drafter`` once. ``spin_us``: as for Waiter; None: ``default_spin_us``.
        ``counts_rounds``: whether ``rounds`` returns something.
        """
        self._counts_rounds = counts_rounds
        self._spin_us = default_spin_us() if spin_us is None else spin_us
        self._wake = Doorbell()
        self._commands: deque[tuple[Callable[[Session], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        # None until the drafter is made.
        self._session: Session | None = None
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_drafter,), name="drafter", daemon=True)
        self._thread.start()

    @property
    def attachment(self) -> AttachedVerifier | None:
        """The current attachment."""
        return None if self._session is None else self._session.attachment

    def attach(self, epoch: int, target: TargetInfo, arena_socket: str) -> Future[tuple[AttachedVerifier, str, bytes]]:
        """Start an attachment. Return it, the algorithm and, for an arena, the self-test's digest.

        ``arena_socket``: the path that hands over the arena; empty for the stream. Raises
        PreconditionError while another verifier is attached, and the errors of ``ArenaPeer`` and
        ``Drafter.attach``. After an error the drafter is not attached.
        """
        return self._submit(lambda session: session.attach(epoch, target, arena_socket))

    def needs(self, target: TargetInfo) -> Future[DrafterNeeds]:
        """Return what requests for this target must carry.

        Raises PreconditionError if they do not fit.
        """
        return self._submit(lambda session: session.drafter.needs(target))

    def draft(self, attachment: AttachedVerifier, request: DraftRequest) -> Future[DraftBatch]:
        """Draft for a stream.

        Raises UnavailableError if the attachment has ended, or if the drafter fails now.
        """
        return self._submit(lambda session: session.draft(attachment, request))

    def release(self, epoch: int, batch_slots: list[int]) -> Future[None]:
        """Forget batch slots. Raises PreconditionError if the attachment has another epoch."""
        return self._submit(lambda session: session.release(epoch, batch_slots))

    def rounds(self, epoch: int, batch_slot: int, generation: int) -> Future[SequenceRounds | None]:
        """Return what was done for a sequence, and forget it; None if nothing is known of it."""
        return self._submit(lambda session: session.rounds(epoch, batch_slot, generation))

    def gauges(self) -> Future[dict[str, float]]:
        """Return the drafter's gauges."""
        return self._submit(lambda session: session.drafter.gauges())

    def is_preparing(self) -> Future[bool]:
        """Return whether the drafter still prepares for usual requests while it is idle."""
        return self._submit(lambda session: session.is_preparing)

    def algorithm(self) -> Future[str]:
        """Return the drafter's algorithm."""
        return self._submit(lambda session: session.drafter.algorithm)

    def corpora(self) -> Future[Corpora]:
        """Return the drafter's corpora, for any thread.

        Raises PreconditionError if it holds none.
        """
        return self._submit(lambda session: session.corpora())

    def detach(self, attachment: AttachedVerifier, reason: str) -> Future[None]:
        """End an attachment; do nothing if it has ended."""
        return self._submit(lambda session: session.detach(attachment, reason))

    def stop(self) -> None:
        """End the attachment and the thread; wait for it unless the drafter is still being made."""
        with self._lock:
            self._stopping = True
            self._wake.ring()
        if self.ready.done():
            self._thread.join()
            self._wake.close()

    def _submit(self, command: Callable[[Session], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            if self._stopping:
                future.set_exception(UnavailableError("the drafter is stopping"))
                return future
            self._commands.append((command, future))
            self._wake.ring()
        return future

    def _run(self, make_drafter: Callable[[], Drafter]) -> None:
        try:
            session = self._session = Session(make_drafter(), counts_rounds=self._counts_rounds)
        except BaseException as error:
            with self._lock:
                self._stopping = True
            self._cancel_commands()
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        waiter, waited_for = self._new_waiter(session.peer), session.peer
        is_idle = False
        while not self._stopping:
            if waited_for is not session.peer:
                waiter, waited_for = self._new_waiter(session.peer), session.peer
            wait_s = None
            if session.is_preparing:
                wait_s = 0.0 if is_idle else _QUIET_S
            ready = waiter.wait(wait_s)
            if self._wake.fileno() in ready:
                self._wake.take()
                self._run_commands(session)
            elif not ready:
                is_idle = session.prepare()
            elif session.peer is not None:
                session.serve_arena(session.peer)
                is_idle = False
        session.end("the drafter stopped")
        self._cancel_commands()

    def _new_waiter(self, peer: ArenaPeer | None) -> Waiter:
        fds = () if peer is None else peer.filenos()
        return Waiter((self._wake.fileno(), *fds), self._spin_us)

    def _run_commands(self, session: Session) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command(session))
            except Exception as error:
                future.set_exception(error)
                exit_if_context_lost()

    def _cancel_commands(self) -> None:
        while self._commands:
            _, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError("the drafter is stopping"))
