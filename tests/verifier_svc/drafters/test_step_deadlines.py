"""The deadline of an overlapped step follows what such steps have taken."""

from __future__ import annotations

from verifier_svc.drafters.deadline import CEILING_S
from verifier_svc.drafters.step_deadlines import FIRST_DEADLINES, StepDeadlines

FLOOR_S = 0.2


def with_steps(*seconds: float) -> StepDeadlines:
    deadlines = StepDeadlines(FLOOR_S)
    for each in seconds:
        deadlines.observe("kind", each)
    return deadlines


def test_the_first_draft_of_a_kind_may_take_long_and_says_nothing_of_the_next() -> None:
    assert with_steps().seconds("kind") == FIRST_DEADLINES * FLOOR_S
    assert with_steps(1.5).seconds("kind") == FLOOR_S
    assert with_steps(1.5).seconds("other") == FIRST_DEADLINES * FLOOR_S


def test_slow_steps_get_four_times_what_they_take() -> None:
    """A slow card or a large batch opens no circuit: only
    a drafter slower than its own past does.
    """
    deadlines = with_steps(1.5, *[0.15] * 20)
    assert 0.59 < deadlines.seconds("kind") < 0.61
    assert not deadlines.is_excused("kind")


def test_quick_steps_keep_the_deadline_that_was_set() -> None:
    assert with_steps(0.5, *[0.01] * 20).seconds("kind") == FLOOR_S


def test_one_disturbed_step_moves_it_little() -> None:
    assert with_steps(1.5, *[0.15] * 20, 10.0).seconds("kind") < 0.8


def test_the_ceiling_excuses_what_it_cuts_off() -> None:
    deadlines = with_steps(1.5, *[0.9] * 20)
    assert deadlines.seconds("kind") == CEILING_S
    assert deadlines.is_excused("kind")
