"""Tokens a step of each shape, from walks."""

from __future__ import annotations

import pytest

from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.speculation.candidate_shapes import chain
from verifier_svc.speculation.path_acceptance import PathAcceptance

TREE = Shape(16, 3, 4)


def test_at_first_drafts_are_believed_to_be_good() -> None:
    known = PathAcceptance(3)
    assert known.tokens(NO_DRAFT) == 1.0
    assert 2.5 < known.tokens(chain(3)) < known.tokens(TREE) < 4.0


def test_levels_are_counted_one_by_one() -> None:
    known = PathAcceptance(3)
    for _ in range(200):
        known.observe(chain(3), {(0, 3): 2, (1, 3): 4, (3, 3): 4}, 1, 10)
    assert known.chances(chain(3)) == pytest.approx([0.8, 0.5, 1.0], abs=0.02)
    assert known.tokens(chain(2)) == pytest.approx(1 + 0.8 + 0.4, abs=0.03)


def test_a_draft_that_ended_says_nothing_of_the_next_level() -> None:
    known = PathAcceptance(3)
    for _ in range(200):
        known.observe(chain(1), {(1, 1): 7, (0, 1): 3}, 1, 10)
    assert known.chances(chain(3)) == pytest.approx([0.7, 0.7, 0.7], abs=0.02)


def test_a_tree_misses_less_until_it_is_measured() -> None:
    known = PathAcceptance(3)
    for _ in range(200):
        known.observe(chain(3), {(0, 3): 5, (3, 3): 5}, 1, 10)
    assert known.tokens(TREE) > known.tokens(chain(3))
    for _ in range(100):
        known.observe(TREE, {(0, 3): 6, (3, 3): 4}, 1, 10)
    assert known.chances(TREE)[0] == pytest.approx(0.4, abs=0.02)
    assert known.tokens(TREE) <= known.tokens(chain(3))


def test_a_few_walks_are_enough_after_a_pause() -> None:
    known = PathAcceptance(3)
    for _ in range(300):
        known.observe(chain(1), {(0, 1): 1}, 1, 1)
    known.pass_steps(1000, set())
    assert known.chances(chain(1))[0] < 0.05, "what was learned holds"
    known.observe(chain(1), {(1, 1): 12}, 12, 1)
    assert known.chances(chain(1))[0] > 0.6


@pytest.mark.parametrize("num_before", [40, 5000])
def test_many_steps_between_two_decisions_weigh_no_more_than_the_memory_holds(num_before: int) -> None:
    """While all requests ask for one shape nothing is decided, and their texts may differ."""
    known = PathAcceptance(3)
    known.observe(chain(3), {(3, 3): 16 * num_before}, num_before, 16)
    assert known.chances(chain(3))[0] > 0.97
    for _ in range(12):
        known.observe(chain(3), {(0, 3): 16 * 8}, 8, 16)
    assert known.chances(chain(3))[0] < 0.1


def test_what_is_verified_says_more_than_what_was() -> None:
    """Chains drafted the beginnings of texts; the tree drafts what follows, which is easier."""
    known = PathAcceptance(3)
    for _ in range(8):
        known.observe(chain(3), {(0, 3): 8, (1, 3): 4, (3, 3): 4}, 1, 16)
    for _ in range(400):
        known.pass_steps(1, {TREE})
        known.observe(TREE, {(0, 3): 1, (3, 3): 15}, 1, 16)
    # The tree's usual share: a chain misses twice as often.
    assert known.chances(chain(3))[0] > 0.8


@pytest.mark.parametrize(("num_steps", "is_believed"), [(4, False), (200, True)])
def test_a_shape_is_held_against_one_that_had_steps_enough(num_steps: int, is_believed: bool) -> None:
    """Four steps are of one text, whose beginning may have been hard."""
    known = PathAcceptance(3)
    known.observe(chain(3), {(0, 3): 8 * num_steps, (3, 3): 8 * num_steps}, num_steps, 16)
    for _ in range(100):
        known.observe(TREE, {(0, 3): 1, (3, 3): 15}, 1, 16)
    # So the tree's share of the chain's misses is learned.
    known.observe(chain(3), {(3, 3): 1}, 1, 16)
    for _ in range(100):
        known.observe(chain(3), {(0, 3): 3, (3, 3): 13}, 1, 16)
    known.pass_steps(2000, {chain(3)})
    share = (1 - known.chances(TREE)[0]) / (1 - known.chances(chain(3))[0])
    usual = (3 / 15) ** 0.5
    assert (share < 0.7 * usual) == is_believed


def test_a_chain_with_a_budget_is_between_equal_rows_and_its_rows_until_it_is_measured() -> None:
    known = PathAcceptance(7)
    shared = Shape(6, 5, 1, 4)
    for chance in (9, 6, 3):
        for _ in range(200):
            known.observe(chain(1), {(1, 1): chance, (0, 1): 10 - chance}, 1, 10)
        assert known.tokens(chain(3)) <= known.tokens(shared) <= min(known.tokens(chain(5)), 4.0)
    for _ in range(100):
        known.observe(shared, {(5, 5): 4, (3, 5): 4, (0, 5): 2}, 1, 10)
    assert known.tokens(shared) == pytest.approx(4.0, abs=0.05)
