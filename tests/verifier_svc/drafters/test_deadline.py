"""A drafter's deadline follows what its drafts cost, so that load alone never detaches it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from foretoken.drafting import DrafterNeeds
from foretoken.transports.transport import DraftTransport
from verifier_svc.drafters.attachment import CATCH_UP_TIMEOUTS, Attachment, AttachmentSettings, Posted
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.deadline import CEILING_S, MOST_TIMES_COST, Deadline
from verifier_svc.drafters.source import MAX_CONSECUTIVE_FAILURES, DraftSource
from verifier_svc.drafters.source_record import SourceRecord
from verifier_svc.drafters.waits import DraftTimes

FLOOR_S = 0.2


def known(depth: int, num_rows: int, seconds: float) -> Deadline:
    """Return the deadline of a drafter with one kind of drafts."""
    times = DraftTimes()
    times.observe(depth, num_rows, seconds)
    return Deadline(FLOOR_S, times)


def test_a_cheap_drafter_has_the_deadline_that_is_set() -> None:
    for deadline in (Deadline(FLOOR_S, DraftTimes()), known(5, 8, 0.01)):
        assert deadline.seconds(5, 8) == FLOOR_S


def test_the_deadline_is_a_multiple_of_the_measured_cost() -> None:
    deadline = known(5, 256, 0.1)
    assert deadline.seconds(5, 256) == deadline.seconds(5, 200) == pytest.approx(0.4)
    assert deadline.seconds(5, 8) == pytest.approx(0.4), "fewer rows cost no more"


def test_more_rows_and_deeper_trees_may_cost_in_proportion() -> None:
    deadline = known(2, 16, 0.05)
    assert deadline.seconds(2, 64) == pytest.approx(0.8)
    assert deadline.seconds(4, 16) == pytest.approx(0.4)


def test_cost_that_is_no_longer_believed_still_sets_the_deadline() -> None:
    times = DraftTimes()
    times.observe(5, 256, 0.1)
    times.fade(256, 100_000)
    assert Deadline(FLOOR_S, times).seconds(5, 256) == pytest.approx(0.4)


def test_the_ceiling_bounds_the_deadline_but_not_the_setting() -> None:
    assert known(5, 256, 1.0).seconds(5, 256) == CEILING_S
    times = DraftTimes()
    times.observe(5, 256, 1.0)
    assert Deadline(2 * CEILING_S, times).seconds(5, 256) == 2 * CEILING_S


def test_load_explains_what_is_not_known_and_what_the_ceiling_cut() -> None:
    assert Deadline(FLOOR_S, DraftTimes()).is_excused(5, 8)
    assert not known(5, 8, 0.01).is_excused(5, 8)
    assert not known(5, 8, 0.1).is_excused(5, 16)
    assert known(5, 256, 1.0).is_excused(5, 256)


class Stub:
    """A drafter whose every draft takes ``cost_s`` of a clock: its source, and its transport."""

    overlap_memory = None

    def __init__(self, *, is_model: bool) -> None:
        self.needs = DrafterNeeds(blocks=is_model)
        self.failures: list[str] = []
        self.now = self.idle_at = 0.0
        self.cost_s = 0.0

    def receive(self, timeout_s: float) -> Any:
        self.idle_at = self.now + self.cost_s
        self.now += min(self.cost_s, timeout_s)
        return None if self.cost_s > timeout_s else SimpleNamespace()

    def is_idle(self) -> bool:
        return self.now >= self.idle_at

    def report_failure(self, reason: str) -> None:
        self.failures.append(reason)


class Play:
    """An attachment of a stub, asked at every step of 10 ms unless it is still busy."""

    def __init__(self, *, is_model: bool = True) -> None:
        self.stub = Stub(is_model=is_model)
        self.record = SourceRecord(cast("DraftSource", self.stub), FLOOR_S)
        settings = AttachmentSettings(1, 12, 4, FLOOR_S, lambda: self.stub.now)
        self.attachment = Attachment(cast("DraftTransport", self.stub), 1, self.record, DrafterCounters(), settings)

    def ask(self, cost_s: float, num_rows: int = 256) -> bool:
        """Ask for drafts that take so long once the drafter is free.

        Return whether they came in time.
        """
        self.stub.cost_s = cost_s
        while self.attachment.is_catching_up():
            self.stub.now += 0.01
        posted: Any = SimpleNamespace(rows=[], depth=5, num_drafted=num_rows, in_device_memory=False)
        return self.attachment._wait(cast("Posted", posted), 0.0) is not None


def test_load_that_grows_never_opens_the_circuit() -> None:
    """The deadline was 200 ms whatever the batch: a drafter that
    takes longer at a large one was detached.
    """
    play = Play()
    assert not play.ask(0.3), "nothing is known of it yet"
    assert all(play.ask(0.3) for _ in range(20))
    assert all(play.ask(0.6) for _ in range(20))
    assert play.attachment.deadline_s(5, 256) > 1.5
    assert not play.stub.failures


def test_a_late_first_draft_teaches_its_cost() -> None:
    play = Play()
    play.ask(0.5)
    assert play.ask(0.01)
    (line,) = play.record.times._lines.values()
    assert line.most(5) == pytest.approx((0.5 + 0.01) / 2, abs=0.02)


def test_a_drafter_slower_than_its_own_cost_allows_opens_the_circuit() -> None:
    play = Play()
    play.ask(0.3)
    for _ in range(50):
        assert play.ask(0.1)
    limit_s = play.attachment.deadline_s(5, 256)
    assert limit_s == pytest.approx(MOST_TIMES_COST * 0.1, rel=0.3)
    for number in range(MAX_CONSECUTIVE_FAILURES):
        assert len(play.stub.failures) == number
        assert not play.ask(1.1 * limit_s)
    assert play.stub.failures == [f"no sound draft within {limit_s * 1e3:.0f} ms"] * MAX_CONSECUTIVE_FAILURES


def test_a_model_that_never_answers_is_reported_although_nothing_is_known_of_it() -> None:
    play = Play()
    assert not play.ask(3600.0)
    assert not play.stub.failures
    for number in range(1, MAX_CONSECUTIVE_FAILURES + 1):
        play.stub.now += 1.01 * CATCH_UP_TIMEOUTS * FLOOR_S
        assert play.attachment.is_catching_up() and len(play.stub.failures) == number


def test_a_look_up_drafter_that_misses_its_deadline_is_reported_at_once() -> None:
    """Nothing else would find that it has stopped."""
    play = Play(is_model=False)
    assert not play.ask(3600.0)
    assert play.stub.failures == ["no sound draft within 200 ms"]
