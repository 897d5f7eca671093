"""The drafter's end of the arena (arena.py).

It fetches the arena from the verifier, checks it and answers requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError, UnavailableError
from foretoken.transports.arena import HAND_OVER_TIMEOUT_S
from foretoken.transports.arena_layout import (
    HEADER_BYTES,
    MAX_DESCRIPTORS,
    ArenaHeader,
    ReplyBuffer,
    RequestBuffer,
    map_memory,
)
from foretoken.transports.doorbell import Doorbell
from foretoken.transports.transport import TransportClosedError

# Drafters without a model need no torch.
if TYPE_CHECKING:
    from foretoken.models.target_weights import TargetWeights
    from foretoken.transports.shared_overlap_memory import SharedOverlapMemory


class ArenaPeer:
    """The drafter's end of an arena. Only one thread may use it."""

    def __init__(self, path: str, epoch: int, target: TargetInfo, needs: DrafterNeeds | None = None) -> None:
        """Fetch the arena of the verifier that listens at ``path``.

        Check it and answer its self-test.

        ``needs``: of the drafter; None: it only needs tokens.

        Raises:
            PreconditionError: layout, epoch or size differ from what this drafter needs; names both
                values.
            UnavailableError: nobody listens there, or the hand-over was cut off.
        """
        with contextlib.ExitStack() as undo:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(self._connection.close)
            fds = self._fetch(path)
            closing = undo.enter_context(contextlib.ExitStack())
            for fd in fds:
                closing.callback(os.close, fd)
            header = ArenaHeader.unpack(os.pread(fds[0], HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0"))
            names = header.layout.descriptors
            if len(fds) != len(names):
                raise UnavailableError(f"arena: {len(fds)} descriptors instead of {len(names)} at {path}")
            handed = dict(zip(names, fds, strict=True))
            if header.epoch != epoch:
                raise PreconditionError(f"arena: epoch {header.epoch}, the attach request says {epoch}")
            header.layout.check(target, needs)
            self._layout = header.layout
            self._request_memory = map_memory(handed["requests"], self._layout.request_bytes, writable=False)
            undo.callback(self._request_memory.close)
            self._reply_memory = map_memory(handed["replies"], self._layout.reply_bytes, writable=True)
            undo.callback(self._reply_memory.close)
            self._request_bell = Doorbell(os.dup(handed["request_bell"]))
            undo.callback(self._request_bell.close)
            self._reply_bell = Doorbell(os.dup(handed["reply_bell"]))
            undo.callback(self._reply_bell.close)
            self.weights = _map_weights(needs, handed)
            # Device memory shared with the verifier, if any; it may be used after ``close``.
            self.share = self._map_share(needs, handed)
            self.digest = self._answer_self_test(header.challenge)
            closing.close()
            undo.pop_all()
        self._requests = [RequestBuffer(self._request_memory, self._layout, i) for i in range(self._layout.num_buffers)]
        self._replies = [ReplyBuffer(self._reply_memory, self._layout, i) for i in range(self._layout.num_buffers)]
        self._num_read = 0
        self._num_answered = 0

    def filenos(self) -> tuple[int, int]:
        """Return the descriptors of doorbell and connection; wait for them before ``requests``."""
        return self._request_bell.fileno(), self._connection.fileno()

    def requests(self) -> Iterator[DraftRequest | tuple[int, ...]]:
        """Yield the requests and releases of batch slots that have arrived, in order.

        Answer each before the next.

        Raises TransportClosedError if the verifier is gone, ValueError if a request cannot be read.
        """
        num_rings = self._request_bell.take()
        if num_rings == 0 and self._is_gone():
            raise TransportClosedError("the verifier closed the arena")
        if num_rings > self._layout.num_buffers:
            raise ValueError(f"{num_rings} requests at once, the arena holds {self._layout.num_buffers}")
        for _ in range(num_rings):
            request = self._requests[self._num_read % len(self._requests)].read()
            self._num_read += 1
            yield request

    def reply(self, batch: DraftBatch | None) -> None:
        """Answer the oldest open request with a checked batch; None acknowledges a release."""
        if batch is not None:
            self._replies[self._num_answered % len(self._replies)].write(batch)
        self._num_answered += 1
        self._reply_bell.ring()

    def close(self) -> None:
        """Close the arena, which the verifier notices at once. Idempotent.

        Streams that wait for the verifier continue. Device memory stays while the drafter refers to
        it.
        """
        if self.share is not None:
            self.share.release()
        self._connection.close()
        self._request_bell.close()
        self._reply_bell.close()
        self._requests, self._replies = [], []
        for memory in (self._request_memory, self._reply_memory):
            # The error of an unreadable request still refers to its buffer; the memory is freed
            # with the error.
            with contextlib.suppress(BufferError):
                memory.close()

    def _fetch(self, path: str) -> list[int]:
        """Return the descriptors, at least one, in the order of ``ArenaLayout.descriptors``."""
        self._connection.settimeout(HAND_OVER_TIMEOUT_S)
        try:
            self._connection.connect(path)
            # Accept one more than allowed, so that a longer hand-over is noticed instead of
            # truncated.
            _, fds, _, _ = socket.recv_fds(self._connection, 1, MAX_DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"arena: no hand-over at {path}: {error}") from error
        if not fds:
            raise UnavailableError(f"arena: no descriptors at {path}")
        self._connection.setblocking(False)
        return fds

    def _map_share(self, needs: DrafterNeeds | None, handed: Mapping[str, int]) -> SharedOverlapMemory | None:
        """Map the device memory, if any.

        Raises PreconditionError if this process does not see the device.
        """
        layout = self._layout.overlap
        if layout is None:
            return None
        from foretoken.models.backend import device_of
        from foretoken.transports.shared_overlap_memory import SharedOverlapMemory

        assert needs is not None, "checked with the layout"
        fds = [handed["device_memory"], handed["flag_words"]]
        return SharedOverlapMemory.mapped(layout, device_of(needs.device), fds)

    def _answer_self_test(self, challenge: bytes) -> bytes:
        if self._request_bell.take() != 1:
            raise PreconditionError("self-test: the request doorbell was not rung")
        digest = hashlib.sha256(challenge).digest()
        if self.share is not None and self.share.take_proof(len(digest)) != digest:
            raise PreconditionError("self-test: the device memory does not hold the digest of the challenge")
        self._reply_memory[: len(digest)] = digest
        self._reply_bell.ring()
        return digest

    def _is_gone(self) -> bool:
        """Return whether the verifier has closed its end.

        It never writes, so anything readable is the end.
        """
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _map_weights(needs: DrafterNeeds | None, handed: Mapping[str, int]) -> TargetWeights | None:
    if needs is None or not needs.weights or "weights" not in handed:
        return None
    from foretoken.transports.shared_weights import map_weights

    return map_weights((handed["weights"], handed["weights_memory"]), needs.device)
