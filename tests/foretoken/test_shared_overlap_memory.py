"""Device memory in the arena's hand-over: layout, descriptors, self-test and lifetime.

Here GPU kernels run on a CPU: the device memory is host memory, and a stream is the thread itself.
On a GPU: tests/gpu/test_overlap_memory.py.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafting import DeviceStep, DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError, UnavailableError
from foretoken.models.backend import Backend
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weight_layout import RowLayout
from foretoken.overlap_memory import OverlapLayout, OverlapMemory
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import MAX_DESCRIPTORS, ArenaHeader, ArenaLayout, RequestBuffer
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.doorbell import Waiter
from foretoken.transports.draft_wire import needs_from_proto, needs_to_proto
from foretoken.transports.flag_words import EVERY_STEP, FLAG_BYTES, FlagWords, HostOrder
from foretoken.transports.shared_overlap_memory import SharedOverlapMemory
from foretoken.transports.shared_weights import SharedWeights
from foretoken.transports.transport import TransportCounters, check_request
from tests.support.draft_requests import assert_same_request, draft_request

TARGET = TargetInfo("m", 1000, 1024, max_batch_slots=6, max_nodes=16, hidden_size=8, num_layers=4)
NEEDS = DrafterNeeds(captured_layers=(0, 2), num_rerun=1, weights=True, device="cpu", overlaps=True)
OVERLAP = OverlapLayout(batch_rows=6, tokens=5, nodes=16, hidden_width=16, hidden_dtype=torch.bfloat16, prompt_rows=9)
LAYOUT = ArenaLayout.of_target(TARGET, NEEDS, token_capacity=16, overlap=OVERLAP)
CPU = torch.device("cpu")
CHALLENGE = bytes(range(32))
EPOCH = 7


def hand_over(transport: ArenaTransport, needs: DrafterNeeds = NEEDS) -> ArenaPeer:
    listener = ArenaListener()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(ArenaPeer, listener.path, EPOCH, TARGET, needs)
        assert Waiter((listener.fileno(),)).wait(None)
        transport.hand_over(listener.accept())
        return fetching.result()


def new_transport(**options: Any) -> ArenaTransport:
    options = {"layout": LAYOUT, "device": CPU} | options
    return ArenaTransport(epoch=EPOCH, challenge=CHALLENGE, counters=TransportCounters(), spin_us=0, **options)


@contextmanager
def ends(**options: Any) -> Iterator[tuple[ArenaTransport, ArenaPeer]]:
    transport = new_transport(**options)
    peer = hand_over(transport)
    transport.check_self_test()
    yield transport, peer
    peer.close()
    transport.close()


def memories(transport: ArenaTransport, peer: ArenaPeer) -> tuple[OverlapMemory, OverlapMemory]:
    assert transport.overlap_memory is not None and peer.share is not None
    return transport.overlap_memory, peer.share.memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [0, 16])
def test_the_layout_survives_the_header(dtype: torch.dtype, width: int) -> None:
    overlap = OVERLAP._replace(hidden_dtype=dtype, hidden_width=width)
    needs = NEEDS if width else DrafterNeeds(device="cpu", overlaps=True)
    layout = ArenaHeader.unpack(
        ArenaHeader(ArenaLayout.of_target(TARGET, needs, overlap=overlap), EPOCH, CHALLENGE).pack()
    ).layout
    layout.check(TARGET, needs)
    assert layout.overlap == overlap


def test_without_device_memory_all_its_fields_are_zero() -> None:
    layout = ArenaLayout.of_target(TARGET, NEEDS)
    assert layout.overlap is None
    assert not any(getattr(layout, name) for name in ArenaLayout.__slots__ if name.startswith("overlap_"))


@pytest.mark.parametrize(
    ("change", "needs", "message"),
    [
        ({"overlap_batch_rows": 5}, NEEDS, "overlap_batch_rows is 5, this drafter needs 6"),
        ({"overlap_nodes": 8}, NEEDS, "overlap_nodes is 8, this drafter needs 16"),
        ({"overlap_width": 8}, NEEDS, "overlap_width is 8, this drafter needs 16"),
        ({"overlap_tokens": 0}, NEEDS, "device memory of 0 tokens"),
        ({"overlap_tokens": 17}, NEEDS, "device memory of 17 tokens"),
        ({"overlap_capacity": 8}, NEEDS, "overlap_capacity is 8, this drafter needs 8201"),
        ({"overlap_dtype": 1}, NEEDS, "type 1 is unusable"),
        ({}, replace(NEEDS, overlaps=False), "which this drafter does not use"),
    ],
)
def test_other_device_memory_is_refused_by_name(change: dict[str, int], needs: DrafterNeeds, message: str) -> None:
    LAYOUT.check(TARGET, NEEDS)
    with pytest.raises(PreconditionError, match=message):
        replace(LAYOUT, **change).check(TARGET, needs)


@given(number=st.integers(1, EVERY_STEP), begins=st.booleans(), is_last=st.booleans(), rows=st.integers(0, 6))
def test_an_overlapped_step_comes_out_of_the_head_as_it_went_in(
    number: int, begins: bool, is_last: bool, rows: int
) -> None:
    buffer = RequestBuffer(mmap.mmap(-1, LAYOUT.request_bytes), LAYOUT, 0)
    step = DeviceStep(number, begins, is_last, rows)
    request = draft_request([[]] * rows, block_ids=[[row, row + 1] for row in range(rows)], device_step=step)
    buffer.write(request)
    got = buffer.read()
    assert not isinstance(got, tuple)
    assert_same_request(got, replace(request, hidden=np.zeros((0, LAYOUT.hidden_width), np.float32)))
    # Leftovers in the buffer say nothing about the next one.
    buffer.write(draft_request([[5]]))
    following = buffer.read()
    assert not isinstance(following, tuple) and following.device_step is None


def test_prompt_rows_have_room_for_a_chunk_after_a_cached_prefix() -> None:
    """Hidden states of ordinary requests bound their tokens, and do not bound these."""
    count = TARGET.max_model_len + OVERLAP.prompt_rows
    assert LAYOUT.token_capacity < count
    buffer = RequestBuffer(mmap.mmap(-1, LAYOUT.request_bytes), LAYOUT, 0)
    blocks = list(range(-(-count // LAYOUT.block_size)))
    step = DeviceStep(5, begins=True, is_last=False, num_batch_rows=1, prompt_start=OVERLAP.prompt_rows)
    request = draft_request([[], list(range(count))], block_ids=[[7], blocks], device_step=step)
    request.rows["device_hidden"] = 0, OVERLAP.prompt_rows
    buffer.write(request)
    got = buffer.read()
    assert not isinstance(got, tuple)
    assert_same_request(got, replace(request, hidden=np.zeros((0, LAYOUT.hidden_width), np.float32)))


@pytest.mark.parametrize(
    ("num_batch_rows", "device_hidden", "message"),
    [
        (3, (0, 2), "2 rows has 3 batch rows"),
        (2, (0, 2), "new tokens in a batch row"),
        (1, (0, 4), "more hidden states than new tokens"),
        (1, (0, -1), "more hidden states than new tokens"),
    ],
)
def test_batch_rows_and_prompt_rows_that_cannot_be_are_refused(
    num_batch_rows: int, device_hidden: tuple[int, int], message: str
) -> None:
    step = DeviceStep(5, begins=True, is_last=False, num_batch_rows=num_batch_rows)
    request = draft_request([[], [1, 2, 3]], device_step=step)
    request.rows["device_hidden"] = device_hidden
    with pytest.raises(ValueError, match=message):
        check_request(request, 6)


def test_descriptors_are_named_by_the_layout() -> None:
    always = ("requests", "replies", "request_bell", "reply_bell")
    device = ("device_memory", "flag_words")
    for weights in (False, True):
        for overlap in (None, OVERLAP):
            layout = ArenaLayout.of_target(TARGET, NEEDS, weights=weights, overlap=overlap)
            expected = (*always, *(("weights", "weights_memory") if weights else ()), *(device if overlap else ()))
            assert layout.descriptors == expected and len(expected) <= MAX_DESCRIPTORS


def test_both_sides_have_the_memory_zeroed_and_the_weights_in_their_place() -> None:
    head = torch.arange(2 * 64, dtype=torch.float32).view(64, 2)
    weights = SharedWeights(TargetWeights(64, 2, True, RowLayout(CPU, torch.float32), head, head), Backend("gpu", CPU))
    layout = ArenaLayout.of_target(TARGET, NEEDS, weights=True, overlap=OVERLAP)
    with ends(layout=layout, weights_fds=weights.filenos()) as (transport, peer):
        ours, theirs = memories(transport, peer)
        for name in OverlapMemory._fields[1:]:
            assert not getattr(ours, name).to(torch.float32).any(), name
            assert not getattr(theirs, name).to(torch.float32).any(), name
        assert theirs.layout == OVERLAP
        assert peer.weights is not None and torch.equal(peer.weights.head, head)
        ours.new_tokens[3] = torch.arange(5, dtype=torch.int32)
        ours.hidden[29] = 2.5
        assert theirs.new_tokens[3].tolist() == [0, 1, 2, 3, 4] and theirs.hidden[29].tolist() == [2.5] * 16
        theirs.draft_scores[5, 15] = -1.5
        assert ours.draft_scores[5, 15] == -1.5
    weights.close()


def test_without_device_memory_there_is_none_and_the_order_is_plain() -> None:
    with ends(layout=ArenaLayout.of_target(TARGET, NEEDS)) as (transport, peer):
        assert transport.overlap_memory is None and peer.share is None
        transport.order.await_draft(1)


@pytest.mark.parametrize("num_sent", [0, 1, 4, 5, 7, 8])
def test_another_number_of_descriptors_is_refused(num_sent: int) -> None:
    """The layout says six: requests, replies, two doorbells, device memory and flag words."""
    transport = new_transport()
    listener = ArenaListener()
    # Objects that earlier tests' tracebacks hold must not be collected in between.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(ArenaPeer, listener.path, EPOCH, TARGET, NEEDS)
        assert Waiter((listener.fileno(),)).wait(None)
        with listener.accept() as connection:
            socket.send_fds(connection, [b"\0"], [transport._memory.request_fd] * num_sent)
            with pytest.raises(UnavailableError, match="no descriptors" if num_sent == 0 else "instead of 6"):
                fetching.result()
    assert len(os.listdir("/proc/self/fd")) <= before - 1, "the listener's"
    transport.close()


def test_a_drafter_that_does_not_see_the_digest_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedOverlapMemory, "write_proof", lambda self, proof: None)
    transport = new_transport()
    with pytest.raises(PreconditionError, match="self-test: the device memory does not hold the digest"):
        hand_over(transport)
    transport.close()


def test_a_verifier_whose_digest_stays_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = new_transport()
    with monkeypatch.context() as patched:
        patched.setattr(SharedOverlapMemory, "take_proof", lambda self, size: bytes(self._raw[:size].tolist()))
        peer = hand_over(transport)
    with pytest.raises(PreconditionError, match="self-test: the drafter did not clear the digest"):
        transport.check_self_test()
    peer.close()
    transport.close()


def test_writes_before_a_signal_are_seen_after_the_await() -> None:
    with ends() as (transport, peer), ThreadPoolExecutor(1) as pool:
        ours, theirs = memories(transport, peer)
        assert peer.share is not None
        order = peer.share.order

        def draft() -> None:
            for number in range(1, 201):
                order.await_step(number)
                theirs.draft_tokens[0, 0] = int(theirs.new_tokens[0, 0]) + 1
                order.signal_draft(number)

        drafting = pool.submit(draft)
        for number in range(1, 201):
            ours.new_tokens[0, 0] = 7 * number
            transport.order.signal_step(number)
            transport.order.await_draft(number)
            assert int(ours.draft_tokens[0, 0]) == 7 * number + 1
        drafting.result()


@pytest.mark.parametrize("closing", ["verifier", "drafter"])
def test_who_waits_goes_on_when_either_side_closes_and_keeps_the_memory(closing: str) -> None:
    with ends() as (transport, peer), ThreadPoolExecutor(2) as pool:
        ours, theirs = memories(transport, peer)
        assert peer.share is not None
        order = peer.share.order
        waiting = [pool.submit(transport.order.await_draft, 5), pool.submit(order.await_step, 5)]
        (transport if closing == "verifier" else peer).close()
        for wait in waiting:
            wait.result()
        # Queued work may still read and write it.
        ours.stamp.fill_(9)
        assert int(theirs.stamp) == 9
        transport.order.release_draft(6)


def test_a_host_releases_its_own_side_alone_and_lowers_nothing() -> None:
    words = FlagWords(mmap.mmap(-1, FLAG_BYTES))
    order = HostOrder(words, timeout_s=600.0)
    order.release_draft(5)
    order.await_draft(5)
    order.release_draft(3)
    order.await_draft(5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(order.await_step, 1)
        order.release_draft(EVERY_STEP)
        assert not waiting.done()
        order.release_step(1)
        waiting.result()


def test_the_words_lie_in_cache_lines_of_their_own() -> None:
    memory = mmap.mmap(-1, FLAG_BYTES)
    order = HostOrder(FlagWords(memory))
    order.signal_step(3)
    order.signal_draft(4)
    places = np.flatnonzero(np.frombuffer(memory, np.uint32))
    assert len(places) == 2 and abs(int(places[1] - places[0])) * 4 >= 128


def test_a_host_that_nobody_can_release_goes_on_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    order = HostOrder(FlagWords(mmap.mmap(-1, FLAG_BYTES)), timeout_s=0.01)
    with caplog.at_level(logging.WARNING):
        order.await_draft(1)
    assert "step 1 did not arrive" in caplog.text


def test_nothing_stays_open() -> None:
    def num_mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("foretoken-" in line for line in maps)

    with ends():
        pass
    before = len(os.listdir("/proc/self/fd")), num_mapped(), threading.active_count()
    for _ in range(3):
        with ends() as (transport, peer):
            memories(transport, peer)
    del transport, peer
    # Fewer, if objects of earlier tests have gone meanwhile.
    after = len(os.listdir("/proc/self/fd")), num_mapped(), threading.active_count()
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_the_device_is_informed_when_a_drafter_is_prepared() -> None:
    assert needs_from_proto(needs_to_proto("EAGLE3", NEEDS), TARGET) == NEEDS
    plain = replace(NEEDS, device="", overlaps=False)
    assert needs_from_proto(needs_to_proto("EAGLE3", plain), TARGET) == plain
