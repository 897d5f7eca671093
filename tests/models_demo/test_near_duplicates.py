"""Shingles, signatures and the index on literal texts."""

from __future__ import annotations

import numpy as np
import pytest

from models.demo.near_duplicates import NearDuplicateIndex, content_hash, share_inside, shingles, signature

WORDS = [f"word{index}" for index in range(400)]
TEXT = " ".join(WORDS)


def test_white_space_does_not_change_shingles() -> None:
    assert np.array_equal(shingles("a = b + c - d"), shingles("a=b\n   +c - d"))


def test_shingles_count_windows_of_six_tokens() -> None:
    assert len(shingles("a b c d e")) == 0
    assert len(shingles("a b c d e f")) == 1
    assert len(shingles("a b c d e f g h")) == 3
    assert len(shingles("a a a a a a a a a")) == 1


def test_share_inside() -> None:
    reference = shingles("a b c d e f g h")
    assert share_inside(shingles("a b c d e f g h"), reference) == 1.0
    assert share_inside(shingles("b c d e f g X"), reference) == pytest.approx(0.5)
    assert share_inside(shingles(""), reference) == 0.0


@pytest.mark.parametrize(
    ("other", "low", "high"),
    [
        (TEXT, 1.0, 1.0),
        (" ".join([*WORDS[:395], *["a", "b", "c", "d", "e"]]), 0.85, 1.0),
        (" ".join(WORDS[:200] + [f"other{index}" for index in range(200)]), 0.0, 0.6),
        (" ".join(f"other{index}" for index in range(400)), 0.0, 0.05),
    ],
)
def test_similarity_of_literal_texts(other: str, low: float, high: float) -> None:
    index = NearDuplicateIndex()
    index.add(signature(shingles(TEXT)))
    assert low <= index.highest_similarity(signature(shingles(other))) <= high


def test_an_empty_index_finds_nothing() -> None:
    assert NearDuplicateIndex().highest_similarity(signature(shingles(TEXT))) == 0.0


def test_content_hash_ignores_comments_and_blank_lines_only() -> None:
    assert content_hash("# licence\n\nx = 1  \n") == content_hash("x = 1\n")
    assert content_hash("x = 1\n") != content_hash("x = 2\n")
