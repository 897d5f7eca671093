"""Prompts are cut to the budget while others decode, in ordinary and in overlapped steps."""

from __future__ import annotations

import random

import pytest

from tests.support.engine_harness import Harness
from tests.support.grammars import VOCAB
from tests.support.hash_target import HashTarget
from tests.support.runs import BATCH_ROWS, BLOCK, Course, greedy, plain
from tests.support.seen_budget import SeenBudget

CHUNK = 64


def test_an_ordinary_step_cuts_a_prompt_only_beside_others() -> None:
    requests = [greedy(1, 50, 20), greedy(2, 45, 10)]
    target = HashTarget(VOCAB, 400, BLOCK)
    budget = SeenBudget(CHUNK, lambda step_s: 16)
    # A pass of one row was measured as a second.
    harness = Harness(
        target, vocab_size=VOCAB, num_blocks=400, block_size=BLOCK, prefill=budget, costs={1: 1.0, 2: 3.0}
    )
    first = harness.submit(requests[0])
    for _ in range(3):
        harness.step()
    assert target.num_rows == [50, 1, 1]
    second = harness.submit(requests[1])
    harness.drain()
    assert target.num_rows[3:7] == [17, 17, 14, 2]
    got = [harness.results[key].token_ids for key in (first, second)]
    assert got == [result.token_ids for result in plain(requests)]
    # It is asked only when a prompt is there, and learns from each step that computed some.
    assert [step_s >= 1 for step_s in budget.asked] == [False, True, True, True]
    assert budget.observed == [50, 16, 16, 13]


@pytest.mark.parametrize("drafts", [False, True])
def test_an_overlapped_step_cuts_a_prompt_only_beside_others(drafts: bool) -> None:
    budget = SeenBudget(CHUNK, lambda step_s: 16)
    course = Course([greedy(1, 50, 60), greedy(2, 45, 20)], {1: 4}, drafts=drafts, prefill=budget)
    course.run()
    # All of a prompt but its last token; the first one is alone.
    assert course.num_runs == 1 and course.step.prefills == [49, 16, 16, 12]
    assert [step_s > 0 for step_s in budget.asked] == [False, True, True, True]
    # The first steps of a run say nothing of later ones.
    assert budget.observed == [16, 16, 12]
    assert all(course.num_accepted(index) > 5 for index in range(2)) or not drafts


@pytest.mark.parametrize("drafts", [False, True])
def test_texts_do_not_depend_on_the_budget(drafts: bool) -> None:
    """It changes from step to step. ``Course`` compares all texts with those of plain decode."""
    draw = random.Random(7)
    budget = SeenBudget(CHUNK, lambda step_s: draw.choice([16, 20, 33, CHUNK]))
    requests = [greedy(i, 30 + 11 * i, 25) for i in range(BATCH_ROWS + 2)]
    course = Course(requests, {i: 2 * i for i in range(1, BATCH_ROWS + 2)}, drafts=drafts, prefill=budget)
    course.run()
    assert len(set(course.step.prefills)) > 4 and max(course.step.prefills) <= CHUNK
    assert sum(course.step.prefills) >= sum(len(request.prompt) - 1 for request in requests)


def test_prompts_go_on_beside_a_batch_that_takes_all_of_the_limit() -> None:
    """The least that a budget gives is more than what runs again for a drafter."""
    requests = [greedy(1, 6, 90), *(greedy(i, 40, 8) for i in range(2, BATCH_ROWS))]
    budget = SeenBudget(CHUNK, lambda step_s: budget.least_tokens)
    course = Course(requests, dict.fromkeys(range(1, BATCH_ROWS - 1), 3), prefill=budget)
    course.run()
    assert max(course.step.prefills) == 16
    # No pass was left out until all prompts were computed.
    assert len(course.step.prefills) <= 1 + -(-39 * (BATCH_ROWS - 2) // 16) + 1
