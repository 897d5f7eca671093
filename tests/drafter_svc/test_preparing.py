"""The drafter's thread prepares while it is idle, and puts every request first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from drafter_svc.session import AttachedVerifier
from drafter_svc.thread import DrafterThread
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.overlap_memory import OverlapLayout
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import ArenaLayout
from foretoken.transports.doorbell import Waiter
from foretoken.transports.transport import TransportCounters
from tests.support.draft_requests import draft_request
from tests.support.overlap_drafter import NUM_KINDS, OverlapDrafter

TARGET = TargetInfo("m", 1000, 1024, max_batch_slots=4, max_nodes=8, hidden_size=2, num_layers=4)
LAYOUT = OverlapLayout(batch_rows=4, tokens=5, nodes=8, hidden_width=2, hidden_dtype=torch.float32)
EPOCH = 11
# The suite's time limit ends a test that hangs.
LONG_S = 600.0


class Slow(OverlapDrafter):
    """Each preparation waits until the test lets it finish."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.begun, self.may_finish = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None

    def prepare(self) -> bool:
        self.begun.release()
        self.may_finish.acquire()
        if self.error is not None:
            raise self.error
        self.log.append("prepare")
        return super().prepare()

    def draft(self, request: DraftRequest) -> DraftBatch:
        self.log.append("draft")
        return super().draft(request)


@pytest.fixture
def drafter() -> Slow:
    return Slow()


@pytest.fixture
def thread(drafter: Slow) -> Iterator[DrafterThread]:
    thread = DrafterThread(lambda: drafter, spin_us=0)
    thread.ready.result()
    yield thread
    # A preparation that has begun finishes.
    drafter.may_finish.release(99)
    thread.stop()


def attach(thread: DrafterThread, drafter: Slow) -> tuple[AttachedVerifier, ArenaTransport]:
    layout = ArenaLayout.of_target(TARGET, drafter.needs(TARGET), overlap=LAYOUT)
    transport = ArenaTransport(layout, EPOCH, b"c" * 32, TransportCounters(), device=torch.device("cpu"))
    listener = ArenaListener()
    attaching = thread.attach(EPOCH, TARGET, listener.path)
    Waiter((listener.fileno(),)).wait(None)
    transport.hand_over(listener.accept())
    attachment = attaching.result()[0]
    transport.check_self_test()
    listener.close()
    return attachment, transport


def ask(transport: ArenaTransport, step_id: int) -> None:
    transport.post(draft_request([[5, 7]], epoch=EPOCH, step_id=step_id))


def test_a_request_waits_for_one_preparation_at_most(thread: DrafterThread, drafter: Slow) -> None:
    _, transport = attach(thread, drafter)
    drafter.begun.acquire()
    asked = thread.is_preparing()
    ask(transport, 1)
    drafter.may_finish.release()
    assert asked.result()
    assert transport.receive(LONG_S) is not None
    # The next preparation has not begun before the request was answered.
    assert drafter.log == ["prepare", "draft"]
    drafter.may_finish.release(NUM_KINDS - 1)
    for _ in range(NUM_KINDS - 1):
        drafter.begun.acquire()
    ask(transport, 2)
    assert transport.receive(LONG_S) is not None
    assert not thread.is_preparing().result() and drafter.is_prepared
    assert sorted(drafter.log) == ["draft"] * 2 + ["prepare"] * NUM_KINDS
    transport.close()


def test_a_drafter_that_fails_to_prepare_is_detached(thread: DrafterThread, drafter: Slow) -> None:
    attachment, transport = attach(thread, drafter)
    drafter.error = RuntimeError("out of memory")
    drafter.may_finish.release()
    assert "out of memory" in attachment.ended.result()
    assert not thread.is_preparing().result()
    transport.close()


def test_nothing_is_prepared_for_a_verifier_that_is_gone(thread: DrafterThread, drafter: Slow) -> None:
    attachment, transport = attach(thread, drafter)
    drafter.begun.acquire()
    transport.close()
    drafter.may_finish.release()
    attachment.ended.result()
    assert drafter.log == ["prepare"] and not thread.is_preparing().result()
