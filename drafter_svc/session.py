"""The one thread that owns the drafter: every call to it is made here, whatever transport the request came by.

Knows no gRPC. A drafter serves one verifier: its new attachment ends the one before, and another verifier is refused.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from foretoken.corpora import Corpora, HoldsCorpora
from foretoken.drafter import Drafter, DraftsResident
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError, UnavailableError
from foretoken.lost_context import exit_if_context_lost
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.doorbell import Doorbell, Waiter, default_spin_us
from foretoken.transports.transport import TransportClosedError, answer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Attachment:
    """One verifier's hold on the drafter. ``ended`` resolves to the reason when it is over."""

    def __init__(
        self, epoch: int, target: TargetInfo, needs: DrafterNeeds, transport: Literal["shared-memory", "grpc"]
    ) -> None:
        self.epoch = epoch
        self.target = target
        # Float32 values of one hidden row.
        self.hidden_width = len(needs.features) * target.hidden_size
        self.transport = transport
        # Whether the Draft stream is open, where that is the transport.
        self.is_streaming = False
        self.ended: Future[str] = Future()


class DrafterThread:
    """Runs the drafter. Its methods may be called from any thread; their futures resolve in this one's."""

    def __init__(self, make_drafter: Callable[[], Drafter], spin_us: int | None = None) -> None:
        """``make_drafter`` is called in the thread, once. ``spin_us``: as Waiter's; None: ``default_spin_us``."""
        self._spin_us = default_spin_us() if spin_us is None else spin_us
        self._wake = Doorbell()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._attachment: Attachment | None = None
        self._peer: ArenaPeer | None = None
        self._drafter: Drafter
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_drafter,), name="drafter", daemon=True)
        self._thread.start()

    @property
    def attachment(self) -> Attachment | None:
        """The attachment of the moment."""
        return self._attachment

    def attach(self, epoch: int, target: TargetInfo, arena_socket: str) -> Future[tuple[Attachment, str, bytes]]:
        """Start an attachment; gives it, the drafter's algorithm and, for an arena, the self-test's digest.

        ``arena_socket``: path that hands over the arena; empty for the stream. Raises PreconditionError while another
        verifier holds the drafter. Other errors are those of ``ArenaPeer`` and of ``Drafter.attach``; after one the
        drafter is not attached.
        """
        return self._submit(lambda: self._attach(epoch, target, arena_socket))

    def needs(self, target: TargetInfo) -> Future[DrafterNeeds]:
        """What requests for this target must carry. Raises PreconditionError if drafter and target do not fit."""
        return self._submit(lambda: self._drafter.needs(target))

    def draft(self, attachment: Attachment, request: DraftRequest) -> Future[DraftBatch]:
        """Draft for a stream. Raises UnavailableError if the attachment has ended, also by what the drafter raised."""
        return self._submit(lambda: self._draft(attachment, request))

    def release(self, epoch: int, slots: list[int]) -> Future[None]:
        """Forget slots. Raises PreconditionError for another epoch than the attachment's."""
        return self._submit(lambda: self._release(epoch, slots))

    def gauges(self) -> Future[dict[str, float]]:
        return self._submit(lambda: self._drafter.gauges())

    def algorithm(self) -> Future[str]:
        return self._submit(lambda: self._drafter.algorithm)

    def corpora(self) -> Future[Corpora]:
        """The drafter's corpora, for any thread. Raises PreconditionError for a kind of drafter that holds none."""
        return self._submit(self._corpora)

    def detach(self, attachment: Attachment, reason: str) -> Future[None]:
        """End an attachment; nothing happens if it has ended."""
        return self._submit(lambda: self._end(reason) if attachment is self._attachment else None)

    def stop(self) -> None:
        """End the attachment and the thread, and wait for it, but not for a drafter that is still being made."""
        with self._lock:
            self._stopping = True
            self._wake.ring()
        if self.ready.done():
            self._thread.join()
            self._wake.close()

    def _submit(self, command: Callable[[], Result]) -> Future[Result]:
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
            self._drafter = make_drafter()
        except BaseException as error:
            with self._lock:
                self._stopping = True
            self._cancel_commands()
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        waiter, waited_for = self._new_waiter()
        while not self._stopping:
            if waited_for is not self._peer:
                waiter, waited_for = self._new_waiter()
            ready = waiter.wait(None)
            if self._wake.fileno() in ready:
                self._wake.take()
                self._run_commands()
            elif self._peer is not None:
                self._serve_arena(self._peer)
        self._end("the drafter stopped")
        self._cancel_commands()

    def _new_waiter(self) -> tuple[Waiter, ArenaPeer | None]:
        fds = () if self._peer is None else self._peer.filenos()
        return Waiter((self._wake.fileno(), *fds), self._spin_us), self._peer

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)
                exit_if_context_lost()

    def _cancel_commands(self) -> None:
        while self._commands:
            _, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError("the drafter is stopping"))

    def _attach(self, epoch: int, target: TargetInfo, arena_socket: str) -> tuple[Attachment, str, bytes]:
        self._check_free(epoch)
        self._end("another attachment took its place")
        with contextlib.ExitStack() as undo:
            needs = self._drafter.needs(target)
            peer = None
            if arena_socket:
                peer = ArenaPeer(arena_socket, epoch, target, needs)
                undo.callback(peer.close)
            self._drafter.attach(target, None if peer is None else peer.weights)
            if peer is not None and peer.share is not None:
                if not isinstance(self._drafter, DraftsResident):
                    kind = self._drafter.algorithm
                    raise PreconditionError(f"a drafter of kind {kind} does not draft from device memory")
                self._drafter.set_resident(peer.share.memory, peer.share.order)
            undo.pop_all()
        self._peer = peer
        self._attachment = Attachment(epoch, target, needs, "grpc" if peer is None else "shared-memory")
        logger.info("attached over %s: epoch %d, %s", self._attachment.transport, epoch, target)
        return self._attachment, self._drafter.algorithm, b"" if peer is None else peer.digest

    def _check_free(self, epoch: int) -> None:
        if self._peer is not None:
            # The one who holds it may have died just now.
            self._serve_arena(self._peer)
        held = self._attachment
        if held is not None and held.epoch != epoch and (self._peer is not None or held.is_streaming):
            raise PreconditionError("this drafter serves another verifier; give each verifier a drafter of its own")

    def _draft(self, attachment: Attachment, request: DraftRequest) -> DraftBatch:
        if attachment is not self._attachment:
            raise UnavailableError("the attachment has ended")
        try:
            return answer(self._drafter, request)
        except Exception as error:
            self._fail(error)
            raise UnavailableError(f"the drafter failed: {error!r}") from error

    def _release(self, epoch: int, slots: list[int]) -> None:
        if self._attachment is None or self._attachment.epoch != epoch:
            raise PreconditionError(f"not attached to epoch {epoch}")
        try:
            self._drafter.release(slots)
        except Exception as error:
            self._fail(error)
            raise UnavailableError(f"the drafter failed: {error!r}") from error

    def _serve_arena(self, peer: ArenaPeer) -> None:
        """Answer what has come. Whatever goes wrong ends the attachment, the loss of the GPU context the process."""
        try:
            for request in peer.requests():
                if isinstance(request, tuple):
                    self._drafter.release(request)
                    peer.reply(None)
                else:
                    peer.reply(answer(self._drafter, request))
        except TransportClosedError as error:
            self._end(str(error))
        except Exception as error:
            self._fail(error)

    def _corpora(self) -> Corpora:
        if not isinstance(self._drafter, HoldsCorpora):
            raise PreconditionError(f"a drafter of kind {self._drafter.algorithm} holds no corpora", field="drafter")
        return self._drafter.corpora

    def _fail(self, error: Exception) -> None:
        logger.error("the drafter failed; the attachment ends", exc_info=error)
        self._end(f"the drafter failed: {error!r}")
        exit_if_context_lost()

    def _end(self, reason: str) -> None:
        """Give back what the attachment held, the sequences' state in the drafter included.

        Device memory goes when the drafter lets go of it, at its next ``attach``: what it has queued may still run.
        Nothing that is queued waits for the verifier any more once the peer is closed.
        """
        attachment, self._attachment = self._attachment, None
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()
        if attachment is None:
            return
        logger.info("detached: %s", reason)
        try:
            self._drafter.release(range(attachment.target.max_slots))
        except Exception as error:
            logger.error("the drafter failed to release its sequences", exc_info=error)
        attachment.ended.set_result(reason)
