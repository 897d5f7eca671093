"""Step times from arrivals: which steps count, and which are left out."""

from __future__ import annotations

import pytest

from benchmarks.gpu.step_times import MeasuredSteps, step_times


def arrivals(first_at: float, gap: float, tokens: list[int]) -> list[tuple[float, int]]:
    """Return arrivals: one token at ``first_at``, then these numbers every ``gap``."""
    found = [(first_at, 1)]
    for index, count in enumerate(tokens, start=1):
        found.append((first_at + gap * index, found[-1][1] + count))
    return found


def test_steps_of_one_sequence() -> None:
    found = step_times([arrivals(1.0, 0.5, [3, 3, 3, 3])], 3.0)
    # The last one may be cut by the length.
    assert found.seconds == [0.5, 0.5, 0.5]
    assert (found.num_dropped, found.tokens_per_step) == (0, 3.0)


def test_only_steps_of_the_whole_batch_count() -> None:
    """The second sequence starts two steps later, and the first one ends earlier."""
    first = arrivals(0.0, 1.0, [1] * 6)
    second = arrivals(2.0, 1.0, [1] * 9)
    found = step_times([first, second], 1.0)
    assert found.seconds == [1.0] * 3
    assert found.num_tokens == 6 and found.tokens_per_step == 1.0


def test_messages_of_several_steps_and_steps_without_a_draft_are_dropped() -> None:
    found = step_times([arrivals(0.0, 1.0, [3, 6, 3, 1, 3, 3])], 3.0)
    assert found.seconds == [1.0] * 3
    assert found.num_dropped == 2
    # The message with six was two steps: 16 tokens in 6.
    assert found.tokens_per_step == pytest.approx(16 / 6)


def test_what_was_read_at_once_is_no_step_of_no_time() -> None:
    found = step_times([[(0.0, 1), (1.0, 2), (2.0, 3), (2.0, 4), (3.0, 5), (4.0, 6)]], 1.0)
    assert (found.seconds, found.num_dropped, found.tokens_per_step) == ([1.0, 1.0], 1, 1.0)


def test_counting_starts_with_the_first_full_step() -> None:
    found = step_times([arrivals(0.0, 1.0, [1, 1, 3, 3, 3])], 3.0)
    assert (found.seconds, found.num_dropped, found.tokens_per_step) == ([1.0, 1.0], 0, 3.0)


def test_a_fractional_length_has_steps_of_two_lengths() -> None:
    found = step_times([arrivals(0.0, 1.0, [2, 3, 2, 3, 2])], 2.5)
    assert found.seconds == [1.0] * 4
    assert found.tokens_per_step == 2.5


def test_no_steps_at_all() -> None:
    found = step_times([[(1.0, 1)]], 3.0)
    assert (found.seconds, found.tokens_per_step) == ([], 0.0)


def test_rounds_add_up() -> None:
    total = MeasuredSteps()
    for _ in range(2):
        total.extend(step_times([arrivals(0.0, 1.0, [3, 1, 3, 3])], 3.0))
    assert (total.seconds, total.num_dropped) == ([1.0] * 4, 2)
    assert total.tokens_per_step == pytest.approx(7 / 3)
