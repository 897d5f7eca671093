"""The gRPC transport: one long-lived bidirectional stream to a drafter on another host.

Two threads stand between the engine and the stream: one writes what the engine queues, one reads
replies. The engine thread waits for the network only in ``receive``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from foretoken import limits
from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.transports.arena_layout import ArenaLayout
from foretoken.transports.doorbell import Doorbell
from foretoken.transports.draft_wire import batch_from_proto, request_to_proto
from foretoken.transports.transport import (
    QueuedTransport,
    RequestQueue,
    TransportClosedError,
    TransportCounters,
    token_capacity_for,
)
from protos import drafter_pb2

# The reader's word for: the stream has ended.
_END = None


class StreamTransport(QueuedTransport):
    """The verifier's end, over ``DrafterService.Draft``. A stream shares no memory."""

    name = "grpc"

    def __init__(self, stub: Any, epoch: int, layout: ArenaLayout, counters: TransportCounters) -> None:
        """``stub``: a synchronous DrafterServiceStub that is attached.

        ``layout``: sizes of requests.
        """
        capacity = token_capacity_for(
            layout.max_rows, layout.hidden_width, layout.token_capacity, limits.MAX_BODY_BYTES // 2
        )
        super().__init__(
            RequestQueue(layout.max_rows, capacity, layout.block_size, counters, releases_are_answered=False)
        )
        self._stub = stub
        self._epoch = epoch
        self._outgoing: queue.SimpleQueue[DraftRequest | tuple[int, ...] | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[drafter_pb2.DraftResponse | None] = queue.SimpleQueue()
        self._is_over = False
        self._reason = "the stream ended"
        self._ended = Doorbell()
        self._call = stub.Draft(self._requests())
        self._reader = threading.Thread(target=self._read, name="draft-stream-reader", daemon=True)
        self._reader.start()

    def is_open(self) -> bool:
        return not (self._closed or self._is_over)

    def fileno(self) -> int:
        return self._ended.fileno()

    def receive(self, timeout_s: float) -> DraftBatch | None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            while self._queue.is_awaiting:
                self._send()
                try:
                    message = self._replies.get(timeout=max(deadline - time.monotonic(), 0.0))
                except queue.Empty:
                    self._queue.give_up()
                    return None
                if (batch := self._take(message)) is not None:
                    return batch
            return None

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._outgoing.put(None)
        self._call.cancel()
        self._reader.join()
        self._ended.close()

    def _requests(self) -> Iterator[drafter_pb2.DraftRequest]:
        """Yield the requests, in gRPC's writing thread.

        A release is a call of its own; later requests wait for it.
        """
        while (message := self._outgoing.get()) is not None:
            if isinstance(message, tuple):
                self._release(message)
            else:
                yield request_to_proto(message)

    def _release(self, batch_slots: tuple[int, ...]) -> None:
        try:
            self._stub.Release(drafter_pb2.ReleaseRequest(epoch=self._epoch, slots=batch_slots))
        except grpc.RpcError as error:
            # The batch slots' next generations make up for it; a drafter that
            # is gone ends the stream too.
            self._reason = f"release failed: {error}"
            self._call.cancel()

    def _read(self) -> None:
        """Read replies, in the reader thread, until the stream ends."""
        try:
            for message in self._call:
                self._replies.put(message)
        except grpc.RpcError as error:
            self._reason = f"{error.code().name}: {error.details()}"
        self._is_over = True
        self._replies.put(_END)
        self._outgoing.put(None)
        self._ended.ring()

    def _write(self, message: DraftRequest | tuple[int, ...]) -> None:
        self._outgoing.put(message)

    def _take_replies(self) -> DraftBatch | None:
        awaited = None
        while not self._replies.empty():
            awaited = self._take(self._replies.get()) or awaited
        return awaited

    def _take(self, message: drafter_pb2.DraftResponse | None) -> DraftBatch | None:
        if message is _END:
            self._replies.put(_END)
            raise TransportClosedError(self._reason)
        try:
            return self._queue.take(lambda: batch_from_proto(message))
        except TransportClosedError:
            self._call.cancel()
            raise
