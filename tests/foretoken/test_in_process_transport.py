"""The transport to a drafter in the same process: what its thread does, when, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.transports.in_process import MOST_UNAWAITED, InProcessTransport
from foretoken.transports.transport import TransportClosedError, TransportCounters
from tests.support.draft_requests import draft_request
from tests.support.mirror_drafter import POISON_SALT, MirrorDrafter

NOT_TO_BE_REACHED = 60.0


class Recorder(MirrorDrafter):
    """Notes its calls with their threads; ``go`` holds back the thread of a transport."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.on_threads: list[bool] = []
        self.caller = threading.current_thread()
        self.go = threading.Event()

    def draft(self, request: DraftRequest) -> DraftBatch:
        self._note("draft", request.step_id)
        return super().draft(request)

    def release(self, batch_slots: Sequence[int]) -> None:
        self._note("release", batch_slots[0])
        super().release(batch_slots)

    def _note(self, call: str, number: int) -> None:
        is_on_thread = threading.current_thread() is not self.caller
        if is_on_thread:
            assert self.go.wait(NOT_TO_BE_REACHED)
        self.calls.append((call, number))
        self.on_threads.append(is_on_thread)


@contextmanager
def opened() -> Iterator[tuple[Recorder, InProcessTransport]]:
    drafter = Recorder()
    transport = InProcessTransport(drafter, TransportCounters(), has_thread=True)
    try:
        yield drafter, transport
    finally:
        drafter.go.set()
        transport.close()


def step_id_of(batch: DraftBatch | None) -> int | None:
    return None if batch is None else batch.step_id


def test_what_nobody_waits_for_begins_when_the_caller_says_so() -> None:
    with opened() as (drafter, transport):
        transport.post_unawaited(draft_request([[1]], step_id=1))
        assert drafter.calls == [] and not transport.is_idle()
        transport.begin_unawaited()
        assert drafter.calls == [] and not transport.is_idle()
        drafter.go.set()
        assert step_id_of(transport.receive(0.0)) == 1
        assert transport.is_idle() and drafter.on_threads == [True]
        transport.begin_unawaited()
        assert transport.receive(0.0) is None


def test_calls_are_made_in_order() -> None:
    with opened() as (drafter, transport):
        drafter.go.set()
        transport.post_unawaited(draft_request([[1]], step_id=1))
        transport.begin_unawaited()
        transport.release([7])
        transport.post_unawaited(draft_request([[1]], step_id=2))
        transport.post(draft_request([[1]], step_id=3))
        assert drafter.calls == [("draft", 1), ("release", 7), ("draft", 2), ("draft", 3)]
        assert drafter.on_threads == [True, False, False, False]
        assert step_id_of(transport.receive(0.0)) == 3


def test_few_tokens_are_learned_by_the_caller() -> None:
    with opened() as (drafter, transport):
        drafter.go.set()
        for tokens in ([1, 2], [1, 2, 3]):
            transport.post_unawaited(draft_request([tokens]))
            transport.begin_unawaited(least=3)
        assert transport.receive(0.0) is not None
        assert drafter.on_threads == [False, True]


def test_what_waits_for_long_is_learned_by_the_caller() -> None:
    with opened() as (drafter, transport):
        most = [1] * MOST_UNAWAITED
        transport.post_unawaited(draft_request([most], step_id=1))
        assert drafter.calls == []
        transport.post_unawaited(draft_request([[1]], step_id=2))
        assert drafter.calls == [("draft", 1), ("draft", 2)] and drafter.on_threads == [False, False]


def test_a_drafter_that_falls_behind_is_waited_for() -> None:
    with opened() as (drafter, transport):
        drafter.go.set()
        for step_id in (1, 2, 3):
            transport.post_unawaited(draft_request([[1]], step_id=step_id))
            transport.begin_unawaited()
            assert len(drafter.calls) >= step_id - 1
        assert step_id_of(transport.receive(0.0)) == 3


def test_an_error_on_the_thread_ends_the_transport_with_the_next_call() -> None:
    with opened() as (drafter, transport):
        drafter.go.set()
        transport.post_unawaited(draft_request([[1]], salts=[POISON_SALT]))
        transport.begin_unawaited()
        with pytest.raises(TransportClosedError, match="poisoned"):
            transport.receive(0.0)
        assert not transport.is_open()
        for call in (lambda: transport.post_unawaited(draft_request([[1]])), lambda: transport.release([1])):
            with pytest.raises(TransportClosedError, match="closed"):
                call()


def test_closing_waits_for_the_thread() -> None:
    with opened() as (drafter, transport):
        transport.post_unawaited(draft_request([[1]], step_id=1))
        transport.begin_unawaited()
        threading.Timer(0.01, drafter.go.set).start()
        transport.close()
        assert drafter.calls == [("draft", 1)]
        with pytest.raises(TransportClosedError):
            transport.receive(0.0)


def test_without_a_thread_everything_is_done_at_once() -> None:
    drafter = Recorder()
    transport = InProcessTransport(drafter, TransportCounters())
    transport.post_unawaited(draft_request([[1]], step_id=1))
    transport.release([7])
    assert drafter.calls == [("draft", 1), ("release", 7)] and transport.is_idle()
    assert step_id_of(transport.receive(0.0)) == 1
    transport.close()
