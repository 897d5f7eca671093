"""Publish the prefix cache's changes over ZeroMQ, in the form of vLLM's KV events.

A PUB socket sends one message a step: topic, sequence number (8 bytes, big-endian), and a batch in
MessagePack: [seconds since 1970, events, data-parallel rank]. A ROUTER socket sends batches again:
a request is an empty frame and the first number wanted, and the answer is an empty frame before
each message, then one with the number -1 and no batch. Form and names are as in vLLM 0.33's
``vllm.distributed.kv_events``, which llm-d's router, Dynamo and others read.

The engine thread only queues; a thread of this module encodes and sends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import zmq

from foretoken.errors import ConfigError
from verifier_svc.scheduling.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

logger = logging.getLogger(__name__)

# Batches that wait to be encoded. One more is dropped; subscribers notice the missing number.
MAX_QUEUED = 10_000
# What can be sent again: the newest batches, up to this many and this many bytes.
MAX_REPLAY_BATCHES = 10_000
MAX_REPLAY_BYTES = 64 << 20
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# Milliseconds for which a closing socket sends what is left.
LINGER_MS = 200
# vLLM's name for the cache in which the model runs, also where that is a CPU's memory.
_MEDIUM = "GPU"
_RANK = 0


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's event: consecutive blocks are in the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # One entry a block: what its hash depends on besides its tokens and its parent.
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """vLLM's event: blocks are no longer in the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """vLLM's event: the cache is empty."""


class EventBatch(msgspec.Struct, array_like=True):
    """vLLM's message: the events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


class _Step(NamedTuple):
    """The changes of one step, with the number and time of its message."""

    number: int
    seconds: float
    events: list[CacheEvent]


class KvEventPublisher:
    """Owns the sockets and the thread that sends."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, block_size: int) -> None:
        """Bind the sockets and start the thread.

        ``endpoint``, ``replay_endpoint``: as ZeroMQ writes them. Raises ConfigError if an endpoint
        is in use.
        """
        self._topic = topic.encode()
        self._block_size = block_size
        self._queue: deque[_Step] = deque()
        self._next_number = 0
        self._is_closing = False
        self._sent: deque[tuple[bytes, bytes]] = deque()
        self._num_sent_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        # Readable while there is something to send; the poller waits for it and for requests.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        try:
            self._publisher = self._bind(zmq.PUB, endpoint, "--kv-events")
            self._router = self._bind(zmq.ROUTER, replay_endpoint, "--kv-events-replay") if replay_endpoint else None
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        # Who had followed an earlier process at this address begins anew.
        self.publish([CacheCleared()])
        self._thread.start()

    def publish(self, events: list[CacheEvent]) -> None:
        """Queue the changes of a step. Only the engine thread calls it; it never waits."""
        number, self._next_number = self._next_number, self._next_number + 1
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(_Step(number, time.time(), events))
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued, and close the sockets. Nothing may be published later."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.term()
        os.close(self._wake)

    def _bind(self, kind: int, endpoint: str, flag: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = LINGER_MS
        # Room for a whole replay, and for as many messages to a slow subscriber.
        socket.sndhwm = MAX_REPLAY_BATCHES + 1
        socket.ipv6 = "[" in endpoint
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{flag} {endpoint}: {error.strerror}") from None
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        expected = 0
        while not (self._is_closing and not self._queue):
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._queue:
                step = self._queue.popleft()
                if step.number != expected:
                    logger.warning("dropped %d batches of KV events: the queue was full", step.number - expected)
                expected = step.number + 1
                self._send(step)
            if self._router is not None and self._router in ready:
                self._replay(self._router)
        for socket in (self._publisher, self._router):
            if socket is not None:
                socket.close()

    def _send(self, step: _Step) -> None:
        """Send a step's batch, and keep it for replays."""
        number = step.number.to_bytes(8, "big")
        batch = self._encoder.encode(EventBatch(step.seconds, list(self._wire(step.events)), _RANK))
        self._publisher.send_multipart((self._topic, number, batch))
        self._sent.append((number, batch))
        self._num_sent_bytes += len(batch)
        while len(self._sent) > MAX_REPLAY_BATCHES or self._num_sent_bytes > MAX_REPLAY_BYTES:
            self._num_sent_bytes -= len(self._sent.popleft()[1])

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request: every kept batch from a number on, then the end mark."""
        match router.recv_multipart():
            case [client, b"", first] if len(first) == 8:
                # Bytes of one length compare as the numbers do.
                for number, batch in self._sent:
                    if number >= first:
                        router.send_multipart((client, b"", self._topic, number, batch))
                router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
            case frames:
                logger.warning("ignored a request for KV events of %d frames: not a number", len(frames))

    def _wire(self, events: list[CacheEvent]) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        for event in events:
            match event:
                case BlocksStored():
                    yield self._stored(event)
                case BlocksRemoved():
                    yield BlockRemoved(_numbers(event.hashes), _MEDIUM)
                case CacheCleared():
                    yield AllBlocksCleared()

    def _stored(self, event: BlocksStored) -> BlockStored:
        keys: list[Any] | None = None
        if event.salt is not None:
            keys = [(event.salt,), *[None] * (len(event.hashes) - 1)]
        return BlockStored(
            block_hashes=_numbers(event.hashes),
            parent_block_hash=None if event.parent is None else number_of(event.parent),
            token_ids=event.token_ids,
            block_size=self._block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=None,
            extra_keys=keys,
        )


def number_of(block_hash: bytes) -> int:
    """Return the hash as subscribers see it: its last 8 bytes, big-endian, as vLLM does."""
    return int.from_bytes(block_hash[-8:], "big")


def _numbers(hashes: list[bytes]) -> list[int]:
    return [number_of(block_hash) for block_hash in hashes]
