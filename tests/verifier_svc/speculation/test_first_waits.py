"""How long the first draft of a kind may take: a GPU drafter compiles and captures graphs first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foretoken.drafting import DeviceStep, DraftBatch, DrafterNeeds, DraftRequest
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.draft_requests import draft_batch
from verifier_svc.drafters.attachment import Attachment, AttachmentSettings
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import DraftRow, Shape, request_of
from verifier_svc.drafters.source import MAX_CONSECUTIVE_FAILURES, CircuitBreaker
from verifier_svc.drafters.waits import AFFORDABLE_SHARE, AFFORDABLE_TIMEOUTS
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.scheduling.sequence import Sequence as Running

TOKEN = 1
CHAIN = Shape(4, 3, 1)
TIMEOUT_S = 0.2
SLOW_S = 0.15


class Drafter:
    """A draft source and its drafter.

    ``takes``: seconds of the clock for the next answers. An answer that takes longer than the wait
    comes once the clock has moved on.
    """

    name, address, algorithm, transport_name, reason = "gpu", "", "EAGLE3", "in-process", ""
    state = "attached"
    num_rejected = 0

    def __init__(self, device: str = "GPU-1") -> None:
        self.needs = DrafterNeeds(blocks=True, device=device)
        self.now = 0.0
        self.takes: list[float] = []
        self.num_attaches = 0
        self.num_failures = 0
        self._asked: DraftRequest | None = None
        self.attach()

    def attach(self) -> None:
        """Attach, or attach again, with nothing left to do."""
        self.num_attaches += 1
        self.breaker = CircuitBreaker()
        self.transport: Any = Connection(self)
        self._done_at = self.now

    def post(self, request: DraftRequest) -> None:
        self._asked = request
        self._done_at = self.now + (self.takes.pop(0) if self.takes else 0.001)

    def receive(self, timeout_s: float) -> DraftBatch | None:
        request, is_late = self._asked, self._done_at > self.now + timeout_s
        self.now = self.now + timeout_s if is_late else max(self.now, self._done_at)
        if is_late or request is None:
            return None
        count = request.num_rows
        roots, parents = np.full(count, TOKEN, np.int32), np.full(count, -1, np.int32)
        return draft_batch(request.epoch, request.step_id, np.arange(count + 1, dtype=np.int32), roots, parents)

    def is_idle(self) -> bool:
        return self.now >= self._done_at

    def report_failure(self, reason: str) -> None:
        self.num_failures += 1
        if self.breaker.failure():
            self.transport = None

    def report_success(self) -> None:
        self.breaker.success()


class Connection:
    """The transport of one attachment."""

    def __init__(self, drafter: Drafter) -> None:
        self.post, self.receive, self.is_idle = drafter.post, drafter.receive, drafter.is_idle


def handle_of(drafter: Drafter) -> DrafterHandle:
    settings = AttachmentSettings(epoch=1, vocab_size=40, block_size=4, timeout_s=TIMEOUT_S, clock=lambda: drafter.now)
    return DrafterHandle(drafter, 1, settings)  # type: ignore[arg-type]


def attachment_of(handle: DrafterHandle) -> Attachment:
    assert handle.attachment is not None
    return handle.attachment


def rows(count: int, *, tokens: int = 1, shape: Shape = CHAIN) -> list[DraftRow]:
    found = []
    for batch_slot in range(count):
        submit = Submit(
            SequenceKey(1, f"r{batch_slot}", 0), 0, (TOKEN,) * 9, (), SamplingParams(), SpeculationOptions(), None, None
        )
        sequence = Running(submit, max_model_len=64, eos_ids=frozenset(), token_limit=40, now=0.0)
        sequence.batch_slot, sequence.generation = batch_slot, 1
        found.append(DraftRow(sequence, batch_slot, 1, 9, [TOKEN] * tokens, [], [], (), shape, True))
    return found


def ask(handle: DrafterHandle, asked: Sequence[DraftRow]) -> None:
    attachment = attachment_of(handle)
    attachment.post(list(asked))
    attachment.collect(lambda _: 0.0)


def left_s(handle: DrafterHandle, drafter: Drafter) -> float:
    """Return what is left of the budget. Passing time fills it, so this waits only briefly."""
    handle.record.budget.has_some(drafter.now)
    return handle.record.budget._left_s


FULL_S = AFFORDABLE_TIMEOUTS * TIMEOUT_S
# The budget gains at most this meanwhile: 2% of less than a second.
FILLED_S = 0.02


def test_the_first_wait_of_a_kind_is_free_and_the_second_is_not() -> None:
    drafter = Drafter()
    handle = handle_of(drafter)
    drafter.takes = [SLOW_S] * 12
    # Rows, new tokens, the longest row's tokens, and trees: each needs graphs of its own.
    kinds = [rows(1), rows(2), rows(2, tokens=3), rows(2, shape=Shape(3, 2, 1)), rows(2, shape=Shape(4, 3, 2))]
    for kind in kinds:
        ask(handle, kind)
    assert left_s(handle, drafter) == FULL_S and handle.record.times.estimate(3, 1) == 0.0
    ask(handle, rows(2, tokens=3))
    assert left_s(handle, drafter) == pytest.approx(FULL_S - SLOW_S, abs=FILLED_S)
    assert handle.record.times.estimate(3, 2) == pytest.approx(SLOW_S)


def test_kinds_are_as_coarse_as_graphs() -> None:
    """A drafter has one graph for five to eight sequences, and another for one more new token."""
    drafter = Drafter()
    handle = handle_of(drafter)

    def sent(*counts: int) -> list[DraftRow]:
        """Return rows with so many new tokens; the first two want trees."""
        shapes = [CHAIN] * 2 + [Shape(1, 1, 1)] * (len(counts) - 2)
        return [
            row._replace(new_tokens=[TOKEN] * count, shape=shape)
            for row, count, shape in zip(rows(len(counts)), counts, shapes, strict=True)
        ]

    drafter.takes = [SLOW_S] * 3
    ask(handle, sent(4, 1, 1, 1, 1))
    ask(handle, sent(3, 1, 1, 1, 1, 1))
    assert left_s(handle, drafter) == pytest.approx(FULL_S - SLOW_S)
    ask(handle, sent(4, 1, 1, 1, 2))
    assert left_s(handle, drafter) == pytest.approx(FULL_S - SLOW_S, abs=FILLED_S)


def test_a_first_draft_that_was_too_late_is_free_once_another_is_in_time() -> None:
    drafter = Drafter()
    handle = handle_of(drafter)
    drafter.takes = [3 * TIMEOUT_S]
    ask(handle, rows(3))
    assert drafter.num_failures == 0 and attachment_of(handle).is_catching_up()
    assert left_s(handle, drafter) == pytest.approx(FULL_S - TIMEOUT_S)
    drafter.now += 2 * TIMEOUT_S
    assert not attachment_of(handle).is_catching_up()
    assert left_s(handle, drafter) < FULL_S
    ask(handle, rows(1))
    assert left_s(handle, drafter) == FULL_S
    # It has met this kind.
    drafter.takes = [3 * TIMEOUT_S]
    ask(handle, rows(3))
    drafter.now += 2 * TIMEOUT_S
    assert not attachment_of(handle).is_catching_up()
    assert left_s(handle, drafter) == pytest.approx(FULL_S - TIMEOUT_S, abs=FILLED_S)


def test_a_drafter_that_is_always_late_pays_like_any_other() -> None:
    """It answers, and is attached anew after every third answer: no reason to wait more."""
    drafter = Drafter()
    handle = handle_of(drafter)
    kinds = [rows(1), rows(2), rows(2, tokens=3), rows(3), rows(3, tokens=2)]
    waited_s, num_asked = 0.0, 0
    longest_s = TIMEOUT_S
    while drafter.now < 1000.0:
        drafter.now += 0.01
        if drafter.transport is None:
            drafter.attach()
        if not attachment_of(handle).is_catching_up() and handle.record.budget.has_some(drafter.now):
            asked = kinds[num_asked % len(kinds)]
            deadline_s = attachment_of(handle).deadline_s(CHAIN.depth, len(asked))
            drafter.takes = [1.2 * deadline_s]
            ask(handle, asked)
            num_asked, waited_s, longest_s = num_asked + 1, waited_s + deadline_s, max(longest_s, deadline_s)
    assert drafter.num_attaches > 1, "first requests of a kind are no failures, later ones are"
    assert waited_s <= FULL_S + AFFORDABLE_SHARE * drafter.now + longest_s


def test_a_drafter_that_hangs_pays_and_is_detached_after_as_many_failures() -> None:
    drafter = Drafter()
    handle = handle_of(drafter)
    drafter.takes = [3600.0]
    ask(handle, rows(1))
    assert left_s(handle, drafter) == pytest.approx(FULL_S - TIMEOUT_S)
    while drafter.transport is not None:
        assert attachment_of(handle).is_catching_up()
        drafter.now += TIMEOUT_S / 2
    assert drafter.num_failures == MAX_CONSECUTIVE_FAILURES
    # After attaching again it has captured no graph, and still owes the missing answers.
    before_s = left_s(handle, drafter)
    drafter.now += 3600.0
    drafter.attach()
    again = attachment_of(handle)
    assert before_s < FULL_S and not again.is_catching_up() and again._first_waits._lent_s == 0.0
    assert handle.record.budget._left_s == before_s
    drafter.takes = [SLOW_S]
    ask(handle, rows(1))
    assert handle.record.budget._left_s == before_s


@pytest.mark.parametrize("is_model", [False, True])
def test_without_a_gpu_there_is_nothing_to_capture(is_model: bool) -> None:
    drafter = Drafter(device="")
    drafter.needs = DrafterNeeds(blocks=is_model, device="")
    handle = handle_of(drafter)
    drafter.takes = [SLOW_S]
    ask(handle, rows(1))
    assert left_s(handle, drafter) == pytest.approx(FULL_S - SLOW_S)


def test_nobody_waits_on_the_host_for_the_drafts_of_a_run() -> None:
    """The GPU does (verifier_svc.overlap), the last one's included; the wait budget stays full."""
    drafter = Drafter()
    handle = handle_of(drafter)
    attachment = attachment_of(handle)
    drafter.takes = [SLOW_S] * 2
    request = request_of(0, 0, rows(1))
    for number, is_last in ((1, False), (2, True)):
        attachment.post_device_step(request, DeviceStep(number, True, is_last, 1))
        assert attachment.collect(lambda _: 0.0) == []
    assert drafter.now == 0.0 and left_s(handle, drafter) == pytest.approx(FULL_S)
