"""What is tried, and which candidate is chosen for all loads."""

from __future__ import annotations

import pytest

from foretoken.tune.candidates import (
    AUTO,
    DEFAULT_SHAPES,
    PLAIN,
    Candidate,
    ShapeFlags,
    TunedDrafter,
    bounds_of,
    candidates,
    parse_shape,
)
from foretoken.tune.choice import best_of, choose, score_of
from verifier_svc.drafters.request import NO_DRAFT, TreeBounds
from verifier_svc.speculation.candidate_shapes import candidate_shapes

DRAFTERS = [TunedDrafter("eagle3", has_model=True), TunedDrafter("ngram", has_model=False)]
CHAIN = Candidate("eagle3 3-1-4", ("eagle3",), ShapeFlags(3, 1, 4))
TREE = Candidate("eagle3 7-8-32", ("eagle3",), ShapeFlags(7, 8, 32))
EQUAL = {1: 1.0, 16: 1.0}


def test_the_default_shapes_are_those_that_the_controller_has() -> None:
    shapes = [shape for shape in candidate_shapes(TreeBounds(32, branches=8)) if shape != NO_DRAFT and not shape.budget]
    assert [(shape.depth, shape.branches, shape.nodes) for shape in shapes] == list(map(tuple, DEFAULT_SHAPES))


def test_candidates_are_plain_decode_auto_and_each_drafter() -> None:
    found = candidates(DRAFTERS, (), [ShapeFlags(3, 1, 4), ShapeFlags(5, 2, 8)])
    assert [each.name for each in found] == ["plain", "auto", "eagle3 3-1-4", "eagle3 5-2-8", "ngram"]
    assert [each.speculative for each in found] == [
        {"enabled": False},
        {"drafter": "auto"},
        {"drafter": "eagle3", "shape": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}},
        {"drafter": "eagle3", "shape": {"num_steps": 5, "topk": 2, "num_draft_tokens": 8}},
        {"drafter": "ngram"},
    ]


def test_drafters_may_draft_together() -> None:
    found = candidates(DRAFTERS, ("eagle3+ngram",), [ShapeFlags(3, 1, 4)])
    assert [each.name for each in found] == ["plain", "auto", "eagle3+ngram 3-1-4"]
    assert found[2].speculative["drafter"] == "eagle3+ngram" and found[2].drafters == ("eagle3", "ngram")
    with pytest.raises(ValueError, match="there is no drafter mtp; available: eagle3, ngram"):
        candidates(DRAFTERS, ("eagle3", "mtp"), DEFAULT_SHAPES)


def test_without_a_drafter_there_is_plain_decode_only() -> None:
    assert candidates([], (), DEFAULT_SHAPES) == [PLAIN]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3-1", "expected LEVELS-CHILDREN-NODES such as 3-1-4, got '3-1'"),
        ("3-a-4", "expected LEVELS-CHILDREN-NODES"),
        ("0-1-2", "num_steps must be in"),
        ("5-2-5", "a path of 5 levels has 6 nodes with the root"),
        ("3-1-8", "a chain of 3 levels has 4 nodes with the root"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_a_shape_is_written_as_it_is_read() -> None:
    assert [parse_shape(shape.name) for shape in DEFAULT_SHAPES] == list(DEFAULT_SHAPES)
    assert bounds_of(DEFAULT_SHAPES, ShapeFlags(1, 1, 2)) == (7, 8, 32)
    assert bounds_of([ShapeFlags(1, 1, 2)], ShapeFlags(1, 4, 8)) == (1, 4, 8)


def test_the_best_of_one_load_is_the_fastest_but_for_a_percent() -> None:
    assert best_of({PLAIN: 100.0, AUTO: 150.0, CHAIN: 160.0}) == CHAIN
    assert best_of({PLAIN: 100.0, AUTO: 159.0, CHAIN: 160.0}) == AUTO
    assert best_of({PLAIN: 159.0, AUTO: 160.0, CHAIN: 160.0}) == PLAIN


def test_one_setting_for_all_has_the_best_mean_share() -> None:
    rates = {1: {PLAIN: 100.0, CHAIN: 150.0, TREE: 200.0}, 16: {PLAIN: 800.0, CHAIN: 1000.0, TREE: 400.0}}
    choice = choose(rates, EQUAL)
    assert (choice.candidate, choice.max_batch_size) == (TREE, 1)
    # (1 x 0.8) ** 0.5: the tree up to 1, plain decode above, over the best of each.
    assert choice.score == pytest.approx(0.8**0.5)
    assert choice.name == "eagle3 7-8-32, plain above 1 at once"
    # (0.75 x 1) ** 0.5
    assert score_of(CHAIN, rates, EQUAL) == pytest.approx(0.75**0.5)


def test_weights_say_which_load_counts() -> None:
    rates = {1: {PLAIN: 100.0, CHAIN: 150.0, TREE: 200.0}, 16: {PLAIN: 800.0, CHAIN: 1000.0, TREE: 400.0}}
    assert choose(rates, {1: 1.0, 16: 9.0}).candidate == CHAIN
    assert choose(rates, {1: 9.0, 16: 1.0}).candidate == TREE


def test_what_is_simpler_wins_a_near_tie() -> None:
    rates = {1: {PLAIN: 100.0, AUTO: 198.0, CHAIN: 200.0}, 16: {PLAIN: 700.0, AUTO: 995.0, CHAIN: 1000.0}}
    assert choose(rates, EQUAL).candidate == AUTO
    assert choose({1: {PLAIN: 100.0, AUTO: 90.0, CHAIN: 80.0}}, {1: 1.0}).candidate == PLAIN


def test_what_was_not_measured_everywhere_is_not_chosen() -> None:
    rates = {1: {PLAIN: 100.0, CHAIN: 500.0}, 16: {PLAIN: 800.0}}
    choice = choose(rates, EQUAL)
    # At 16 at once plain decode was measured, and the choice decodes plainly there.
    assert (choice.candidate, choice.max_batch_size) == (CHAIN, 1)
    assert score_of(CHAIN, rates, EQUAL) == 0.0
