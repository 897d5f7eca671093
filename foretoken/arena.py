"""The arena: memory that a verifier and a drafter on one host share, and the doorbells between them.

The verifier makes it; four descriptors (and, for a drafter that shares them, one of the target's weights) go to the
drafter over a private Unix socket, which stays open: its end tells each side at once that the other one is gone. No
name of it exists anywhere, so no death leaves memory behind.

    request memory   written by the verifier, sealed so that nobody else can map it writable
      header         magic, layout version, ArenaLayout, epoch, challenge of the self-test
      buffers        ``num_buffers`` requests
    reply memory     written by the drafter, mapped read-only by the verifier
      header         digest of the self-test
      buffers        ``num_buffers`` replies

Message number s uses buffer s mod ``num_buffers`` of either memory. A side writes a buffer, then rings. A request
buffer is written again only after its reply has come, so no buffer is written while the other side reads it, and the
rings' system calls order the memory. The verifier trusts nothing that a drafter writes: it copies, then checks.

Hidden rows for drafters with a head travel in the request buffers, whose number bounds them. A GPU's arena will want
GPU memory in the place of host memory, for hidden rows and trees. Both ends keep their protocols.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.arena_layout import (
    F_SEAL_FUTURE_WRITE,
    HEADER_BYTES,
    SIZE_SEALS,
    ArenaHeader,
    ArenaLayout,
    ReplyBuffer,
    RequestBuffer,
    map_memory,
    new_memory,
    seal,
)
from foretoken.doorbell import Doorbell, Waiter, default_spin_us
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError, UnavailableError
from foretoken.rpc import MAX_UNIX_PATH_BYTES
from foretoken.transport import RequestQueue, TransportClosedError, TransportCounters

if TYPE_CHECKING:
    from foretoken.models.target_weights import TargetWeights

NUM_DESCRIPTORS = 4
# Seconds for the hand-over of the descriptors, once both sides are at it.
HAND_OVER_TIMEOUT_S = 5.0


class ArenaListener:
    """The private Unix socket at which a drafter gets an arena: 0600, in a folder of 0700, gone once it connected."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: where the private folder is made; both sides must see it. None: the system's."""
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
        """Readable when a drafter has connected."""
        return self._socket.fileno()

    def accept(self) -> socket.socket:
        """The drafter's connection. Raises BlockingIOError if there is none. The socket file is removed."""
        connection, _ = self._socket.accept()
        self.close()
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        return connection

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ArenaTransport:
    """The verifier's end: a ``foretoken.transport.DraftTransport``."""

    def __init__(
        self,
        layout: ArenaLayout,
        epoch: int,
        challenge: bytes,
        counters: TransportCounters,
        *,
        spin_us: int | None = None,
        weights_fd: int | None = None,
    ) -> None:
        """Makes the memory. ``spin_us``: as Waiter's; None: ``default_spin_us``.

        ``weights_fd``: foretoken.shared_weights for the drafter; it stays the caller's.
        """
        self._weights_fds = [] if weights_fd is None else [weights_fd]
        self._digest = hashlib.sha256(challenge).digest()
        self._spin_us = default_spin_us() if spin_us is None else spin_us
        self._queue = RequestQueue(
            layout.max_rows, layout.token_capacity, layout.block_size, counters, releases_are_answered=True
        )
        self._lock = threading.Lock()
        self._closed = False
        self._num_sent = 0
        self._num_taken = 0
        self._connection: socket.socket | None = None
        self._waiter: Waiter | None = None
        with contextlib.ExitStack() as undo:
            self._request_fd = new_memory("foretoken-requests", layout.request_bytes)
            undo.callback(os.close, self._request_fd)
            self._reply_fd = new_memory("foretoken-replies", layout.reply_bytes)
            undo.callback(os.close, self._reply_fd)
            self._request_memory = map_memory(self._request_fd, layout.request_bytes, writable=True)
            undo.callback(self._request_memory.close)
            header = ArenaHeader(layout, epoch, challenge).pack()
            self._request_memory[: len(header)] = header
            self._reply_memory = map_memory(self._reply_fd, layout.reply_bytes, writable=False)
            undo.callback(self._reply_memory.close)
            # The verifier's own mapping is older than the seal.
            seal(self._request_fd, F_SEAL_FUTURE_WRITE | SIZE_SEALS)
            seal(self._reply_fd, SIZE_SEALS)
            self._request_bell = Doorbell()
            undo.callback(self._request_bell.close)
            self._reply_bell = Doorbell()
            undo.pop_all()
        self._requests = [RequestBuffer(self._request_memory, layout, i) for i in range(layout.num_buffers)]
        self._replies = [ReplyBuffer(self._reply_memory, layout, i) for i in range(layout.num_buffers)]

    @property
    def name(self) -> str:
        return "shared-memory"

    def fileno(self) -> int:
        """Readable when the drafter is gone."""
        assert self._connection is not None, "hand_over comes first"
        return self._connection.fileno()

    def hand_over(self, connection: socket.socket) -> None:
        """Give the drafter its descriptors, with the first ring of the self-test. Takes over ``connection``."""
        self._connection = connection
        self._request_bell.ring()
        fds = [self._request_fd, self._reply_fd, self._request_bell.fileno(), self._reply_bell.fileno()]
        fds += self._weights_fds
        socket.send_fds(connection, [b"\0"], fds)
        self._close_memory_fds()
        self._waiter = Waiter((self._reply_bell.fileno(), connection.fileno()), self._spin_us)

    def check_self_test(self) -> None:
        """Raise PreconditionError unless the drafter's digest and ring have come through the arena."""
        digest = self._reply_memory[: len(self._digest)]
        if not hmac.compare_digest(digest, self._digest):
            raise PreconditionError("self-test: the digest in the arena is not that of the challenge")
        if self._reply_bell.take() != 1:
            raise PreconditionError("self-test: the reply doorbell was not rung")

    def post(self, request: DraftRequest) -> None:
        with self._lock:
            self._check_open()
            self._queue.add(request)
            self._take_replies()
            self._send()

    def receive(self, timeout_s: float) -> DraftBatch | None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            assert self._waiter is not None and self._connection is not None, "hand_over comes first"
            while True:
                batch = self._take_replies()
                if batch is not None or not self._queue.is_awaiting:
                    return batch
                self._send()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._queue.give_up()
                    return None
                ready = self._waiter.wait(left_s)
                # A reply that came before the end still counts.
                if ready == {self._connection.fileno()}:
                    raise TransportClosedError("the drafter closed the arena")

    def is_idle(self) -> bool:
        with self._lock:
            self._check_open()
            self._take_replies()
            self._send()
            return self._queue.is_idle

    def release(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._check_open()
            self._queue.add_release(slots)
            self._take_replies()
            self._send()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._connection is not None:
                self._connection.close()
            self._close_memory_fds()
            self._request_bell.close()
            self._reply_bell.close()
            # Arrays hold the mappings open.
            self._requests, self._replies = [], []
            self._request_memory.close()
            self._reply_memory.close()

    def _send(self) -> None:
        """Write what the window allows, and ring once for each."""
        while (message := self._queue.next()) is not None:
            buffer = self._requests[self._num_sent % len(self._requests)]
            if isinstance(message, tuple):
                buffer.write_release(message)
            else:
                buffer.write(message)
            self._num_sent += 1
            self._request_bell.ring()

    def _take_replies(self) -> DraftBatch | None:
        """Pair all replies that have come; the awaited one is returned."""
        num_rings = self._reply_bell.take()
        if num_rings > self._queue.num_in_flight:
            self._hang_up()
            raise TransportClosedError(f"{num_rings} replies to {self._queue.num_in_flight} requests")
        awaited = None
        for _ in range(num_rings):
            batch = self._queue.take(self._replies[self._num_taken % len(self._replies)].read)
            self._num_taken += 1
            awaited = awaited or batch
        return awaited

    def _hang_up(self) -> None:
        """End the connection, so that both sides' waiters see its end."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError("the transport is closed")

    def _close_memory_fds(self) -> None:
        """The mappings stay; the descriptors are not needed once the drafter has its own."""
        for fd in (self._request_fd, self._reply_fd):
            if fd >= 0:
                os.close(fd)
        self._request_fd = self._reply_fd = -1


class ArenaPeer:
    """The drafter's end. Used by one thread."""

    def __init__(self, path: str, epoch: int, target: TargetInfo, needs: DrafterNeeds | None = None) -> None:
        """Fetch the arena of the verifier that listens at ``path``, check it, and answer its self-test.

        ``needs``: of the drafter; None: tokens alone.

        Raises:
            PreconditionError: another layout, epoch or size than this drafter needs, named with both values.
            UnavailableError: nobody listens there, or the hand-over was cut off.
        """
        with contextlib.ExitStack() as undo:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(self._connection.close)
            fds = self._fetch(path)
            undo.callback(_close_all, [*fds[:2], *fds[NUM_DESCRIPTORS:]])
            self._request_bell, self._reply_bell = Doorbell(fds[2]), Doorbell(fds[3])
            undo.callback(self._request_bell.close)
            undo.callback(self._reply_bell.close)
            header = ArenaHeader.unpack(os.pread(fds[0], HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0"))
            if header.epoch != epoch:
                raise PreconditionError(f"arena: epoch {header.epoch}, the attach request says {epoch}")
            header.layout.check(target, needs)
            self._layout = header.layout
            self._request_memory = map_memory(fds[0], self._layout.request_bytes, writable=False)
            undo.callback(self._request_memory.close)
            self._reply_memory = map_memory(fds[1], self._layout.reply_bytes, writable=True)
            undo.callback(self._reply_memory.close)
            self.weights = self._map_weights(fds[NUM_DESCRIPTORS:]) if needs is not None and needs.weights else None
            self.digest = self._answer_self_test(header.challenge)
            _close_all([*fds[:2], *fds[NUM_DESCRIPTORS:]])
            undo.pop_all()
        self._requests = [RequestBuffer(self._request_memory, self._layout, i) for i in range(self._layout.num_buffers)]
        self._replies = [ReplyBuffer(self._reply_memory, self._layout, i) for i in range(self._layout.num_buffers)]
        self._num_read = 0
        self._num_answered = 0

    def filenos(self) -> tuple[int, int]:
        """Doorbell and connection: what to wait for before ``requests``."""
        return self._request_bell.fileno(), self._connection.fileno()

    def requests(self) -> Iterator[DraftRequest | tuple[int, ...]]:
        """The requests that have come, and slots to release, in order. Answer each before taking the next.

        Raises TransportClosedError if the verifier is gone, ValueError for a request that cannot be read.
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
        """Answer the oldest open request, with a checked batch; None acknowledges a release."""
        if batch is not None:
            self._replies[self._num_answered % len(self._replies)].write(batch)
        self._num_answered += 1
        self._reply_bell.ring()

    def close(self) -> None:
        """Idempotent. The verifier notices at once."""
        self._connection.close()
        self._request_bell.close()
        self._reply_bell.close()
        self._requests, self._replies = [], []
        self._request_memory.close()
        self._reply_memory.close()

    def _fetch(self, path: str) -> list[int]:
        """Descriptors: request memory, reply memory, request doorbell, reply doorbell; shared weights, if any."""
        self._connection.settimeout(HAND_OVER_TIMEOUT_S)
        try:
            self._connection.connect(path)
            _, fds, _, _ = socket.recv_fds(self._connection, 1, NUM_DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"arena: no hand-over at {path}: {error}") from error
        if len(fds) not in (NUM_DESCRIPTORS, NUM_DESCRIPTORS + 1):
            _close_all(fds)
            raise UnavailableError(f"arena: {len(fds)} descriptors instead of {NUM_DESCRIPTORS} at {path}")
        self._connection.setblocking(False)
        return fds

    @staticmethod
    def _map_weights(fds: Sequence[int]) -> TargetWeights | None:
        if not fds:
            return None
        # Drafters without a model need no torch.
        from foretoken.shared_weights import map_weights

        return map_weights(fds[0])

    def _answer_self_test(self, challenge: bytes) -> bytes:
        if self._request_bell.take() != 1:
            raise PreconditionError("self-test: the request doorbell was not rung")
        digest = hashlib.sha256(challenge).digest()
        self._reply_memory[: len(digest)] = digest
        self._reply_bell.ring()
        return digest

    def _is_gone(self) -> bool:
        """The verifier never writes to the connection, so whatever can be read is its end."""
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
