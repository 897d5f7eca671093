"""The logit operations and their order: literal rows; the compiled sampler equals the reference.

Every distribution is compared with probabilities enumerated here by hand formulas, not with the
code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from foretoken.errors import ModelOutputError
from foretoken.noise import gumbel_noise
from foretoken.sampling import SamplingParams, stop_token_ids
from tests.references import logits as ops
from verifier_svc.sampling.verify import SamplingState

NEVER = float("-inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt_ids: tuple[int, ...] = (0,),
    output_ids: tuple[int, ...] = (),
    eos_ids: frozenset[int] = frozenset(),
    choice_index: int = 0,
    vocab_limit: int | None = None,
) -> int:
    """Run the compiled sampler with the reference's arguments."""
    state = SamplingState(
        params, prompt_ids, output_ids, eos_ids=eos_ids, choice_index=choice_index, vocab_limit=vocab_limit
    )
    token = state.sample(logits, len(prompt_ids) + len(output_ids))
    assert (token is None) == isinstance(state.error, ModelOutputError)
    return ops.NO_SAMPLE if token is None else token


# --- Literal rows: what each operation of the reference does.


def test_logit_bias_is_added():
    assert ops.add_logit_bias(row(1, 2, 3), {0: 0.5, 2: -4.0}).tolist() == [1.5, 2, -1]


def test_repetition_penalty_shrinks_towards_unlikely_over_prompt_and_output():
    params = SamplingParams(repetition_penalty=2.0)
    assert ops.penalize(row(4, -4, 4, 4), params, prompt_ids=[0, 1, 0], output_ids=[2, 2]).tolist() == [2, -8, 2, 4]


def test_frequency_and_presence_penalties_count_the_output_only():
    params = SamplingParams(frequency_penalty=0.25, presence_penalty=1.0)
    assert ops.penalize(row(4, 4, 4), params, prompt_ids=[0, 0], output_ids=[1, 1, 1]).tolist() == [4, 2.25, 4]


def test_repetition_comes_before_frequency_and_presence():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert ops.penalize(row(4, 0), params, prompt_ids=[], output_ids=[0]).tolist() == [1, 0]


def test_top_k_keeps_all_that_equal_the_kth():
    assert ops.keep_top_k(row(1, 3, 2, 2, 0), 2).tolist() == [NEVER, 3, 2, 2, NEVER]
    assert ops.keep_top_k(row(1, 3), 0).tolist() == ops.keep_top_k(row(1, 3), 5).tolist() == [1, 3]


def test_top_p_keeps_the_shortest_run_and_of_equal_tokens_the_lower_id():
    quarters = row(0, 0, 0, 0)
    assert ops.keep_top_p(quarters, 0.5).tolist() == [0, 0, NEVER, NEVER]
    assert ops.keep_top_p(quarters, 0.51).tolist() == [0, 0, 0, NEVER]
    assert ops.keep_top_p(row(0, 5, 0), 1e-9).tolist() == [NEVER, 5, NEVER], "at least one is kept"
    assert ops.keep_top_p(quarters, 1.0) is quarters


def test_min_p_is_a_share_of_the_best_tokens_probability():
    logits = np.log(row(0.5, 0.25, 0.2, 0.05))
    assert np.isfinite(ops.keep_min_p(logits, 0.45)).tolist() == [True, True, False, False]


def test_min_tokens_masks_eos_and_stop_ids_until_enough_are_out():
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    logits = row(0, 1, 2, 3)
    expected = {0: 1, 1: 1, 2: 3, 3: 3}
    for num_output, token in expected.items():
        output = (0,) * num_output
        arguments = {"prompt_ids": (0,), "output_ids": output, "eos_ids": frozenset({2})}
        assert ops.sample_reference(logits, params, **arguments) == sample(logits, params, **arguments) == token


def test_ignored_eos_is_an_ordinary_token_but_stop_ids_are_not():
    params = SamplingParams(stop_token_ids=(3,), ignore_eos=True)
    assert stop_token_ids(params, frozenset({2})) == {3}
    assert stop_token_ids(replace(params, ignore_eos=False), frozenset({2})) == {2, 3}


def test_ids_beyond_the_tokenizer_are_never_sampled():
    greedy = SamplingParams(temperature=0.0)
    assert sample(row(1, 2, 9, 9), greedy, vocab_limit=2) == 1
    assert ops.sample_reference(row(1, 2, 9, 9), greedy, prompt_ids=(0,), output_ids=(), vocab_limit=2) == 1
    drawn = {sample(row(1, 2, 9, 9), SamplingParams(seed=seed), vocab_limit=2) for seed in range(100)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    "logits, token",
    [
        (row(1, 3, 3), 1),
        (row(NEVER, NEVER, -1), 2),
    ],
)
def test_greedy_takes_the_lowest_id_of_the_best(logits, token):
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, greedy) == token
    assert sample(logits, replace(greedy, logit_bias={0: 0.0})) == token, "also off the fast path"
    assert ops.sample_reference(logits, greedy, prompt_ids=(0,), output_ids=()) == token


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5, "min_p": 0.1, "top_k": 2}])
@pytest.mark.parametrize("bias", [{}, {0: -100.0}])
@pytest.mark.parametrize(
    "logits, is_broken",
    [
        (row(float("nan"), -1, -2), True),
        (row(-1, -2, float("nan")), True),
        (row(float("inf"), -1, -2), True),
        (row(-1, float("inf"), float("inf")), True),
        (row(NEVER, NEVER, NEVER), True),
        (row(NEVER, -1, NEVER), False),
        (row(-1, -2, NEVER, float("nan")), False),
        (row(NEVER, NEVER, NEVER, 1), True),
    ],
)
def test_a_row_with_nan_or_infinity_or_nothing_else_gives_no_token(logits, is_broken, options, bias):
    # A bias that forbids the token does not hide its logit; ids beyond
    # the tokenizer's do not count.
    params = SamplingParams(logit_bias=bias, **options)
    token = sample(logits, params, vocab_limit=3)
    assert token == ops.sample_reference(logits, params, prompt_ids=(0,), output_ids=(), vocab_limit=3)
    assert (token == ops.NO_SAMPLE) == is_broken


def test_greedy_ignores_seed_and_filters():
    logits = row(0.1, 0.2, 0.15)
    for seed in range(20):
        assert sample(logits, SamplingParams(temperature=0.0, seed=seed, top_k=1, top_p=0.1, min_p=0.9)) == 1
        assert sample(logits, SamplingParams(temperature=1e-6, seed=seed)) == 1, "too cold to divide by"


# --- Order: each case distinguishes two operations.


Operation = Callable[[np.ndarray], np.ndarray]


def operations(params: SamplingParams, output_ids: tuple[int, ...], eos_ids: frozenset[int]) -> dict[str, Operation]:
    """Return every operation of one row, in order, each from the reference."""
    position = 1 + len(output_ids)
    return {
        "bias": lambda r: ops.add_logit_bias(r, params.logit_bias),
        "penalties": lambda r: ops.penalize(r, params, (0,), output_ids),
        "min_tokens": lambda r: ops.mask_tokens(r, eos_ids if len(output_ids) < params.min_tokens else ()),
        "temperature": lambda r: r / np.float32(params.temperature),
        "top_k": lambda r: ops.keep_top_k(r, params.top_k),
        "top_p": lambda r: ops.keep_top_p(r, params.top_p),
        "min_p": lambda r: ops.keep_min_p(r, params.min_p),
        "noise": lambda r: r + gumbel_noise(params.seed, position, 0, np.arange(len(r))),
    }


QUARTET = np.log(row(0.4, 0.3, 0.2, 0.1))
BASE = SamplingParams()
SWAPS = {
    ("bias", "penalties"): (row(-9, 1, -1.75), replace(BASE, logit_bias={1: -2.0}, repetition_penalty=2.0), (1,)),
    ("bias", "temperature"): (QUARTET, replace(BASE, logit_bias={3: 1.5}, temperature=0.3), ()),
    ("bias", "top_k"): (QUARTET, replace(BASE, logit_bias={3: 5.0}, top_k=1), ()),
    ("penalties", "temperature"): (QUARTET, replace(BASE, presence_penalty=1.0, temperature=0.3), (0,)),
    ("penalties", "top_p"): (QUARTET, replace(BASE, presence_penalty=2.0, top_p=0.5), (0,)),
    ("min_tokens", "top_k"): (QUARTET, replace(BASE, min_tokens=5, top_k=1), ()),
    ("min_tokens", "top_p"): (QUARTET, replace(BASE, min_tokens=5, top_p=0.65), ()),
    ("temperature", "top_p"): (QUARTET, replace(BASE, temperature=2.0, top_p=0.7), ()),
    ("temperature", "min_p"): (QUARTET, replace(BASE, temperature=2.0, min_p=0.6), ()),
    ("temperature", "noise"): (QUARTET, replace(BASE, temperature=2.0), ()),
    ("top_k", "top_p"): (QUARTET, replace(BASE, top_k=3, top_p=0.75), ()),
    ("top_k", "noise"): (QUARTET, replace(BASE, top_k=2), ()),
    ("top_p", "min_p"): (QUARTET, replace(BASE, top_p=0.5, min_p=0.6), ()),
    ("top_p", "noise"): (QUARTET, replace(BASE, top_p=0.45), ()),
    ("min_p", "noise"): (QUARTET, replace(BASE, min_p=0.7), ()),
}


@pytest.mark.parametrize("first, second", SWAPS)
def test_swapping_two_operations_would_change_tokens(first, second):
    logits, params, output_ids = SWAPS[first, second]
    eos_ids = frozenset({0}) if params.min_tokens else frozenset()
    tokens, expected, swapped = [], [], []
    for seed in range(200):
        seeded = replace(params, seed=seed)
        steps = operations(seeded, output_ids, eos_ids)
        names = list(steps)
        i, j = names.index(first), names.index(second)
        for order, out in (
            (names, expected),
            ([*names[:i], second, *names[i + 1 : j], first, *names[j + 1 :]], swapped),
        ):
            current = logits
            for name in order:
                current = steps[name](current)
            out.append(int(np.argmax(current)))
        tokens.append(sample(logits, seeded, output_ids=output_ids, eos_ids=eos_ids))
        assert tokens[-1] == ops.sample_reference(
            logits, seeded, prompt_ids=(0,), output_ids=output_ids, eos_ids=eos_ids
        )
    assert tokens == expected
    assert tokens != swapped


# --- Chance: exact enumeration on a tiny vocabulary, fixed seeds.


PROBS = np.array([0.30, 0.25, 0.20, 0.15, 0.07, 0.03])
NUM_DRAWS = 4000


def only(probs: np.ndarray, *kept: int) -> np.ndarray:
    """Return the distribution with only these tokens."""
    out = np.zeros_like(probs)
    out[list(kept)] = probs[list(kept)]
    return out / out.sum()


def scaled(probs: np.ndarray, factors: dict[int, float]) -> np.ndarray:
    """Return the distribution with some odds multiplied."""
    out = probs.copy()
    for token, factor in factors.items():
        out[token] *= factor
    return out / out.sum()


E = np.e
# Logits are log(PROBS) + 1, with 1 and 2, 2 in the output, 0 in the prompt, and 4 as the end
# of sequence. All are negative, since E * p < 1, so a repetition penalty of 2 multiplies
# them: odds p become E * p * p.
ENUMERATED: dict[str, tuple[SamplingParams, np.ndarray]] = {
    "plain": (BASE, PROBS),
    "temperature": (replace(BASE, temperature=0.7), PROBS ** (1 / 0.7) / (PROBS ** (1 / 0.7)).sum()),
    "hot": (replace(BASE, temperature=2.0), PROBS**0.5 / (PROBS**0.5).sum()),
    "top_k": (replace(BASE, top_k=3), only(PROBS, 0, 1, 2)),
    "top_p": (replace(BASE, top_p=0.6), only(PROBS, 0, 1, 2)),
    "min_p": (replace(BASE, min_p=0.45), only(PROBS, 0, 1, 2, 3)),
    "logit_bias": (replace(BASE, logit_bias={5: 2.0, 0: -1.0}), scaled(PROBS, {5: E**2, 0: 1 / E})),
    "presence": (replace(BASE, presence_penalty=1.5), scaled(PROBS, {1: E**-1.5, 2: E**-1.5})),
    "frequency": (replace(BASE, frequency_penalty=0.5), scaled(PROBS, {1: E**-0.5, 2: E**-1.0})),
    "repetition": (replace(BASE, repetition_penalty=2.0), scaled(PROBS, {i: E * PROBS[i] for i in (0, 1, 2)})),
    "min_tokens": (replace(BASE, min_tokens=9), only(PROBS, 0, 1, 2, 3, 5)),
    # Odds of 1 and 2 fall by E ** -0.5 and 4 is masked; at T = 0.8 the weights are p ** 1.25;
    # top-k leaves 0 to 3; 0.9 of their mass needs all four; the least likely has more than
    # 0.2 of what the best one has.
    "all": (
        replace(BASE, temperature=0.8, top_k=4, top_p=0.9, min_p=0.2, presence_penalty=0.5, min_tokens=9),
        only(scaled(PROBS, {1: E**-0.5, 2: E**-0.5}) ** 1.25, 0, 1, 2, 3),
    ),
}


def assert_distributed(tokens: list[int], probs: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0, "a token was sampled that has no probability"
    possible = probs > 0
    assert stats.chisquare(counts[possible], probs[possible] * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize("name", ENUMERATED)
def test_seeds_sample_the_enumerated_distribution(name):
    params, probs = ENUMERATED[name]
    logits = (np.log(PROBS) + 1).astype(np.float32)
    tokens = [
        sample(logits, replace(params, seed=seed), output_ids=(1, 2, 2), eos_ids=frozenset({4}))
        for seed in range(NUM_DRAWS)
    ]
    assert_distributed(tokens, probs)


def test_positions_and_choices_sample_independently():
    logits = np.log(PROBS).astype(np.float32)
    by_position = [sample(logits, SamplingParams(seed=9), prompt_ids=(0,) * (1 + i)) for i in range(NUM_DRAWS)]
    assert_distributed(by_position, PROBS)
    table = np.zeros((len(PROBS), len(PROBS)))
    for seed in range(NUM_DRAWS):
        first, second = (sample(logits, SamplingParams(seed=seed), choice_index=choice) for choice in (0, 1))
        table[first, second] += 1
    assert stats.chi2_contingency(table[:4, :4]).pvalue > 1e-3, "two choices of one seed share noise"


# --- The compiled sampler is the reference, to the bit.


finite = st.floats(-40, 40, width=32)
# A coarse grid makes ties, at the k-th logit and at the edge of the nucleus too.
some_logits = st.one_of(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), min_size=2, max_size=24),
    st.lists(finite, min_size=2, max_size=24),
    st.lists(st.one_of(finite, st.just(NEVER)), min_size=2, max_size=24),
    st.lists(st.one_of(finite, st.sampled_from([NEVER, float("nan"), float("inf")])), min_size=2, max_size=24),
)


@st.composite
def sampler_cases(draw):
    values = draw(some_logits)
    token = st.integers(0, len(values) - 1)
    off = SamplingParams()
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.9, 0.75, 0.5, 0.25, 1e-6])),
        top_k=draw(st.sampled_from([off.top_k, -1, 1, 2, 5, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.01, 1.3, 10.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logit_bias=draw(st.dictionaries(token, st.floats(-100, 100), max_size=4)),
        min_tokens=draw(st.sampled_from([0, 0, 3, 100])),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2))),
        ignore_eos=draw(st.booleans()),
    )
    return (
        np.array(values, np.float32),
        params,
        {
            "prompt_ids": tuple(draw(st.lists(token, min_size=1, max_size=6))),
            "output_ids": tuple(draw(st.lists(token, max_size=6))),
            "eos_ids": frozenset(draw(st.sets(token, max_size=1))),
            "choice_index": draw(st.integers(0, 15)),
            "vocab_limit": draw(st.one_of(st.none(), st.integers(1, len(values)))),
        },
    )


@pytest.mark.parametrize(
    "params, kept",
    [
        # Of logits 1 and 0 the first has 1 / (1 + exp(-1)) = 0.73105857863 of the mass, the second
        # exp(-1) of its odds.
        (replace(BASE, top_p=0.7310585786), {0}),
        (replace(BASE, top_p=0.7310585787), {0, 1}),
        (replace(BASE, min_p=0.3678794411), {0, 1}),
        (replace(BASE, min_p=0.3678794412), {0}),
    ],
)
def test_edges_of_filters_are_taken_in_float64(params, kept):
    seeded = [replace(params, seed=seed) for seed in range(40)]
    assert {sample(row(1, 0), p) for p in seeded} == kept
    assert {ops.sample_reference(row(1, 0), p, prompt_ids=(0,), output_ids=()) for p in seeded} == kept


@settings(max_examples=600)
@given(sampler_cases())
def test_compiled_sampler_is_the_reference(case):
    logits, params, context = case
    before = logits.copy()
    assert sample(logits, params, **context) == ops.sample_reference(logits, params, **context)
    assert np.array_equal(logits, before, equal_nan=True), "the model's logits are left as they are"


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 3.0, 12.0]), st.sampled_from([1.0, 0.999, 0.95, 0.3]))
@example(seed=0, spread=0.5, top_p=0.999)
def test_compiled_sampler_is_the_reference_on_wide_rows(seed, spread, top_p):
    logits = (np.random.default_rng(seed).standard_normal(1501) * spread).astype(np.float32)
    for params in (SamplingParams(seed=seed, top_p=top_p), SamplingParams(seed=seed, top_k=40, temperature=0.6)):
        expected = ops.sample_reference(logits, params, prompt_ids=(0,), output_ids=())
        assert sample(logits, params) == expected
