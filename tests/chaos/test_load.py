"""The judge: which outcomes are errors, which are excused, and which are compared."""

from __future__ import annotations

import copy
import random

import pytest

from tests.chaos.answer import Answer, Choice
from tests.chaos.client import POLITE, Manner, Outcome, Record
from tests.chaos.load import Judge, _endless
from tests.chaos.requests import Request

REQUEST = Request(7, "completions", True, {"prompt": "def"})
EXPECTED = Answer(
    {0: Choice(text="abc", token_ids=[1, 2, 3], finish_reason="length", num_finishes=1)},
    {"completion_tokens": 3},
    ended=True,
)


def record(outcome: Outcome = "done", answer: Answer = EXPECTED, manner: Manner = POLITE, **fields: object) -> Record:
    made = Record(REQUEST, manner, sent_at=1.0, ended_at=2.0, outcome=outcome, answer=copy.deepcopy(answer))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def judge(excused: bool = False) -> Judge:
    return Judge({7: EXPECTED}, 3, lambda sent_at, ended_at: excused and (sent_at, ended_at) == (1.0, 2.0))


def test_an_equal_answer_is_counted_with_its_tokens_and_times() -> None:
    made = judge()
    assert not made.judge(record(ticks=[(1.25, 0), (1.5, 0)], status=200))
    assert (made.tally.total("done"), made.tally.num_tokens_compared, made.tally.failures) == (1, 3, [])
    assert made.tally.timelines[0].ticks == {0: (1.25, 1.5)}


def test_a_slow_reader_is_compared_and_not_timed() -> None:
    made = judge()
    made.judge(record(manner=Manner(slow_s=0.1), ticks=[(1.25, 0)]))
    assert (made.tally.num_tokens_compared, made.tally.timelines) == (3, [])


def test_a_difference_is_a_failure_that_can_be_replayed() -> None:
    made, wrong = judge(), copy.deepcopy(EXPECTED)
    wrong.choices[0].token_ids[1] = 9
    made.judge(record(answer=wrong))
    (failure,) = made.tally.failures
    assert "request 7 (completions, streamed)" in failure and "changed choice 0: token_ids, at 1 of 3" in failure
    assert '--seed 3 --only 7; it was {"prompt": "def"}' in failure
    assert made.tally.total("differing") == 1


@pytest.mark.parametrize("outcome", ["broken", "failed"])
def test_an_error_to_a_client_is_a_failure(outcome: Outcome) -> None:
    made = judge()
    assert not made.judge(record(outcome, Answer(), error="it broke"))
    assert "it broke" in made.tally.failures[0]
    assert made.tally.total("failed") == 1


def test_a_connection_that_a_dying_gateway_broke_is_tried_again() -> None:
    made = judge(excused=True)
    assert made.judge(record("broken", Answer({0: Choice(text="ab", token_ids=[1, 2])})))
    assert (made.tally.failures, made.tally.total("sent again")) == ([], 1)


def test_what_the_server_says_is_never_excused() -> None:
    made = judge(excused=True)
    assert not made.judge(record("failed", Answer(), status=503, error="status 503"))
    assert len(made.tally.failures) == made.tally.num_server_errors == 1


@pytest.mark.parametrize("outcome", ["broken", "dropped"])
def test_what_came_before_a_cut_must_be_right(outcome: Outcome) -> None:
    made = judge(excused=True)
    made.judge(record(outcome, Answer({0: Choice(text="ab")})))
    assert made.tally.failures == []
    made.judge(record(outcome, Answer({0: Choice(text="abb")})))
    assert len(made.tally.failures) == 1


def test_the_row_holds_every_request_again_and_again_and_all_manners() -> None:
    requests = [Request(number, "chat", True, {}) for number in range(50)]
    row = _endless(requests, random.Random(1))
    items = [next(row) for _ in range(200)]
    for start in range(0, 200, 50):
        assert sorted(request.number for request, _ in items[start : start + 50]) == list(range(50))
    manners = [manner for _, manner in items]
    assert any(manner.slow_s for manner in manners) and any(manner.drop_after_s for manner in manners)
    assert manners.count(POLITE) > 100
