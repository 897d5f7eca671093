"""Sequences join a run of overlapped steps and leave it; their prompts are computed within it.

The target costs nothing, and results are read a step late. The drafter checks what it is sent.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.engine_harness import Request
from tests.support.runs import BLOCK, SEATS, Course, greedy, prompt, with_grammar


def alike(lengths: list[int], shared: int, max_tokens: int) -> list[Request]:
    """Return requests whose prompts have these lengths and the same first ``shared`` tokens."""
    first = prompt(99, shared)
    return [
        replace(greedy(i, 6, max_tokens), prompt=[*first, *prompt(i, length - shared)])
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_joins_a_run_that_goes_on(drafts: bool) -> None:
    """No step is an ordinary one, the first included; the second prompt is a pass of its own."""
    course = Course([greedy(1, 9, 40), greedy(2, 12, 20)], {1: 4}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.step.prefills == [8, 11]
    # It waits for one turn of the loop, and is seated in the step that follows.
    assert course.step.num_seated[:6] == [1, 1, 1, 1, 2, 2]
    for index in range(2):
        assert course.num_accepted(index) > 5 or not drafts
    # The drafter is told of each seat once.
    assert course.oracle.num_begins == (2 if drafts else 0)


def test_several_prompts_are_one_pass() -> None:
    requests = [greedy(i, 5 + i, 20) for i in range(6)]
    course = Course(requests, dict.fromkeys(range(1, 6), 3))
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [4, sum(4 + i for i in range(1, 6))]
    assert course.oracle.num_prompt_rows == 6
    # The first token alone has no hidden state before it.
    assert set(course.oracle.num_without_hidden.values()) == {1}


def test_a_long_prompt_comes_in_chunks_while_others_draft() -> None:
    """Each chunk is sent with the hidden states of its pass; it joins after the last one."""
    course = Course([greedy(1, 6, 60), greedy(2, 50, 20)], {1: 3}, prompt_rows=8)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [5, *[8] * 6, 1]
    seated = course.step.num_seated
    assert seated[3:9] == [1] * 6 and seated[9] == 2
    assert set(course.oracle.num_without_hidden.values()) == {1}
    assert course.num_accepted(0) > 20 and course.num_accepted(1) > 5


def test_a_short_prompt_shares_the_pass_of_a_long_one() -> None:
    """The oldest prompts come first; what a chunk has left goes to the next."""
    course = Course([greedy(1, 4, 40), greedy(2, 14, 20), greedy(3, 5, 20)], {1: 2, 2: 2}, prompt_rows=8)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [3, 8, 8, 1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_cached_prefix_is_not_computed_again(drafts: bool) -> None:
    """Its last position runs again, for the hidden state that a drafter needs."""
    course = Course(alike([22, 25], 20, 30), {1: 4}, drafts=drafts)
    course.run()
    finished = course.result(1).finished
    assert finished is not None and finished.num_cached_tokens == 20
    assert course.num_runs == 1 and course.step.prefills == [21, 25 - 1 - 20 + drafts]
    if drafts:
        assert sorted(course.oracle.num_without_hidden.values()) == [1, 20]
        assert course.num_accepted(1) > 5


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_that_is_cached_but_for_its_last_token_joins_at_once(drafts: bool) -> None:
    requests = [greedy(1, 4 * BLOCK + 1, 30)] * 2
    course = Course(requests, {1: 4}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == ([16, 1] if drafts else [16])
    assert course.result(1).finished.num_cached_tokens == 16  # type: ignore[union-attr]
    assert course.num_accepted(1) > 5 or not drafts


def test_a_cached_prompt_waits_for_room_in_the_chunk() -> None:
    """A long prompt takes the whole pass. Nobody joins before the drafter was sent its prompt."""
    requests = [greedy(1, 4 * BLOCK + 1, 40), greedy(2, 40, 20), greedy(1, 4 * BLOCK + 1, 30)]
    course = Course(requests, {1: 4, 2: 4}, prompt_rows=8)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [8, 8, *[8] * 5]
    assert all(course.num_accepted(index) > 5 for index in range(3))


def test_cached_prompts_that_fill_a_request_come_one_after_the_other() -> None:
    """A request holds one long prefix beside a chunk. All sequences are drafted for."""
    requests = [greedy(1, 6, 60), *alike([44 + i for i in range(SEATS - 1)], 40, 40)]
    course = Course(requests, {1: 3, **dict.fromkeys(range(2, SEATS), 8)}, prompt_rows=48)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.step.num_seated[7:12] == [2, 4, 6, 7, 8]
    assert all(course.num_accepted(index) > 10 for index in range(SEATS))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("limit", [0, 2])
def test_choices_of_a_request(drafts: bool, limit: int) -> None:
    """The first computes the prompt for all. A limit counts those that wait for it."""
    requests = [greedy(1, 4 * BLOCK + 1, 20, choice_index=i) for i in range(4)]
    course = Course(requests, drafts=drafts, max_batch_size=limit)
    for index in range(4):
        course.submit(index, "one")
    course.run()
    assert course.runs.num_ordinary == 0
    assert course.runs.steps[0].prefills + course.runs.steps[-1].prefills
    for index in range(1, 4):
        assert course.result(index).finished.num_cached_tokens == 16  # type: ignore[union-attr]


def test_a_slot_goes_to_another_in_a_run_that_the_drafter_takes_no_part_in() -> None:
    """What is left to send of the old owner must not follow the new one's prompt."""
    requests = [greedy(1, 6, 24), greedy(2, 6, 90), greedy(3, 6, 30), greedy(4, 6, 60), with_grammar(greedy(5, 6, 4))]
    # The first is drafted for, and ends beside two others: that is above the limit.
    comes = {1: 2, 2: 2, 3: lambda: course.has_ended(0), 4: lambda: course.num_output(3) > 20}
    course = Course(requests, comes, max_running=3, max_batch_size=2)
    course.run()
    assert course.num_accepted(0) > 0 and course.num_accepted(3) > 10 and course.oracle.ways.count("host") > 1
