"""The arena: memory that a verifier and a drafter on one host share.

Doorbells between them are part of it.

The verifier makes it and sends descriptors to the drafter (arena_peer.py) over a private Unix
socket. The socket stays open: its end shows each side at once that the other is gone. The memory
has no name in any file system, so it never outlives the processes.

    request memory   written by the verifier, sealed so that nobody else can map it writable
      header         magic, layout version, ArenaLayout, epoch, challenge of the self-test
      buffers        ``num_buffers`` requests
    reply memory     written by the drafter, mapped read-only by the verifier
      header         digest of the self-test
      buffers        ``num_buffers`` replies

Message number s uses buffer s mod ``num_buffers`` of either memory. A side writes a buffer, then
rings. The verifier only reuses a request buffer after its reply has arrived, so no side writes a
buffer that the other reads; the rings' system calls order the memory. The verifier does not trust
what a drafter writes: it copies, then checks.

Hidden states for draft heads are sent in the request buffers. A drafter on the verifier's own GPU
also gets device memory (shared_overlap_memory.py), where steps leave tokens and hidden
states. That memory lives on after ``close`` on either side until its last user has released it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.errors import PreconditionError
from foretoken.rpc import MAX_UNIX_PATH_BYTES
from foretoken.transports.arena_layout import (
    F_SEAL_FUTURE_WRITE,
    SIZE_SEALS,
    ArenaHeader,
    ArenaLayout,
    ReplyBuffer,
    RequestBuffer,
    map_memory,
    new_memory,
    seal,
)
from foretoken.transports.doorbell import Doorbell, Waiter, default_spin_us
from foretoken.transports.transport import QueuedTransport, RequestQueue, TransportClosedError, TransportCounters

if TYPE_CHECKING:
    import torch

    from foretoken.transports.shared_overlap_memory import SharedOverlapMemory

# Seconds that the hand-over of the descriptors may take once the drafter has connected.
HAND_OVER_TIMEOUT_S = 5.0


class ArenaListener:
    """The private Unix socket where a drafter gets an arena.

    It has mode 0600 in a folder of 0700, and is removed once connected.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: parent of the private folder, visible to both sides.

        None: the system's temporary folder.
        """
        self._folder = tempfile.mkdtemp(prefix="arena-", dir=folder)
        self.path = os.path.join(self._folder, "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(self.path)) > MAX_UNIX_PATH_BYTES:
                raise PreconditionError(f"arena: socket path is longer than {MAX_UNIX_PATH_BYTES} bytes: {self.path}")
            self._socket.bind(self.path)
            os.chmod(self.path, 0o600)
            self._socket.listen(1)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable when a drafter has connected."""
        return self._socket.fileno()

    def accept(self) -> socket.socket:
        """Return the drafter's connection and remove the socket file.

        Raises BlockingIOError if there is none.
        """
        connection, _ = self._socket.accept()
        self.close()
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        return connection

    def close(self) -> None:
        """Close the socket and remove the folder; a second call does nothing."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _ArenaMemory:
    """Both memories and both doorbells, as the verifier holds them.

    Attributes:
        fds: descriptors for the drafter, in the order of the hand-over: requests, replies and their
            doorbells.
    """

    def __init__(self, layout: ArenaLayout, header: ArenaHeader) -> None:
        with contextlib.ExitStack() as undo:
            self.request_fd = new_memory("foretoken-requests", layout.request_bytes)
            undo.callback(os.close, self.request_fd)
            self.reply_fd = new_memory("foretoken-replies", layout.reply_bytes)
            undo.callback(os.close, self.reply_fd)
            self._request_memory = map_memory(self.request_fd, layout.request_bytes, writable=True)
            undo.callback(self._request_memory.close)
            packed = header.pack()
            self._request_memory[: len(packed)] = packed
            self.reply_memory = map_memory(self.reply_fd, layout.reply_bytes, writable=False)
            undo.callback(self.reply_memory.close)
            # The verifier's own mapping is older than the seal.
            seal(self.request_fd, F_SEAL_FUTURE_WRITE | SIZE_SEALS)
            seal(self.reply_fd, SIZE_SEALS)
            self.request_bell = Doorbell()
            undo.callback(self.request_bell.close)
            self.reply_bell = Doorbell()
            undo.pop_all()
        self.requests = [RequestBuffer(self._request_memory, layout, i) for i in range(layout.num_buffers)]
        self.replies = [ReplyBuffer(self.reply_memory, layout, i) for i in range(layout.num_buffers)]

    @property
    def fds(self) -> list[int]:
        return [self.request_fd, self.reply_fd, self.request_bell.fileno(), self.reply_bell.fileno()]

    def close_fds(self) -> None:
        """Close the memories' descriptors, once the drafter has its own.

        The mappings stay. Idempotent.
        """
        for fd in (self.request_fd, self.reply_fd):
            if fd >= 0:
                os.close(fd)
        self.request_fd = self.reply_fd = -1

    def close(self) -> None:
        self.close_fds()
        self.request_bell.close()
        self.reply_bell.close()
        # Arrays hold the mappings open.
        self.requests, self.replies = [], []
        self._request_memory.close()
        self.reply_memory.close()


class _DrafterConnection(NamedTuple):
    """The connection to the drafter that has the descriptors.

    Attributes:
        end: waits for the end of the connection: the drafter never
            writes, so anything readable is it.
        reply: waits for a reply or for the end.
    """

    socket: socket.socket
    end: Waiter
    reply: Waiter


class ArenaTransport(QueuedTransport):
    """The verifier's end."""

    name = "shared-memory"

    def __init__(
        self,
        layout: ArenaLayout,
        epoch: int,
        challenge: bytes,
        counters: TransportCounters,
        *,
        spin_us: int | None = None,
        weights_fds: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """Make the memory.

        Args:
            spin_us: as for Waiter; None: ``default_spin_us``.
            weights_fds: descriptors of shared_weights.py for the drafter, if the layout has
                weights; the caller closes them.
            device: where to make the layout's device memory, if it has some.

        Raises:
            UnavailableError, PreconditionError: the device memory cannot be made; names CUDA's
                error.
        """
        assert bool(weights_fds) == bool(layout.has_weights), "the layout says what is handed over"
        super().__init__(
            RequestQueue(
                layout.max_rows,
                layout.token_capacity,
                layout.block_size,
                counters,
                releases_are_answered=True,
                overlap_capacity=layout.overlap_capacity,
            )
        )
        self._layout = layout
        self._weights_fds = weights_fds
        self._share: SharedOverlapMemory | None = None
        self._share_fds: list[int] = []
        self._digest = hashlib.sha256(challenge).digest()
        self._spin_us = default_spin_us() if spin_us is None else spin_us
        self._num_sent = 0
        self._num_taken = 0
        self._drafter: _DrafterConnection | None = None
        self._memory = _ArenaMemory(layout, ArenaHeader(layout, epoch, challenge))
        if layout.overlap is not None:
            assert device is not None, "the layout has device memory"
            from foretoken.transports.shared_overlap_memory import SharedOverlapMemory

            try:
                self._share, self._share_fds = SharedOverlapMemory.new(layout.overlap, device)
            except BaseException:
                self._memory.close()
                raise
            self.overlap_memory, self.order = self._share.memory, self._share.order

    def is_open(self) -> bool:
        with self._lock:
            return not self._closed and self._drafter is not None and not self._drafter.end.wait(0)

    def fileno(self) -> int:
        return self._attached().socket.fileno()

    def hand_over(self, connection: socket.socket) -> None:
        """Send the drafter its descriptors, with the first ring of the self-test.

        Takes over ``connection``.
        """
        reply = Waiter((self._memory.reply_bell.fileno(), connection.fileno()), self._spin_us)
        self._drafter = _DrafterConnection(connection, Waiter((connection.fileno(),)), reply)
        self._memory.request_bell.ring()
        if self._share is not None:
            self._share.write_proof(self._digest)
        fds = [*self._memory.fds, *self._weights_fds, *self._share_fds]
        assert len(fds) == len(self._layout.descriptors), "the layout says what is handed over"
        socket.send_fds(connection, [b"\0"], fds)
        self._close_sent_fds()

    def check_self_test(self) -> None:
        """Raise PreconditionError unless the drafter's digest and ring came through the arena."""
        digest = self._memory.reply_memory[: len(self._digest)]
        if not hmac.compare_digest(digest, self._digest):
            raise PreconditionError("self-test: the digest in the arena does not match the challenge")
        if self._memory.reply_bell.take() != 1:
            raise PreconditionError("self-test: the reply doorbell was not rung")
        if self._share is not None and any(self._share.take_proof(len(self._digest))):
            raise PreconditionError("self-test: the drafter did not clear the digest in the device memory")

    def receive(self, timeout_s: float) -> DraftBatch | None:
        """Wait for the reply; None without one.

        Raises TransportClosedError if the drafter is gone.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            drafter = self._attached()
            while True:
                batch = self._take_replies()
                if batch is not None or not self._queue.is_awaiting:
                    return batch
                self._send()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._queue.give_up()
                    return None
                ready = drafter.reply.wait(left_s)
                # A reply that arrived before the end still counts.
                if ready == {drafter.socket.fileno()}:
                    raise TransportClosedError("the drafter closed the arena")

    def close(self) -> None:
        """Close the arena and let streams that wait for the drafter continue.

        Device memory stays while something refers to it, because queued work may still read it.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._share is not None:
                self._share.release()
            if self._drafter is not None:
                self._drafter.socket.close()
            self._close_sent_fds()
            self._memory.close()

    def _attached(self) -> _DrafterConnection:
        assert self._drafter is not None, "hand_over comes first"
        return self._drafter

    def _write(self, message: DraftRequest | tuple[int, ...]) -> None:
        buffer = self._memory.requests[self._num_sent % len(self._memory.requests)]
        if isinstance(message, tuple):
            buffer.write_release(message)
        else:
            buffer.write(message)
        self._num_sent += 1
        self._memory.request_bell.ring()

    def _take_replies(self) -> DraftBatch | None:
        num_rings = self._memory.reply_bell.take()
        if num_rings > self._queue.num_in_flight:
            # The end of the connection wakes both sides' waiters.
            with contextlib.suppress(OSError):
                self._attached().socket.shutdown(socket.SHUT_RDWR)
            raise TransportClosedError(f"{num_rings} replies to {self._queue.num_in_flight} requests")
        awaited, replies = None, self._memory.replies
        for _ in range(num_rings):
            batch = self._queue.take(replies[self._num_taken % len(replies)].read)
            self._num_taken += 1
            awaited = awaited or batch
        return awaited

    def _close_sent_fds(self) -> None:
        """Close what the drafter has its own descriptors of. Mappings stay."""
        self._memory.close_fds()
        for fd in self._share_fds:
            os.close(fd)
        self._share_fds = []
