"""StopMatcher finds the same as str.find on the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.stop import StopMatcher

ALPHABET = st.sampled_from("ab\nc")
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=12)
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def first_completed(text: str, stops: list[str], completed_after: int = 0) -> tuple[int, str] | None:
    """Return start and string of the match that ends first (then the longest) after the bound."""
    for end in range(completed_after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def run(matcher: StopMatcher, pieces: list[str], honour_from: int = 0) -> tuple[str, list[str]]:
    """Return the whole shown text, and the text shown after each piece."""
    shown, history = "", []
    for number, piece in enumerate(pieces):
        shown += matcher.feed(piece, honour=number >= honour_from)
        history.append(shown)
        if matcher.matched is not None:
            return shown, history
    return shown + matcher.flush(), history


@given(STOPS, PIECES)
@example(["aab"], ["a", "aa", "ab"])
@example(["b", "abc"], ["ab"])
@example(["abab", "ba"], ["aba", "b"])
def test_text_ends_where_the_first_stop_string_begins(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = first_completed(text, stops)
    matcher = StopMatcher(stops)
    shown, _ = run(matcher, pieces)
    if expected is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        assert (shown, matcher.matched) == (text[: expected[0]], expected[1])


@given(STOPS, PIECES)
def test_included_stop_string_ends_the_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = first_completed(text, stops)
    shown, _ = run(StopMatcher(stops, include_stop=True), pieces)
    assert shown == (text if expected is None else text[: expected[0] + len(expected[1])])


@given(STOPS, PIECES)
def test_only_beginnings_of_stop_strings_are_held_back(stops: list[str], pieces: list[str]) -> None:
    _, history = run(StopMatcher(stops), pieces)
    for number, shown in enumerate(history[:-1]):
        held = "".join(pieces[: number + 1])[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(STOPS, PIECES, st.integers(0, 12))
@example(["b", "abc"], ["ab", "x"], 1)
@example(["ab"], ["a", "b"], 1)
def test_stop_strings_completed_too_early_do_not_count(stops: list[str], pieces: list[str], honour_from: int) -> None:
    text, ignored = "".join(pieces), "".join(pieces[:honour_from])
    expected = first_completed(text, stops, len(ignored))
    if expected is not None and expected[0] < len(ignored):
        # Shown text cannot be taken back: only a held part may still be trimmed.
        held = next(
            (k for k in range(len(ignored), 0, -1) if any(s.startswith(ignored[-k:]) and len(s) > k for s in stops)), 0
        )
        assert len(ignored) - expected[0] <= held
    matcher = StopMatcher(stops)
    shown, _ = run(matcher, pieces, honour_from)
    assert (shown, matcher.matched) == ((text, None) if expected is None else (text[: expected[0]], expected[1]))


@pytest.mark.parametrize(
    ("piece", "shown"), [("xyz", "xyz"), ("xs", "x"), ("sto", ""), ("stst", "st"), ("xstop y", "x")]
)
def test_hold_back_by_hand(piece: str, shown: str) -> None:
    assert StopMatcher(["stop"]).feed(piece) == shown
