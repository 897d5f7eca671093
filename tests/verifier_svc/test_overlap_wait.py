"""How long an overlapped step may wait for its trees, and from when that counts."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.drafters.step_deadlines import StepDeadlines
from verifier_svc.engine_counters import EngineCounters
from verifier_svc.overlap import times, wait
from verifier_svc.overlap.times import OverlapTimes, StepFacts
from verifier_svc.overlap.tree_request import TreeRequest
from verifier_svc.overlap.wait import OverlapWait

DEADLINE_S = 0.2


class Clock:
    """The time of the modules under test; a sleep lets it pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(times, "time", clock)
    monkeypatch.setattr(wait, "time", clock)
    return clock


def drafting_of(failures: list[str]) -> Any:
    source = SimpleNamespace(report_failure=failures.append)
    return SimpleNamespace(
        drafter=SimpleNamespace(source=source),
        attachment=SimpleNamespace(leave_alone=lambda: None),
        controller=None,
        is_open=True,
    )


def facts(kind: str, launched_at: float) -> StepFacts:
    return StepFacts(Shape(4, 3, 1), 4, 0, 1, 0, False, True, kind, launched_at, 0.0, {})


@pytest.mark.parametrize("stall", ["before the launch", "before the masks", "nowhere"])
def test_a_stall_of_the_host_is_not_the_drafters(stall: str, clock: Clock) -> None:
    failures: list[str] = []
    drafting = drafting_of(failures)
    steps = OverlapTimes(drafting, None, None)  # type: ignore[arg-type]
    waits = OverlapWait(SimpleNamespace(release=lambda: None), drafting, StepDeadlines(DEADLINE_S))  # type: ignore[arg-type]
    for _ in range(2):
        waits.deadlines.observe("kind", 0.006)
    steps.begin()
    if stall == "before the launch":
        clock.now += 2 * DEADLINE_S
    steps.observe_launch(is_late=False)
    in_flight = deque([facts("kind", steps.launched_at)])
    if stall == "before the masks":
        clock.now += 2 * DEADLINE_S
        steps.mark_bound()
    # The step takes longer than its kind does, but not too long.
    done_at = clock.now + 0.9 * DEADLINE_S
    assert waits.until(lambda: clock.now >= done_at, in_flight, steps.begun_at(in_flight[0])) and failures == []
    assert steps.mark_done(in_flight[0]) == pytest.approx(0.9 * DEADLINE_S, rel=0.01)
    done_at = clock.now + 2 * DEADLINE_S
    assert not waits.until(lambda: clock.now >= done_at, in_flight, clock.now)
    assert failures == ["no draft within 200 ms"]


def test_steps_of_other_batches_are_of_another_kind() -> None:
    """A step of 256 sequences may take many times as long as one of a single sequence."""
    requests = SimpleNamespace(has_prompts=False, post=lambda *asked: None)
    drafting = SimpleNamespace(shape=Shape(4, 3, 1), drafter=object(), is_current=True)

    def kind_of(num_sequences: int) -> object:
        rows: Any = tuple(object() if index < num_sequences else None for index in range(256))
        request = TreeRequest(drafting, requests, None, None, EngineCounters())  # type: ignore[arg-type]
        return request.post(1, rows, 0).kind

    kinds = [kind_of(count) for count in (1, 16, 64, 256)]
    assert len(set(kinds)) == len(kinds) and kind_of(61) == kind_of(64)
    drafting.shape = NO_DRAFT
    assert kind_of(64) not in kinds
