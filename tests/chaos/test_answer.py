"""The comparison sees every way in which an answer can be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.chaos.answer import Answer, Choice, differences, prefix_differences


def sample() -> Answer:
    choice = Choice(
        text="def add(a, b):",
        token_ids=[7, 8, 9, 10],
        token_texts=["def", " add", "(a,", " b):"],
        logprobs=[[7, -0.5], [8, -0.25], [9, -0.125], [10, -1.0]],
        prompt_logprobs=[[1, -2.0]],
        finish_reason="stop",
        stop_reason=":",
        num_prompt_tokens=3,
        num_output_tokens=4,
        num_finishes=1,
    )
    usage = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    return Answer({0: choice, 1: copy.deepcopy(choice)}, usage, ended=True)


def changed_text(answer: Answer) -> None:
    answer.choices[1].text = "def odd(a, b):"


def changed_token(answer: Answer) -> None:
    answer.choices[1].token_ids[2] = 99


def lost_token(answer: Answer) -> None:
    del answer.choices[1].token_ids[2]


def lost_last_token(answer: Answer) -> None:
    del answer.choices[1].token_ids[3]


def doubled_token(answer: Answer) -> None:
    answer.choices[1].token_ids.insert(2, 8)


def doubled_last_token(answer: Answer) -> None:
    answer.choices[1].token_ids.append(10)


def doubled_text(answer: Answer) -> None:
    answer.choices[1].text = "def add add(a, b):"


def changed_token_text(answer: Answer) -> None:
    answer.choices[1].token_texts[0] = "deF"


def changed_logprob(answer: Answer) -> None:
    answer.choices[1].logprobs[3][1] = -1.0000001


def lost_logprob(answer: Answer) -> None:
    del answer.choices[1].logprobs[0]


def doubled_prompt_logprobs(answer: Answer) -> None:
    answer.choices[1].prompt_logprobs *= 2


def missing_finish(answer: Answer) -> None:
    answer.choices[1].num_finishes = 0


def second_finish(answer: Answer) -> None:
    answer.choices[1].num_finishes = 2


def changed_finish_reason(answer: Answer) -> None:
    answer.choices[1].finish_reason = "length"


def changed_stop_reason(answer: Answer) -> None:
    answer.choices[1].stop_reason = None


def changed_output_count(answer: Answer) -> None:
    answer.choices[1].num_output_tokens = 5


def changed_prompt_count(answer: Answer) -> None:
    answer.choices[1].num_prompt_tokens = 7


def changed_usage(answer: Answer) -> None:
    answer.usage["completion_tokens"] = 9


def lost_usage(answer: Answer) -> None:
    answer.usage = {}


def lost_choice(answer: Answer) -> None:
    del answer.choices[1]


def doubled_choice(answer: Answer) -> None:
    answer.choices[2] = answer.choices[1]


def missing_end(answer: Answer) -> None:
    answer.ended = False


def broken_rule(answer: Answer) -> None:
    answer.violations.append("offset 5 after 4 tokens")


FAULTS: list[tuple[Callable[[Answer], None], str, str]] = [
    (changed_text, "changed", "choice 1: text, at 4 of 14"),
    (changed_token, "changed", "choice 1: token_ids, at 2 of 4"),
    (lost_token, "lost", "choice 1: token_ids, at 2 of 4"),
    (lost_last_token, "lost", "choice 1: token_ids, at 3 of 4"),
    (doubled_token, "doubled", "choice 1: token_ids, at 2 of 4"),
    (doubled_last_token, "doubled", "choice 1: token_ids, at 4 of 4"),
    (doubled_text, "doubled", "choice 1: text, at 7 of 14"),
    (changed_token_text, "changed", "choice 1: token_texts, at 0 of 4"),
    (changed_logprob, "changed", "choice 1: logprobs, at 3 of 4"),
    (lost_logprob, "lost", "choice 1: logprobs, at 0 of 4"),
    (doubled_prompt_logprobs, "doubled", "choice 1: prompt_logprobs, at 1 of 1"),
    (missing_finish, "lost", "choice 1: finish"),
    (second_finish, "doubled", "choice 1: finish"),
    (changed_finish_reason, "changed", "choice 1: finish_reason"),
    (changed_stop_reason, "changed", "choice 1: stop_reason"),
    (changed_output_count, "changed", "choice 1: num_output_tokens"),
    (changed_prompt_count, "changed", "choice 1: num_prompt_tokens"),
    (changed_usage, "changed", "usage"),
    (lost_usage, "changed", "usage"),
    (lost_choice, "lost", "choice 1"),
    (doubled_choice, "doubled", "choice 2"),
    (missing_end, "lost", "the end of the answer"),
    (broken_rule, "protocol", "offset 5 after 4 tokens"),
]


def test_equal_answers_do_not_differ() -> None:
    assert differences(sample(), sample()) == []
    assert prefix_differences(sample(), sample()) == []


@pytest.mark.parametrize(("fault", "kind", "where"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_fault_is_the_one_difference(fault: Callable[[Answer], None], kind: str, where: str) -> None:
    got = sample()
    fault(got)
    (difference,) = differences(sample(), got)
    assert (difference.kind, difference.where) == (kind, where)


def test_both_texts_are_shown_around_the_first_difference() -> None:
    got = sample()
    changed_text(got)
    (difference,) = differences(sample(), got)
    assert "'def add(a, b):'" in str(difference) and "'def odd(a, b):'" in str(difference)


def test_a_cut_answer_is_a_beginning_of_the_whole_one() -> None:
    cut = Answer({0: Choice(text="def ad", token_ids=[7, 8], logprobs=[[7, -0.5]])})
    assert prefix_differences(sample(), cut) == []


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (Choice(text="def od"), "changed"),
        (Choice(text="def add add"), "changed"),
        (Choice(token_ids=[7, 8, 8, 9]), "changed"),
        (Choice(token_ids=[7, 9]), "changed"),
        (Choice(token_ids=[7, 8, 9, 10, 11]), "doubled"),
        (Choice(logprobs=[[7, -0.75]]), "changed"),
        (Choice(num_finishes=2, finish_reason="stop", stop_reason=":"), "doubled"),
    ],
)
def test_a_cut_answer_with_a_fault_is_not(choice: Choice, kind: str) -> None:
    assert kind in [difference.kind for difference in prefix_differences(sample(), Answer({0: choice}))]


def test_a_cut_answer_of_a_choice_that_was_not_asked_for_is_not_either() -> None:
    assert [difference.kind for difference in prefix_differences(sample(), Answer({5: Choice()}))] == ["doubled"]
