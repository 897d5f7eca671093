"""Steps with token masks overlap: the masks are bound late, and the text is that of plain decode.

The target costs nothing, and results are read a step late.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine_harness import Request
from tests.support.grammars import VOCAB, ids_of
from tests.support.runs import Course, greedy, plain, with_grammar
from verifier_svc.sampling import grammar


def masked(kind: str, seed: int, max_tokens: int = 40) -> Request:
    """Return a request with a grammar, one that ends by itself, or token lists."""
    request = greedy(seed, 6, max_tokens)
    fields: dict[str, Any]
    match kind:
        case "grammar":
            return with_grammar(request)
        case "ends":
            return with_grammar(request, "[a-f]{3,9}(x|yz)[0-9]{4}")
        case "allowed":
            fields = {"allowed_token_ids": tuple(range(8, VOCAB, 2))}
        case _:
            fields = {"bad_token_ids": (tuple(ids_of("5")), tuple(ids_of("a", "b")), *((t, t + 1) for t in range(20)))}
    return replace(request, sampling=replace(request.sampling, **fields))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", ["grammar", "ends", "allowed", "bad words"])
def test_a_masked_request_joins_the_run_of_others(kind: str, drafts: bool) -> None:
    course = Course([greedy(1, 9, 60), masked(kind, 2), greedy(3, 9, 30)], {1: 4, 2: 6}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.step.num_bound > 3
    assert course.num_accepted(1) > 2 or not drafts


@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_alone_whose_first_step_is_its_last(drafts: bool) -> None:
    """Nothing else is launched that could bind it."""
    course = Course([masked("grammar", 2, max_tokens=1)], drafts=drafts)
    course.run()
    assert course.runs.num_ordinary == 0 and course.step.num_bound in (1, 2)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("end", ["abort", "deadline", "stop"])
def test_a_masked_request_is_ended_from_outside(end: str, drafts: bool) -> None:
    """Between the halves of a step, which is bound all the same; the others go on."""
    done: list[bool] = []

    def look(number: int) -> None:
        sequence = course.sequence(1)
        if done or sequence is None or course.num_output(1) < 6:
            return
        done.append(True)
        if end == "abort":
            course.abort(1)
        elif end == "deadline":
            sequence.deadline = 0.0
            course.errors.add(1)
        else:
            course.harness.engine.is_stopping = True

    course = Course([greedy(1, 9, 60), masked("grammar", 2, 60), greedy(3, 7, 30)], {1: 3}, drafts=drafts, look=look)
    if end == "stop":
        course.submit(0)
        course.submit(2)
        course.harness.step()
        assert done and course.step.in_flight.is_bound and len(course.step.in_flight) == 0
        return
    course.run()
    assert done and course.num_runs == 1 and course.runs.num_ordinary == 0 and course.step.num_bound > 3


@pytest.mark.parametrize("what", ["dies", "is late"])
@pytest.mark.parametrize("at", range(4, 9))
def test_a_drafter_goes_while_a_step_waits_for_its_trees(what: str, at: int) -> None:
    """The host waits for the trees before it computes
    masks, and lets the step go on without them.
    """

    def look(number: int) -> None:
        if number == at and what == "dies":
            course.oracle.close()

    def is_stuck(number: int, num_releases: int) -> bool:
        return number == at and num_releases < 2

    course = Course(
        [greedy(1, 9, 60), masked("grammar", 2, 60)],
        look=look,
        is_stuck=is_stuck,
        timeout_s=0.0 if what == "is late" else 600.0,
    )
    course.run()
    assert sum(step.num_bound for step in course.runs.steps) > 10 and course.runs.num_ordinary <= 3


def test_a_grammar_that_meets_a_limit_fails_as_in_plain_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the same tokens, although drafts went on after them."""
    monkeypatch.setattr(grammar, "LIMITS", {**grammar.LIMITS, "max_lexer_states": 30})
    course = Course([greedy(1, 9, 60), masked("grammar", 2, 60)])
    course.errors.add(1)
    course.run()
    want, got = course.expected[1], course.result(1)
    assert want.error is not None and got.error is not None
    assert (got.token_ids, got.error.message) == (want.token_ids, want.error.message)
    assert 3 < len(got.token_ids) < 60 and course.runs.num_ordinary == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_a_resumed_request_whose_output_is_complete(drafts: bool) -> None:
    """It ends with its first step, without a token."""
    request = masked("ends", 2)
    (whole,) = plain([request])
    resumed = replace(request, output=whole.token_ids, attempt=1)
    course = Course([greedy(1, 9, 30), resumed], {1: 3}, drafts=drafts)
    course.run()
    assert course.runs.num_ordinary == 0 and course.step.num_bound in (1, 2)
