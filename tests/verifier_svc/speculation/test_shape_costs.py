"""Seconds of steps by shape and batch, learned from steps that prompts and other work disturb."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.speculation.candidate_shapes import chain
from verifier_svc.speculation.shape_costs import ShapeCosts

PASS_S = 0.005


def costs() -> ShapeCosts:
    return ShapeCosts(lambda num_rows: PASS_S if num_rows <= 512 else math.inf)


def test_before_any_step_a_level_costs_something() -> None:
    known = costs()
    assert known.estimate(NO_DRAFT, 8) == PASS_S
    assert PASS_S < known.estimate(chain(1), 8) < known.estimate(chain(3), 8)


def test_other_depths_follow_from_two() -> None:
    known = costs()
    for depth in (1, 3):
        for _ in range(20):
            known.observe(chain(depth), 8, PASS_S + 0.001 * (1 + depth), 0)
    assert known.estimate(chain(5), 8) == pytest.approx(PASS_S + 0.006, rel=0.03)
    assert known.estimate(chain(3), 12) == pytest.approx(PASS_S + 0.004, rel=0.03), "the batch is not far"


def test_what_plain_decode_takes_too_is_no_level() -> None:
    """Longer contexts than the measured pass had, say: a
    deeper chain costs only its levels more.
    """
    known = costs()
    for _ in range(20):
        known.observe(NO_DRAFT, 8, PASS_S + 0.003, 0)
    for _ in range(20):
        known.observe(chain(1), 8, PASS_S + 0.003 + 2 * 0.0003, 0)
    assert known.estimate(chain(5), 8) == pytest.approx(PASS_S + 0.003 + 6 * 0.0003, rel=0.05)


def test_what_slows_all_shapes_down_makes_none_look_better() -> None:
    """The contexts grow while one chain is in use; the other was measured before."""
    known = costs()
    for depth in (3, 1, 3, 1):
        for _ in range(30):
            known.observe(chain(depth), 8, PASS_S + 0.0004 * (1 + depth), 0)
    for step in range(300):
        known.observe(chain(1), 8, PASS_S + 0.00001 * step + 2 * 0.0004, 0)
    difference = known.estimate(chain(3), 8) - known.estimate(chain(1), 8)
    assert difference == pytest.approx(2 * 0.0004, abs=0.0004)


def test_a_shape_may_differ_from_the_line_of_the_others() -> None:
    known = costs()
    for _ in range(10):
        for depth in (1, 2, 3):
            for _ in range(12):
                known.observe(chain(depth), 8, PASS_S + 0.0004 * (1 + depth) + (0.0006 if depth == 2 else 0.0), 0)
    assert known.estimate(chain(2), 8) == pytest.approx(PASS_S + 3 * 0.0004 + 0.0006, rel=0.03)
    assert known.estimate(chain(3), 8) == pytest.approx(PASS_S + 4 * 0.0004, rel=0.05)


def test_one_chain_alone_does_not_make_deep_ones_dear() -> None:
    known = costs()
    for _ in range(20):
        known.observe(chain(1), 8, PASS_S + 0.004, 0)
    assert PASS_S + 0.004 < known.estimate(chain(5), 8) < PASS_S + 0.011


def test_a_tree_that_ran_alone_does_not_make_others_dear() -> None:
    """Its drafts have more rows than a chain's, which take more of the step than its levels do."""
    row_s = PASS_S / 256
    known = ShapeCosts(lambda num_rows: max(PASS_S, row_s * num_rows))
    tree = Shape(16, 7, 4)
    more_rows = 16 * 6 * 3
    tree_s = PASS_S + 8 * 0.0002 + 0.1 * row_s * more_rows
    for _ in range(50):
        known.observe(tree, 16, tree_s, 0)
    assert known.estimate(tree, 16) == pytest.approx(tree_s, rel=0.02)
    assert known.estimate(chain(7), 16) == pytest.approx(PASS_S + 8 * 0.0002, rel=0.03)


def test_slow_first_steps_do_not_make_levels_free() -> None:
    """A short chain's steps were slow at first, and a deep one's were not: levels came out below zero."""
    known = costs()
    for seconds in (0.012, 0.01, 0.009):
        known.observe(chain(4), 16, seconds, 0)
    for _ in range(30):
        known.observe(chain(7), 16, 0.007, 0)
    assert known.estimate(chain(7), 16) == pytest.approx(0.007, rel=0.02), "what was measured holds"
    assert known.estimate(chain(3), 16) <= known.estimate(chain(7), 16) - 4 * 0.01 * PASS_S


def test_one_disturbed_step_moves_little_and_many_are_believed() -> None:
    known = costs()
    for seconds in (0.006, 0.006, 0.1, 0.006, 0.006, 0.006, 0.006):
        known.observe(chain(1), 8, seconds, 0)
    known.observe(chain(1), 8, 0.1, 0)
    assert known.estimate(chain(1), 8) == pytest.approx(0.006, rel=0.15)
    for _ in range(40):
        known.observe(chain(1), 8, 0.024, 0)
    assert known.estimate(chain(1), 8) == pytest.approx(0.024, rel=0.15)


def test_the_first_step_of_another_shape_is_left_out() -> None:
    known = costs()
    known.observe(chain(1), 8, 0.5, 0)
    assert known.weight(chain(1), 8) == 0


def test_prompts_are_taken_off() -> None:
    known = costs()
    rng = np.random.default_rng(1)
    for _ in range(500):
        num_prompt_tokens = int(rng.integers(100, 900))
        known.observe(chain(2), 8, 0.008 + 30e-6 * num_prompt_tokens, num_prompt_tokens)
    assert known.prompt_s(500) == pytest.approx(0.015, rel=0.1)
    assert known.estimate(chain(2), 8) == pytest.approx(0.008, rel=0.15)


def test_what_cannot_run_takes_for_ever() -> None:
    known = costs()
    known.observe(chain(1), 512, 0.01, 0)
    known.observe(chain(1), 512, 0.01, 0)
    assert known.estimate(chain(1), 512) == math.inf


@pytest.mark.parametrize("pause_s", [0.2, 2.0, 30.0])
def test_pauses_in_a_row_leave_an_estimate(pause_s: float) -> None:
    """As where a GPU is shared with a drafter that crashes again
    and again: each pause is a reason to doubt.
    """
    known = costs()
    for _ in range(50):
        for seconds in (*[pause_s, 0.02] * 4, *[0.006] * 40):
            known.observe(chain(3), 1, seconds, 0)
        assert known.estimate(chain(3), 1) == pytest.approx(0.006, rel=0.1)
    known.observe(NO_DRAFT, 1, 0.0055, 0)
    for _ in range(40):
        known.observe(NO_DRAFT, 1, 0.0055, 0)
    assert known.estimate(NO_DRAFT, 1) == pytest.approx(0.0055, rel=0.1)
    assert known.estimate(chain(3), 1) == pytest.approx(0.006, rel=0.2)
