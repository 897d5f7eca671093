from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError, UnavailableError
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import (
    HEADER_BYTES,
    LAYOUT_VERSION,
    ArenaHeader,
    ArenaLayout,
    ReplyBuffer,
    RequestBuffer,
    map_memory,
    new_memory,
)
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.doorbell import Doorbell, Waiter
from foretoken.transports.draft_parts import split_request
from foretoken.transports.transport import TransportClosedError, TransportCounters, answer
from tests.support.draft_requests import assert_same_request, draft_batch, draft_request, draft_requests
from tests.support.mirror_drafter import MirrorDrafter

TARGET = TargetInfo(checkpoint_hash="m", vocab_size=1000, max_model_len=1024, max_batch_slots=6, max_nodes=16)
LAYOUT = ArenaLayout.of_target(TARGET, token_capacity=16)
CHALLENGE = bytes(range(32))
EPOCH = 7
NOW = 0.0
# Nothing here waits so long: the suite's time limit ends a test that hangs.
LONG_S = 600.0


class Ends:
    """Both ends of one arena."""

    def __init__(self, transport: ArenaTransport, peer: ArenaPeer, counters: TransportCounters) -> None:
        self.transport = transport
        self.peer = peer
        self.counters = counters
        self.drafter = MirrorDrafter()
        self.seen: list[DraftRequest | tuple[int, ...]] = []

    def serve(self) -> None:
        """Answer the requests that have come, as a drafter does."""
        for request in self.peer.requests():
            self.seen.append(request)
            if isinstance(request, tuple):
                self.drafter.release(request)
                self.peer.reply(None)
            else:
                self.peer.reply(answer(self.drafter, request))


def connect(
    transport: ArenaTransport, listener: ArenaListener, *, epoch: int = EPOCH, target: TargetInfo = TARGET
) -> ArenaPeer:
    """Hand an arena over to a peer; the peer needs a thread to fetch it."""
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(ArenaPeer, listener.path, epoch, target)
        assert Waiter((listener.fileno(),)).wait(None)
        transport.hand_over(listener.accept())
        return fetching.result()


@contextmanager
def ends(layout: ArenaLayout = LAYOUT) -> Iterator[Ends]:
    with ExitStack() as stack:
        counters = TransportCounters()
        transport = ArenaTransport(layout, EPOCH, CHALLENGE, counters, spin_us=0)
        stack.callback(transport.close)
        listener = ArenaListener()
        stack.callback(listener.close)
        peer = connect(transport, listener)
        stack.callback(peer.close)
        transport.check_self_test()
        yield Ends(transport, peer, counters)


@contextmanager
def serving(pair: Ends) -> Iterator[None]:
    """Serve in a thread for as long as the block runs."""
    stop = Doorbell()
    waiter = Waiter((stop.fileno(), *pair.peer.filenos()))

    def serve() -> None:
        while stop.fileno() not in waiter.wait(None):
            pair.serve()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        try:
            yield
        finally:
            stop.ring()
            served.result()
            stop.close()


@pytest.fixture(name="pair")
def _pair() -> Iterator[Ends]:
    with ends() as pair:
        yield pair


@pytest.fixture(name="served", scope="module")
def _served() -> Iterator[Ends]:
    """Serve one arena for many random requests: leftovers in its buffers must not show."""
    with ends() as pair, serving(pair):
        yield pair


@given(request=draft_requests())
def test_requests_and_replies_come_out_as_they_went_in(served: Ends, request: DraftRequest) -> None:
    served.seen.clear()
    served.transport.release(range(TARGET.max_batch_slots))
    served.transport.post(request)
    reply = served.transport.receive(LONG_S)
    seen = [item for item in served.seen if isinstance(item, DraftRequest)]
    for got, sent in zip(seen, split_request(request, LAYOUT.token_capacity, LAYOUT.block_size), strict=True):
        assert_same_request(got, sent)
    # Split or not, the drafter's answer is the same.
    expected = MirrorDrafter().draft(request)
    assert reply is not None and (reply.epoch, reply.step_id) == (request.epoch, request.step_id)
    for name in ("node_starts", "tokens", "parents"):
        assert getattr(reply, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(reply, name), getattr(expected, name))


def test_literal_reply(pair: Ends) -> None:
    pair.transport.post(draft_request([[5, 6], [9]], epoch=EPOCH, step_id=3, max_nodes=[3, 1]))
    pair.serve()
    reply = pair.transport.receive(NOW)
    assert reply is not None
    assert reply.node_starts.tolist() == [0, 3, 4]
    assert reply.tokens.tolist() == [6, 5 + 2 * 6, 0, 9]
    assert reply.parents.tolist() == [-1, 0, 1, -1]
    assert pair.counters.num_rejected == 0


def test_a_reply_is_private(pair: Ends) -> None:
    pair.transport.post(draft_request([[5]], step_id=1))
    pair.serve()
    reply = pair.transport.receive(NOW)
    assert reply is not None
    before = reply.tokens.tolist()
    for step_id in range(2, 8):
        pair.transport.post(draft_request([[77]], step_id=step_id))
        pair.serve()
        assert pair.transport.receive(NOW) is not None
    assert reply.tokens.tolist() == before


def test_a_late_reply_is_dropped_and_the_next_request_still_works(pair: Ends) -> None:
    pair.transport.post(draft_request([[5]], step_id=1))
    assert pair.transport.receive(NOW) is None
    assert pair.counters.num_late == 1
    pair.transport.post(draft_request([[6]], step_id=2, lengths=[2]))
    pair.serve()
    reply = pair.transport.receive(NOW)
    assert reply is not None and reply.step_id == 2
    assert pair.drafter.known[0] == (1, [5, 6])
    assert (pair.counters.num_late, pair.counters.num_rejected) == (1, 1)


def test_what_a_drafter_has_not_read_is_never_overwritten(pair: Ends) -> None:
    for step_id in range(1, 13):
        pair.transport.post(draft_request([[100 + step_id]], step_id=step_id, lengths=[step_id]))
    with serving(pair):
        reply = pair.transport.receive(LONG_S)
    assert reply is not None and reply.step_id == 12
    assert pair.drafter.known[0] == (1, list(range(101, 113)))


def test_a_request_beyond_the_capacity_comes_in_parts(pair: Ends) -> None:
    tokens = [list(range(50)), [7], list(range(200, 231))]
    pair.transport.post(draft_request(tokens, step_id=4))
    with serving(pair):
        reply = pair.transport.receive(LONG_S)
    assert reply is not None and reply.num_rows == 3
    assert pair.drafter.most_new_tokens == LAYOUT.token_capacity
    assert [pair.drafter.known[batch_slot][1] for batch_slot in range(3)] == tokens


def test_batch_slots_are_released_in_order(pair: Ends) -> None:
    pair.transport.post(draft_request([[5], [6]], step_id=1))
    pair.serve()
    assert pair.transport.receive(NOW) is not None
    pair.transport.release([1])
    pair.transport.post(draft_request([[8]], step_id=2, batch_slots=[1]))
    pair.serve()
    reply = pair.transport.receive(NOW)
    assert reply is not None and reply.step_id == 2
    assert pair.seen[1] == (1,)
    assert pair.drafter.known == {0: (1, [5]), 1: (1, [8])}


@pytest.mark.parametrize(
    "bad",
    [
        draft_batch(1, 1, np.array([0, 1, 2], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([0, 2_000_000], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([0, -5], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([0, 5], np.int32), np.zeros(5, np.int32), np.zeros(5, np.int32)),
        draft_batch(2, 1, np.array([0, 1], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)),
        draft_batch(1, 9, np.array([0, 1], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)),
    ],
)
def test_a_malformed_reply_is_no_reply(pair: Ends, bad: DraftBatch) -> None:
    pair.transport.post(draft_request([[5]], epoch=1, step_id=1))
    (request,) = pair.peer.requests()
    assert isinstance(request, DraftRequest)
    pair.peer.reply(bad)
    assert pair.transport.receive(LONG_S) is None
    assert (pair.counters.num_malformed, pair.counters.num_late) == (1, 0)
    pair.transport.post(draft_request([[6]], epoch=1, step_id=2))
    pair.serve()
    assert pair.transport.receive(LONG_S) is not None


@given(garbage=st.binary(min_size=32, max_size=400))
def test_whatever_a_drafter_writes_can_be_read(garbage: bytes) -> None:
    memory = mmap.mmap(-1, LAYOUT.reply_bytes)
    memory[HEADER_BYTES : HEADER_BYTES + len(garbage)] = garbage
    batch = ReplyBuffer(memory, LAYOUT, 0).read()
    assert batch is None or (batch.num_rows <= LAYOUT.max_rows and len(batch.tokens) <= 12 * 16)


def test_counts_beyond_the_layout_are_refused() -> None:
    memory = mmap.mmap(-1, max(LAYOUT.reply_bytes, LAYOUT.request_bytes))
    for rows, items in ((LAYOUT.max_rows + 1, 0), (1, 2**63), (2**64 - 1, 0)):
        struct.pack_into("<4Q", memory, HEADER_BYTES, 1, 1, rows, items)
        assert ReplyBuffer(memory, LAYOUT, 0).read() is None
        struct.pack_into("<5Q", memory, HEADER_BYTES, 1, 1, 1, rows, items)
        with pytest.raises(ValueError, match="does not fit"):
            RequestBuffer(memory, LAYOUT, 0).read()


def test_a_request_that_cannot_be_read_does_not_keep_its_reader_from_closing(pair: Ends) -> None:
    unknown = mmap.mmap(-1, LAYOUT.request_bytes)
    struct.pack_into("<10Q", unknown, HEADER_BYTES, 99, *[0] * 9)
    pair.peer._requests = [RequestBuffer(unknown, LAYOUT, 0)]
    pair.peer._request_memory = unknown
    pair.transport.post(draft_request([[5]]))
    with pytest.raises(ValueError, match="unknown kind 99"):
        try:
            list(pair.peer.requests())
        finally:
            pair.peer.close()
    assert Waiter((pair.transport.fileno(),)).wait(LONG_S)


def test_more_replies_than_requests_end_the_transport(pair: Ends) -> None:
    pair.peer.reply(None)
    with pytest.raises(TransportClosedError):
        pair.transport.post(draft_request([[5]]))
    assert Waiter((pair.transport.fileno(),)).wait(LONG_S)


def test_each_side_sees_at_once_that_the_other_is_gone(pair: Ends) -> None:
    pair.transport.post(draft_request([[5]]))
    pair.peer.close()
    with pytest.raises(TransportClosedError):
        pair.transport.receive(LONG_S)
    with ends() as other:
        other.transport.close()
        assert other.peer.filenos()[1] in Waiter(other.peer.filenos()).wait(LONG_S)
        with pytest.raises(TransportClosedError):
            other.serve()


def test_a_reply_sent_before_the_end_still_counts(pair: Ends) -> None:
    pair.transport.post(draft_request([[5]]))
    pair.serve()
    pair.peer.close()
    assert pair.transport.receive(LONG_S) is not None


def test_a_closed_transport_says_so(pair: Ends) -> None:
    pair.transport.close()
    pair.transport.close()
    with pytest.raises(TransportClosedError):
        pair.transport.post(draft_request([[5]]))
    with pytest.raises(TransportClosedError):
        pair.transport.receive(NOW)
    with pytest.raises(TransportClosedError):
        pair.transport.release([1])


def test_a_drafter_cannot_write_requests_nor_shrink_memory() -> None:
    """The descriptors that a drafter gets refuse it."""
    transport = ArenaTransport(LAYOUT, EPOCH, CHALLENGE, TransportCounters())
    requests, replies = os.dup(transport._memory.request_fd), os.dup(transport._memory.reply_fd)
    try:
        with pytest.raises(PermissionError):
            map_memory(requests, LAYOUT.request_bytes, writable=True)
        map_memory(requests, LAYOUT.request_bytes, writable=False).close()
        for fd in (requests, replies):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.pwrite(requests, b"x", 0)
    finally:
        transport.close()
        os.close(requests)
        os.close(replies)


def test_header_survives_and_names_both_versions() -> None:
    header = ArenaHeader(LAYOUT, 2**64 - 1, CHALLENGE)
    packed = header.pack()
    assert ArenaHeader.unpack(packed) == header
    other = packed[:8] + struct.pack("<I", LAYOUT_VERSION + 1) + packed[12:]
    with pytest.raises(PreconditionError, match=f"version {LAYOUT_VERSION + 1}, this drafter has {LAYOUT_VERSION}"):
        ArenaHeader.unpack(other)
    with pytest.raises(PreconditionError, match="starts with"):
        ArenaHeader.unpack(b"X" + packed[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_nodes": 32}, "max_nodes is 32, this drafter needs 16"),
        ({"max_rows": 10}, "max_rows is 10, this drafter needs 12"),
        ({"memory": 2}, "memory is 2, this drafter needs 1"),
        ({"token_dtype": 9}, "token_dtype is 9, this drafter needs 1"),
        ({"hidden_width": 64}, "hidden_width is 64, this drafter needs 0"),
        ({"num_buffers": 0}, "0 buffers"),
        ({"token_capacity": 2**31}, "larger than"),
    ],
)
def test_another_layout_is_refused_by_name(change: dict[str, int], message: str) -> None:
    with pytest.raises(PreconditionError, match=message):
        replace(LAYOUT, **change).check(TARGET)


def test_a_refused_attach_leaves_nothing_open() -> None:
    before = open_descriptors()
    for target, epoch, message in (
        (replace(TARGET, max_nodes=4), EPOCH, "max_nodes is 16, this drafter needs 4"),
        (TARGET, EPOCH + 1, f"epoch {EPOCH}, the attach request says {EPOCH + 1}"),
    ):
        transport = ArenaTransport(LAYOUT, EPOCH, CHALLENGE, TransportCounters())
        listener = ArenaListener()
        with pytest.raises(PreconditionError, match=message):
            connect(transport, listener, target=target, epoch=epoch)
        transport.close()
    with pytest.raises(UnavailableError):
        ArenaPeer("/nonexistent/socket", EPOCH, TARGET)
    assert open_descriptors() == before


def test_memory_of_another_size_is_refused() -> None:
    fd = new_memory("test", 4096)
    with pytest.raises(PreconditionError, match="memory of 4096 bytes, its layout needs 8192"):
        map_memory(fd, 8192, writable=False)
    os.close(fd)


def test_the_self_test_fails_without_the_drafters_digest_or_ring() -> None:
    transport = ArenaTransport(LAYOUT, EPOCH, CHALLENGE, TransportCounters())
    with pytest.raises(PreconditionError, match="self-test"):
        transport.check_self_test()
    digest = hashlib.sha256(CHALLENGE).digest()
    memory = map_memory(transport._memory.reply_fd, LAYOUT.reply_bytes, writable=True)
    memory[: len(digest)] = digest
    with pytest.raises(PreconditionError, match="doorbell"):
        transport.check_self_test()
    memory.close()
    transport.close()


def test_the_socket_is_private_and_goes_once_a_drafter_has_connected() -> None:
    listener = ArenaListener()
    assert stat.S_IMODE(os.stat(listener.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(listener.path)).st_mode) == 0o700
    transport = ArenaTransport(LAYOUT, EPOCH, CHALLENGE, TransportCounters())
    peer = connect(transport, listener)
    assert not os.path.exists(os.path.dirname(listener.path))
    peer.close()
    transport.close()


def test_nothing_stays_open() -> None:
    with ends() as pair:
        pair.transport.post(draft_request([[5]]))
    before = open_descriptors(), threading.active_count()
    for _ in range(3):
        with ends() as pair:
            pair.transport.post(draft_request([[5]]))
            pair.serve()
            assert pair.transport.receive(LONG_S) is not None
    # Fewer, if objects of earlier tests have gone meanwhile.
    assert open_descriptors() <= before[0] and threading.active_count() <= before[1]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_doorbell_counts_and_a_closed_one_is_silent() -> None:
    bell = Doorbell()
    assert bell.take() == 0
    bell.ring()
    bell.ring()
    assert Waiter((bell.fileno(),), spin_us=100).wait(LONG_S) == {bell.fileno()}
    assert bell.take() == 2
    assert Waiter((bell.fileno(),), spin_us=100).wait(0.001) == set()
    bell.close()
    bell.ring()
    bell.close()
