"""The drafter and the verifier that is attached to it.

Knows no gRPC and no threads: all calls come from the drafter's thread. A drafter serves one
verifier: when that verifier attaches again its earlier attachment ends, and another verifier is
refused.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import Future
from typing import Literal

from drafter_svc.rounds import RoundCounts, SequenceRounds
from foretoken.corpora import Corpora, HoldsCorpora
from foretoken.drafter import Drafter, DraftsOverlapped
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError, UnavailableError
from foretoken.lost_context import exit_if_context_lost
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.transport import TransportClosedError, answer

logger = logging.getLogger(__name__)


class AttachedVerifier:
    """One verifier's hold on the drafter. ``ended`` resolves to the reason when it ends."""

    def __init__(
        self, epoch: int, target: TargetInfo, needs: DrafterNeeds, transport: Literal["shared-memory", "grpc"]
    ) -> None:
        self.epoch = epoch
        self.target = target
        # Float32 values of the hidden states at one position.
        self.hidden_width = len(needs.captured_layers) * target.hidden_size
        self.transport = transport
        # Whether the Draft stream is open, if that is the transport.
        self.is_streaming = False
        self.ended: Future[str] = Future()


class Session:
    """A drafter with its attachment, if there is one, and the attachment's arena."""

    def __init__(self, drafter: Drafter, *, counts_rounds: bool = False) -> None:
        """``counts_rounds``: whether ``rounds`` will be asked for."""
        self.drafter = drafter
        self.attachment: AttachedVerifier | None = None
        self.peer: ArenaPeer | None = None
        # The drafter, while it has device memory of the attachment.
        self._overlapped: DraftsOverlapped | None = None
        self._counts_rounds = counts_rounds
        # Of the attachment, if rounds are counted.
        self._rounds: RoundCounts | None = None

    def attach(self, epoch: int, target: TargetInfo, arena_socket: str) -> tuple[AttachedVerifier, str, bytes]:
        """Attach as DrafterThread.attach does.

        Raises PreconditionError as it does, and for device memory that the drafter cannot draft
        from.
        """
        self._check_free(epoch)
        self.end("another attachment took its place")
        with contextlib.ExitStack() as undo:
            needs = self.drafter.needs(target)
            peer = None
            if arena_socket:
                peer = ArenaPeer(arena_socket, epoch, target, needs)
                undo.callback(peer.close)
            self.drafter.attach(target, None if peer is None else peer.weights)
            if peer is not None and peer.share is not None:
                if not isinstance(self.drafter, DraftsOverlapped):
                    kind = self.drafter.algorithm
                    raise PreconditionError(f"a drafter of kind {kind} does not draft from device memory")
                self.drafter.set_overlap_memory(peer.share.memory, peer.share.order)
                self._overlapped = self.drafter
            undo.pop_all()
        self.peer = peer
        self.attachment = AttachedVerifier(epoch, target, needs, "grpc" if peer is None else "shared-memory")
        self._rounds = RoundCounts(target.max_batch_slots) if self._counts_rounds else None
        logger.info("attached over %s: epoch %d", self.attachment.transport, epoch)
        logger.debug("the target: %s", target)
        return self.attachment, self.drafter.algorithm, b"" if peer is None else peer.digest

    def detach(self, attachment: AttachedVerifier, reason: str) -> None:
        """End an attachment; do nothing if it has ended."""
        if attachment is self.attachment:
            self.end(reason)

    def draft(self, attachment: AttachedVerifier, request: DraftRequest) -> DraftBatch:
        """Draft as DrafterThread.draft does. Raises UnavailableError as it does."""
        if attachment is not self.attachment:
            raise UnavailableError("the attachment has ended")
        try:
            return self._answer(request)
        except Exception as error:
            self._fail(error)
            raise UnavailableError(f"the drafter failed: {error!r}") from error

    def rounds(self, epoch: int, batch_slot: int, generation: int) -> SequenceRounds | None:
        """Return the rounds as DrafterThread.rounds does."""
        is_current = self.attachment is not None and self.attachment.epoch == epoch
        return self._rounds.take(batch_slot, generation) if is_current and self._rounds is not None else None

    def release(self, epoch: int, batch_slots: list[int]) -> None:
        """Release as DrafterThread.release does.

        Raises PreconditionError for another epoch, UnavailableError if the drafter fails.
        """
        if self.attachment is None or self.attachment.epoch != epoch:
            raise PreconditionError(f"not attached to epoch {epoch}")
        try:
            self.drafter.release(batch_slots)
        except Exception as error:
            self._fail(error)
            raise UnavailableError(f"the drafter failed: {error!r}") from error

    def serve_arena(self, peer: ArenaPeer) -> None:
        """Answer the requests in the arena.

        Any error ends the attachment; a lost GPU context ends the process.
        """
        try:
            for request in peer.requests():
                if isinstance(request, tuple):
                    self.drafter.release(request)
                    peer.reply(None)
                else:
                    peer.reply(self._answer(request))
        except TransportClosedError as error:
            self.end(str(error))
        except Exception as error:
            self._fail(error)

    @property
    def is_preparing(self) -> bool:
        """Return whether ``prepare`` has more to do."""
        return self._overlapped is not None and not self._overlapped.is_prepared

    def prepare(self) -> bool:
        """Prepare for one more usual kind of request, while none waits. Return whether it did.

        Any error ends the attachment; a lost GPU context ends the process.
        """
        if self._overlapped is None:
            return False
        try:
            return self._overlapped.prepare()
        except Exception as error:
            self._fail(error)
            return False

    def corpora(self) -> Corpora:
        """Return the corpora as DrafterThread.corpora does.

        Raises PreconditionError if there are none.
        """
        if not isinstance(self.drafter, HoldsCorpora):
            raise PreconditionError(f"a drafter of kind {self.drafter.algorithm} holds no corpora", field="drafter")
        return self.drafter.corpora

    def end(self, reason: str) -> None:
        """End the attachment, if there is one, and release the drafter's state of its sequences.

        The drafter keeps device memory until its next ``attach``, because work that it has queued
        may still run. Once the peer is closed, no queued work waits for the verifier.
        """
        attachment, self.attachment = self.attachment, None
        peer, self.peer = self.peer, None
        self._overlapped = None
        if peer is not None:
            peer.close()
        if attachment is None:
            return
        logger.info("detached: %s", reason)
        try:
            self.drafter.release(range(attachment.target.max_batch_slots))
        except Exception as error:
            logger.error("the drafter failed to release its sequences", exc_info=error)
        attachment.ended.set_result(reason)

    def _answer(self, request: DraftRequest) -> DraftBatch:
        if self._rounds is None:
            return answer(self.drafter, request)
        began_ns = time.time_ns()
        batch = answer(self.drafter, request)
        self._rounds.count(request, began_ns, time.time_ns())
        return batch

    def _check_free(self, epoch: int) -> None:
        if self.peer is not None:
            # The verifier that is attached may have died just now.
            self.serve_arena(self.peer)
        held = self.attachment
        if held is not None and held.epoch != epoch and (self.peer is not None or held.is_streaming):
            raise PreconditionError("this drafter serves another verifier; give each verifier a drafter of its own")

    def _fail(self, error: Exception) -> None:
        logger.error("the drafter failed; the attachment ends", exc_info=error)
        self.end(f"the drafter failed: {error!r}")
        exit_if_context_lost()
