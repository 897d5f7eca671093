"""Hidden states of consecutive positions are kept until they were sent to drafters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.scheduling.hidden_states import (
    MAX_ROWS,
    HiddenSlice,
    HiddenStates,
    PassHiddenStates,
    columns_of,
    joined,
)


def rows_of(start: int, count: int, width: int = 2) -> HiddenSlice:
    """Return rows that hold their own position; the pass had other rows between and after them."""
    places = list(range(1, 2 * count, 2))
    buffer = torch.full((2 * count + 1, width), -1.0)
    buffer[places] = torch.arange(start, start + count, dtype=torch.float32)[:, None]
    return HiddenSlice(PassHiddenStates(places, buffer, lambda rows: buffer[rows].numpy()), 0, count)


def sent(window: HiddenStates, start: int, end: int) -> list[int]:
    parts = window.rows(start, end)
    values = [int(value) for part in parts for value in part.values()[:, 0]]
    if all(part.source.on_device is not None for part in parts):
        assert values == [int(part.source.on_device[place, 0]) for part in parts for place in part.places]  # type: ignore[index]
    return values


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_what_is_there_are_the_last_positions_without_a_gap(steps: list[tuple[int, int, int]]) -> None:
    """Each step appends rows, begins earlier by those that run again, or leaves a gap."""
    window = HiddenStates()
    first, end = 0, 0
    for count, again, gap in steps:
        start = max(end - again, first) if not gap else end + gap
        if gap or end == 0:
            first = start
        window.append(start, rows_of(start, count + again))
        end = max(end, start + count + again)
        assert (window.start, window.end) == (first, end)
        for low in range(max(first - 2, 0), end + 1):
            for high in range(low, end + 1):
                assert sent(window, low, high) == list(range(max(low, first), high))
        assert sent(window, first, end + 1) == []


def test_sent_rows_are_dropped_and_memory_is_bounded() -> None:
    window = HiddenStates()
    window.append(0, rows_of(0, 10))
    window.append(10, rows_of(10, 5))
    window.forget_before(12)
    assert (window.start, window.end) == (12, 15) and sent(window, 0, 15) == [12, 13, 14]
    window.forget_before(99)
    assert (window.start, window.end) == (15, 15) and sent(window, 12, 15) == []
    for start in range(15, 15 + 3 * MAX_ROWS, 64):
        window.append(start, rows_of(start, 64))
    assert window.end - window.start == MAX_ROWS


def test_rows_of_another_width_begin_anew() -> None:
    window = HiddenStates()
    window.append(3, rows_of(3, 4))
    window.append(7, rows_of(7, 2, width=6))
    assert (window.start, window.end) == (7, 9)


def test_columns_are_found_in_any_order() -> None:
    rows = np.arange(8, dtype=np.float32)[None]
    assert columns_of((4, -1), (2, 4, -1, 6), 2) == slice(2, 6)
    assert rows[:, columns_of((-1, 2), (2, 4, -1, 6), 2)].tolist() == [[4, 5, 0, 1]]
    assert columns_of((-1, 2), (-1, 2), 2) is None


def test_rows_are_fetched_once_and_before_the_next_pass() -> None:
    fetched: list[list[int]] = []
    buffer = torch.arange(10, dtype=torch.float32)[:, None]

    def fetch(rows: list[int]) -> np.ndarray:
        fetched.append(rows)
        return buffer[rows].numpy()

    window, other = HiddenStates(), HiddenStates()
    of_pass = PassHiddenStates([2, 3, 5, 7], buffer, fetch)
    window.append(4, HiddenSlice(of_pass, 0, 2))
    other.append(9, HiddenSlice(of_pass, 2, 4))
    window.forget_before(6)
    window.fetch()
    assert not fetched, "what was sent is not fetched"
    other.fetch()
    of_pass.retire()
    buffer.zero_()
    assert fetched == [[2, 3, 5, 7]] and sent(other, 9, 11) == [5, 7]
    late = PassHiddenStates([0], buffer, fetch)
    late.retire()
    with pytest.raises(AssertionError, match="nobody fetched in time"):
        HiddenSlice(late, 0, 1).values()


def test_rows_of_one_array_are_joined_without_a_copy() -> None:
    step = np.arange(24, dtype=np.float32).reshape(8, 3).copy()
    view = joined([step[1:3][:], step[3:4], step[4:7][:, 0:3]])
    assert np.shares_memory(view, step)
    assert np.array_equal(view, step[1:7])


def test_rows_that_do_not_lie_one_after_the_other_are_copied() -> None:
    step = np.arange(24, dtype=np.float32).reshape(8, 3).copy()
    other = step + 100
    for parts in (
        [step[0:2], step[3:5]],
        [step[2:4], step[0:2]],
        [step[0:2], other[2:4]],
        [step[0:2, 1:3], step[2:4, 1:3]],
        [other],
    ):
        found = joined(parts)
        assert not np.shares_memory(found, step)
        assert np.array_equal(found, np.concatenate(parts))
