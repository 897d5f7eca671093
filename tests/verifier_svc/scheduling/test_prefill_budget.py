"""The prompt tokens of a step, on machines whose costs the tests set."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from verifier_svc.scheduling.prefill_budget import LEAST_PART, LEAST_SHARE, LEAST_TOKENS, PrefillBudget

# An 8B model on an H200: a pass reads the weights, or computes its rows if that takes longer.
MOST, LIMIT = 2048, 0.060
TOKEN_S, SMALLEST_S = 18e-6, 3.8e-3
# Seconds of a step of 64 and of 256 sequences with drafts, without prompts.
STEP_64, STEP_256 = 0.012, 0.027


def budget(limit_s: float = LIMIT, most: int = MOST) -> PrefillBudget:
    return PrefillBudget(most, limit_s=limit_s, token_s=TOKEN_S, smallest_s=SMALLEST_S)


def run(
    of: PrefillBudget, step_s: float, prompts_s: Callable[[int, int], float], num_steps: int
) -> list[tuple[int, float]]:
    """Make steps that compute as many prompt tokens as they may.

    ``prompts_s``: seconds by tokens and number of the step. Returns tokens and seconds of each.
    """
    made = []
    for number in range(num_steps):
        tokens = of.tokens(step_s)
        seconds = step_s + prompts_s(tokens, number)
        of.observe(tokens, seconds, step_s)
        made.append((tokens, seconds))
    return made


def test_without_a_limit_every_step_has_room_for_the_most() -> None:
    of = PrefillBudget(MOST, token_s=TOKEN_S, smallest_s=SMALLEST_S)
    of.observe(MOST, 60.0, STEP_64)
    assert {of.tokens(step_s) for step_s in (0.0, 0.01, 0.5)} == {MOST}


def test_a_prompt_has_all_of_the_chunk_while_nobody_decodes() -> None:
    of = budget(0.005)
    assert of.tokens(0.0) == MOST > of.tokens(1e-4)
    assert of.tokens(0.0) == MOST


@pytest.mark.parametrize(("step_s", "expected"), [(STEP_64, 2048), (STEP_256, 1792), (0.040, 1024), (0.045, 832)])
def test_at_first_prompts_take_what_they_took_at_start(step_s: float, expected: int) -> None:
    """E.g. 60 - 27 ms are 1,833 tokens of 18 us, rounded to one of eight sizes an octave."""
    assert budget().tokens(step_s) == expected


@pytest.mark.parametrize("token_s", [10e-6, 18e-6, 36e-6, 90e-6])
@pytest.mark.parametrize("step_s", [STEP_64, STEP_256])
def test_steps_come_under_the_limit_and_use_it(token_s: float, step_s: float) -> None:
    """Whatever a prompt token takes in service, a few steps teach it."""
    for tokens, seconds in run(budget(), step_s, lambda tokens, _: token_s * tokens, 40)[6:]:
        assert seconds <= 1.01 * LIMIT
        assert tokens == MOST or seconds > 0.85 * LIMIT


def test_noise_and_single_disturbed_steps_change_little() -> None:
    draw = random.Random(3)

    def prompts_s(tokens: int, number: int) -> float:
        disturbance = 8 if number % 10 == 9 else 1
        return 36e-6 * tokens * draw.lognormvariate(0.0, 0.1) * disturbance

    made = run(budget(), STEP_256, prompts_s, 300)[20:]
    usual = [seconds for number, (_, seconds) in enumerate(made) if number % 10 != 9]
    assert sum(seconds > 1.15 * LIMIT for seconds in usual) < 0.05 * len(usual)
    assert sum(usual) / len(usual) > 0.85 * LIMIT
    assert min(tokens for tokens, _ in made) > 600


def test_it_follows_prompts_that_become_dearer_and_cheaper() -> None:
    """Contexts grow, so attention takes longer; then short prompts come again."""

    def prompts_s(tokens: int, number: int) -> float:
        return TOKEN_S * tokens * (1 + min(number, 100) / 25 if number < 200 else 1)

    made = run(budget(), STEP_64, prompts_s, 260)
    assert max(seconds for _, seconds in made) < 1.2 * LIMIT
    assert made[150][0] < 600 and made[-1][0] == MOST


def test_a_machine_that_was_busy_at_start_is_found_out() -> None:
    """Its passes were timed as ten times as long."""
    of = PrefillBudget(MOST, limit_s=LIMIT, token_s=10 * TOKEN_S, smallest_s=10 * SMALLEST_S)
    assert of.tokens(STEP_256) < 256
    assert run(of, STEP_256, lambda tokens, _: TOKEN_S * tokens, 20)[-1][1] > 0.85 * LIMIT


def test_a_step_that_takes_longer_than_expected_has_less_room() -> None:
    """What it takes without prompts is an estimate.

    Whatever it lacks counts as the prompts' time.
    """
    made = run(budget(), STEP_64, lambda tokens, _: 0.015 + TOKEN_S * tokens, 40)
    assert made[0][1] > 1.02 * LIMIT
    assert all(0.85 * LIMIT < seconds < 1.02 * LIMIT for _, seconds in made[10:])


def test_a_pass_is_worth_its_weights() -> None:
    """A pass over 212 tokens or fewer takes 3.8 ms. So does one prompt of 20, which is no news."""
    of = budget()
    assert of.least_tokens == 212 == budget(0.001).tokens(1e-4)
    for _ in range(9):
        of.observe(20, STEP_64 + SMALLEST_S, STEP_64)
    assert of.factor == pytest.approx(1, rel=0.01)


def test_the_least_is_a_part_of_the_chunk() -> None:
    """So a prompt takes a bounded number of steps, even
    on a machine that computes row after row.
    """
    assert PrefillBudget(512, limit_s=LIMIT, token_s=1e-3, smallest_s=2e-3).least_tokens == 512 // LEAST_PART
    assert PrefillBudget(64, limit_s=LIMIT, token_s=1e-3, smallest_s=2e-3).least_tokens == LEAST_TOKENS
    assert budget(most=10).least_tokens == 10 == budget(most=10).tokens(STEP_64)


def test_prompts_keep_a_share_where_decoding_alone_exceeds_the_limit() -> None:
    for step_s in (0.06, 0.1, 0.4):
        tokens = budget().tokens(step_s)
        assert TOKEN_S * tokens <= LEAST_SHARE * step_s
        assert tokens == MOST or TOKEN_S * tokens > 0.8 * LEAST_SHARE * step_s


def test_there_is_always_progress() -> None:
    draw = random.Random(5)
    of = budget()
    for _ in range(500):
        step_s = draw.choice([0.0, 1e-4, 0.01, 0.06, 3.0])
        tokens = of.tokens(step_s)
        assert of.least_tokens <= tokens <= MOST
        of.observe(tokens, draw.choice([0.0, 1e-4, 0.05, 60.0]), step_s)


def test_there_are_few_sizes() -> None:
    """On a GPU each size of a pass has a graph."""
    sizes = {budget().tokens(tenths / 1e4) for tenths in range(1, 600)} - {budget().least_tokens}
    assert 8 < len(sizes) <= 8 * 3 + 1
    assert all(size % (1 << (size.bit_length() - 4)) == 0 for size in sizes)


def test_few_tokens_in_a_steps_own_pass_teach_nothing() -> None:
    """They take next to no time, or what disturbed the step."""
    for seconds in (STEP_64, STEP_64 + 0.01):
        of = budget()
        for _ in range(20):
            of.observe(12, seconds, STEP_64, has_joined=True)
        assert of.factor == 1.0
    of = budget()
    for _ in range(20):
        of.observe(MOST, STEP_64 + 2 * MOST * TOKEN_S, STEP_64, has_joined=True)
    assert of.factor == pytest.approx(2.0)
