"""What the first draft of a kind may take: a drafter on a GPU captures graphs and compiles kernels meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, ResidentStep
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.draft_requests import draft_batch
from verifier_svc.drafters.handle import DraftLink
from verifier_svc.drafters.request import Row, Shape
from verifier_svc.drafters.source import MAX_CONSECUTIVE_FAILURES, CircuitBreaker
from verifier_svc.drafters.waits import AFFORDABLE_SHARE, AFFORDABLE_TIMEOUTS
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.scheduling.sequence import Sequence as Running

TOKEN = 1
CHAIN = Shape(4, 3, 1)
TIMEOUT_S = 0.2
SLOW_S = 0.15


class Drafter:
    """A source and its transport. ``takes``: seconds of the clock for the next answers; what takes longer than it is
    waited for comes once the clock has moved on."""

    name, address, algorithm, transport_name, reason = "gpu", "", "EAGLE3", "in-process", ""
    state = "attached"
    num_rejected = 0

    def __init__(self, device: str = "GPU-1") -> None:
        self.needs = DrafterNeeds(blocks=True, device=device)
        self.now = 0.0
        self.takes: list[float] = []
        self.num_attaches = 1
        self.num_failures = 0
        self.breaker = CircuitBreaker()
        self.transport: Any = self
        self._asked: DraftRequest | None = None
        self._done_at = 0.0

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


def link_to(drafter: Drafter) -> DraftLink:
    return DraftLink(
        drafter,  # type: ignore[arg-type]
        1,
        epoch=1,
        vocab_size=40,
        block_size=4,
        timeout_s=TIMEOUT_S,
        clock=lambda: drafter.now,
    )


def rows(count: int, *, tokens: int = 1, shape: Shape = CHAIN) -> list[Row]:
    found = []
    for slot in range(count):
        submit = Submit(
            SequenceKey(1, f"r{slot}", 0), 0, (TOKEN,) * 9, (), SamplingParams(), SpeculationOptions(), None, None
        )
        sequence = Running(submit, max_model_len=64, eos_ids=frozenset(), token_limit=40, now=0.0)
        sequence.slot, sequence.generation = slot, 1
        found.append(Row(sequence, slot, 1, 9, [TOKEN] * tokens, [], [], (), shape, True))
    return found


def ask(link: DraftLink, asked: Sequence[Row]) -> None:
    link.post(list(asked))
    link.collect(lambda _: 0.0)


def left_s(link: DraftLink, drafter: Drafter) -> float:
    """Of the budget. Time that passes here fills it, so that little of it is waited for."""
    link.patience.has_some(drafter.now)
    return link.patience._left_s


FULL_S = AFFORDABLE_TIMEOUTS * TIMEOUT_S
# What comes back meanwhile, at most: 2% of less than a second.
FILLED_S = 0.02


def test_the_first_wait_of_a_kind_is_free_and_the_second_is_not() -> None:
    drafter = Drafter()
    link = link_to(drafter)
    drafter.takes = [SLOW_S] * 12
    # Rows, their new tokens, the tokens of the longest, and trees: each needs graphs of its own.
    kinds = [rows(1), rows(2), rows(2, tokens=3), rows(2, shape=Shape(3, 2, 1)), rows(2, shape=Shape(4, 3, 2))]
    for kind in kinds:
        ask(link, kind)
    assert left_s(link, drafter) == FULL_S and link.times.estimate(3, 1) == 0.0
    ask(link, rows(2, tokens=3))
    assert left_s(link, drafter) == pytest.approx(FULL_S - SLOW_S, abs=FILLED_S)
    assert link.times.estimate(3, 2) == pytest.approx(SLOW_S)


def test_kinds_are_as_coarse_as_graphs() -> None:
    """A drafter has one graph for five to eight sequences, and another for a new token more."""
    drafter = Drafter()
    link = link_to(drafter)

    def told(*counts: int) -> list[Row]:
        """Rows with so many new tokens; trees are wanted for the first two."""
        shapes = [CHAIN] * 2 + [Shape(1, 1, 1)] * (len(counts) - 2)
        return [
            row._replace(new_tokens=[TOKEN] * count, shape=shape)
            for row, count, shape in zip(rows(len(counts)), counts, shapes, strict=True)
        ]

    drafter.takes = [SLOW_S] * 3
    ask(link, told(4, 1, 1, 1, 1))
    ask(link, told(3, 1, 1, 1, 1, 1))
    assert left_s(link, drafter) == pytest.approx(FULL_S - SLOW_S)
    ask(link, told(4, 1, 1, 1, 2))
    assert left_s(link, drafter) == pytest.approx(FULL_S - SLOW_S, abs=FILLED_S)


def test_a_first_draft_that_was_too_late_is_free_once_another_is_in_time() -> None:
    drafter = Drafter()
    link = link_to(drafter)
    drafter.takes = [3 * TIMEOUT_S]
    ask(link, rows(3))
    assert drafter.num_failures == 1 and link.is_catching_up()
    assert left_s(link, drafter) == pytest.approx(FULL_S - TIMEOUT_S)
    drafter.now += 2 * TIMEOUT_S
    assert not link.is_catching_up()
    assert left_s(link, drafter) < FULL_S
    ask(link, rows(1))
    assert left_s(link, drafter) == FULL_S
    # It has met this kind.
    drafter.takes = [3 * TIMEOUT_S]
    ask(link, rows(3))
    drafter.now += 2 * TIMEOUT_S
    assert not link.is_catching_up()
    assert left_s(link, drafter) == pytest.approx(FULL_S - TIMEOUT_S, abs=FILLED_S)


def test_a_drafter_that_is_always_late_pays_like_any_other() -> None:
    """Its answers come, and it is attached anew after every third: that is no reason to wait for more of them."""
    drafter = Drafter()
    link = link_to(drafter)
    kinds = [rows(1), rows(2), rows(2, tokens=3), rows(3), rows(3, tokens=2)]
    waited_s, num_asked = 0.0, 0
    while drafter.now < 300.0:
        drafter.now += 0.01
        if drafter.transport is None:
            drafter.transport, drafter.breaker = drafter, CircuitBreaker()
            drafter.num_attaches += 1
            drafter._done_at = drafter.now
        if not link.is_catching_up() and link.patience.has_some(drafter.now):
            drafter.takes = [1.2 * TIMEOUT_S]
            ask(link, kinds[num_asked % len(kinds)])
            num_asked, waited_s = num_asked + 1, waited_s + TIMEOUT_S
    assert drafter.num_attaches > 3
    assert waited_s <= FULL_S + AFFORDABLE_SHARE * drafter.now + TIMEOUT_S


def test_a_drafter_that_hangs_pays_and_is_detached_after_as_many_failures() -> None:
    drafter = Drafter()
    link = link_to(drafter)
    drafter.takes = [3600.0]
    ask(link, rows(1))
    assert left_s(link, drafter) == pytest.approx(FULL_S - TIMEOUT_S)
    while drafter.transport is not None:
        assert link.is_catching_up()
        drafter.now += TIMEOUT_S / 2
    assert drafter.num_failures == MAX_CONSECUTIVE_FAILURES
    # Attached again it has captured nothing, and owes what it never answered.
    before_s = left_s(link, drafter)
    drafter.transport, drafter.num_attaches = drafter, 2
    drafter.now += 3600.0
    drafter._done_at = drafter.now
    assert before_s < FULL_S and not link.is_catching_up() and link.patience._lent_s == 0.0
    assert link.patience._left_s == before_s
    drafter.takes = [SLOW_S]
    ask(link, rows(1))
    assert link.patience._left_s == before_s


@pytest.mark.parametrize("is_model", [False, True])
def test_without_a_gpu_there_is_nothing_to_capture(is_model: bool) -> None:
    drafter = Drafter(device="")
    drafter.needs = DrafterNeeds(blocks=is_model, device="")
    link = link_to(drafter)
    drafter.takes = [SLOW_S]
    ask(link, rows(1))
    assert left_s(link, drafter) == pytest.approx(FULL_S - SLOW_S)


def test_the_last_draft_of_a_run_is_a_kind_of_its_own() -> None:
    """A run has graphs that ordinary requests have not."""
    drafter = Drafter()
    link = link_to(drafter)
    ask(link, rows(1))
    drafter.takes = [SLOW_S] * 2
    for _ in range(2):
        link.post_resident(rows(1), ResidentStep(1, True, True))
        link.collect(lambda _: 0.0)
    assert left_s(link, drafter) == pytest.approx(FULL_S - SLOW_S, abs=FILLED_S)
