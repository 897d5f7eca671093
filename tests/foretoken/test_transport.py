from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafting import DeviceStep, DraftBatch, DraftRequest
from foretoken.transports.draft_parts import split_request
from foretoken.transports.in_process import InProcessTransport
from foretoken.transports.transport import (
    MAX_WAITING,
    WINDOW,
    MalformedBatchError,
    RequestQueue,
    TransportClosedError,
    TransportCounters,
    check_batch,
    check_request,
)
from tests.support.draft_requests import assert_same_request, draft_batch, draft_request, draft_requests
from tests.support.mirror_drafter import POISON_SALT, MirrorDrafter

BLOCK_SIZE = 4


def batch(step_id: int, *trees: list[int], epoch: int = 1) -> DraftBatch:
    """Return a batch with chains of these tokens."""
    return draft_batch(
        epoch,
        step_id,
        np.cumsum([0, *map(len, trees)]).astype(np.int32),
        np.array([token for tree in trees for token in tree], np.int32),
        np.array([node - 1 for tree in trees for node in range(len(tree))], np.int32),
    )


def new_queue(counters: TransportCounters, token_capacity: int = 8, overlap_capacity: int = 0) -> RequestQueue:
    return RequestQueue(
        8, token_capacity, BLOCK_SIZE, counters, releases_are_answered=True, overlap_capacity=overlap_capacity
    )


def test_a_request_that_fits_is_not_split() -> None:
    request = draft_request([[1, 2], [3]])
    assert split_request(request, 3, BLOCK_SIZE) == [request]


def test_a_request_of_an_overlapped_step_is_one_part() -> None:
    step = DeviceStep(number=3, begins=False, is_last=False, num_batch_rows=1)
    request = draft_request([[], []], block_ids=[[4, 5], [6]], device_step=step)
    assert split_request(request, 1, BLOCK_SIZE) == [request]
    counters = TransportCounters()
    queue = new_queue(counters, token_capacity=8, overlap_capacity=9)
    queue.add(draft_request([[]], block_ids=[list(range(10))], device_step=step))
    queue.add(draft_request([[], list(range(10))], device_step=step))
    assert (queue.next(), queue.is_awaiting, counters.num_dropped) == (None, False, 2)
    whole = draft_request([[], list(range(9))], block_ids=[[], list(range(9))], device_step=step)
    queue.add(whole)
    assert queue.next() is whole
    queue.add(request)
    assert queue.next() is request


def test_literal_split() -> None:
    request = draft_request([[10, 11, 12, 13], [], [20, 21]], lengths=[104, 7, 2], step_id=9)
    first, second, last = split_request(request, 3, BLOCK_SIZE)
    assert first.batch_slots.tolist() == [0]
    assert first.new_tokens.tolist() == [10, 11, 12]
    assert first.lengths.tolist() == [103]
    assert second.batch_slots.tolist() == [2]
    assert second.new_tokens.tolist() == [20]
    assert second.lengths.tolist() == [1]
    assert last.batch_slots.tolist() == [0, 1, 2]
    assert last.new_tokens.tolist() == [13, 21]
    assert last.new_token_starts.tolist() == [0, 1, 1, 2]
    assert last.lengths.tolist() == [104, 7, 2]
    assert [part.step_id for part in (first, second, last)] == [9, 9, 9]
    assert first.max_nodes.tolist() == second.max_nodes.tolist() == [1]
    assert last.max_nodes.tolist() == request.max_nodes.tolist()


@given(request=draft_requests(), capacity=st.integers(6, 30))
def test_parts_tell_the_same_tokens_in_order(request: DraftRequest, capacity: int) -> None:
    parts = split_request(request, capacity, BLOCK_SIZE)
    received: dict[int, list[int]] = {int(batch_slot): [] for batch_slot in request.batch_slots}
    before = {
        int(batch_slot): int(length - count)
        for batch_slot, length, count in zip(
            request.batch_slots, request.lengths, np.diff(request.new_token_starts), strict=True
        )
    }
    for part in parts:
        check_request(part, request.num_rows)
        assert len(part.new_tokens) <= capacity
        for row, batch_slot in enumerate(part.batch_slots.tolist()):
            received[batch_slot].extend(
                part.new_tokens[part.new_token_starts[row] : part.new_token_starts[row + 1]].tolist()
            )
            assert part.lengths[row] == before[batch_slot] + len(received[batch_slot])
    for row, batch_slot in enumerate(request.batch_slots.tolist()):
        starts = request.new_token_starts
        assert received[batch_slot] == request.new_tokens[starts[row] : starts[row + 1]].tolist()
    assert all((part.max_nodes == 1).all() for part in parts[:-1])
    assert parts[-1].max_nodes.tolist() == request.max_nodes.tolist()
    assert parts[-1].seeds.tolist() == request.seeds.tolist()


@pytest.mark.parametrize(
    "bad",
    [
        batch(1, [1, 2]),
        batch(1, [1], [2], [3]),
        batch(1, [1], []),
        batch(1, [1, 2, 3, 4, 5], [1]),
        draft_batch(1, 1, np.array([0, 1, 9], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([1, 1, 2], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([0, 3, 2], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([0, -1, 2], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)),
        draft_batch(1, 1, np.array([0, 1, 2], np.int32), np.zeros(2, np.int32), np.zeros(3, np.int32)),
        draft_batch(1, 1, np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)),
    ],
)
def test_malformed_batches_are_found(bad: DraftBatch) -> None:
    with pytest.raises(MalformedBatchError):
        check_batch(bad, np.array([4, 4], np.int32))
    counters = TransportCounters()
    queue = new_queue(counters)
    queue.add(draft_request([[1], [2]]))
    assert queue.next() is not None
    assert queue.take(lambda: bad) is None
    assert (counters.num_malformed, queue.is_awaiting) == (1, False)


def test_sound_batch_passes() -> None:
    check_batch(batch(1, [1, 2, 3, 4], [5]), np.array([4, 4], np.int32))


@pytest.mark.parametrize(
    "change",
    [
        {"batch_slots": [0]},
        {"salts": [0, 0, 0]},
        {"temperatures": []},
    ],
)
def test_requests_with_ragged_columns_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        check_request(draft_request([[1], [2]], **change), 8)


def test_requests_with_more_rows_than_agreed_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows; at most 2"):
        check_request(draft_request([[1], [2], [3]]), 2)


@pytest.mark.parametrize("wrong", [batch(2, [1]), batch(1, [1], epoch=2)])
def test_a_reply_with_another_stamp_is_malformed(wrong: DraftBatch) -> None:
    counters = TransportCounters()
    queue = new_queue(counters)
    queue.add(draft_request([[1]]))
    queue.next()
    assert queue.take(lambda: wrong) is None
    assert counters.num_malformed == 1


def test_a_late_reply_is_dropped_unread_and_the_next_one_is_taken() -> None:
    counters = TransportCounters()
    queue = new_queue(counters)
    queue.add(draft_request([[1]], step_id=1))
    queue.next()
    queue.give_up()
    queue.add(draft_request([[2]], step_id=2))
    queue.next()

    def never() -> DraftBatch:
        raise AssertionError("a stale reply is not read")

    assert queue.take(never) is None
    reply = queue.take(lambda: batch(2, [2]))
    assert reply is not None and reply.step_id == 2
    assert (counters.num_late, counters.num_rejected) == (1, 1)


def test_the_window_holds_requests_back_and_releases_keep_their_place() -> None:
    queue = new_queue(TransportCounters())
    for step_id in range(1, WINDOW + 1):
        queue.add(draft_request([[1]], step_id=step_id))
    queue.add_release([3, 5])
    queue.add(draft_request([[1]], step_id=WINDOW + 1))
    sent = [queue.next() for _ in range(WINDOW + 1)]
    assert [getattr(request, "step_id", None) for request in sent] == [1, 2, 3, 4, None]
    assert queue.take(lambda: None) is None
    assert queue.next() == (3, 5)
    assert queue.take(lambda: None) is None
    last = queue.next()
    assert isinstance(last, DraftRequest) and last.step_id == WINDOW + 1


def test_a_drafter_that_is_too_far_behind_is_asked_nothing_more() -> None:
    counters = TransportCounters()
    queue = new_queue(counters)
    for step_id in range(1, MAX_WAITING + 3):
        queue.add(draft_request([[1]], step_id=step_id))
        assert queue.is_awaiting == (counters.num_dropped == 0)
    assert counters.num_dropped == 1
    queue.add(draft_request([[1]] * 9, step_id=5000))
    assert counters.num_dropped == 2


def test_a_reply_that_nobody_asked_for_ends_the_transport() -> None:
    with pytest.raises(TransportClosedError):
        new_queue(TransportCounters()).take(lambda: batch(1, [1]))


def test_in_process_drafter_that_raises_closes_the_transport() -> None:
    transport = InProcessTransport(MirrorDrafter(), TransportCounters())
    with pytest.raises(TransportClosedError, match="poisoned"):
        transport.post(draft_request([[1]], salts=[POISON_SALT]))
    with pytest.raises(TransportClosedError):
        transport.receive(1.0)


def test_same_request_helper_sees_a_difference() -> None:
    with pytest.raises(AssertionError):
        assert_same_request(draft_request([[1]]), draft_request([[2]]))
