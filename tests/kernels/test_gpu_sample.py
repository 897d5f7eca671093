"""Test the device sampler: each row gives tests/references/logits.py's token, in any batch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from foretoken_kernels import reference_sampling
from foretoken_kernels.gpu import noise as gpu_noise
from foretoken_kernels.gpu import sample
from foretoken_kernels.gpu.sample import sample_rows, sample_workspace

from foretoken import noise
from foretoken.sampling import SamplingParams, noise_key
from foretoken.tree import DraftTree
from tests.foretoken.test_noise import KNOWN_ANSWERS, LITERAL_NOISE, assert_within_4_ulp
from tests.kernels.sampling_batches import (
    Sequence,
    new_batch,
    new_state,
    path_tokens,
    random_sequence,
)
from tests.references.logits import NO_SAMPLE, sample_reference
from tests.support.environment import child_environment

CHUNK = 64


def expected_tokens(sequence: Sequence, vocab_limit: int | None = None) -> list[int]:
    return [
        sample_reference(
            sequence.logits[node],
            sequence.params,
            prompt_ids=sequence.prompt,
            output_ids=sequence.output + path_tokens(sequence.tree, node),
            eos_ids=sequence.eos_ids,
            choice_index=sequence.choice,
            vocab_limit=vocab_limit,
        )
        for node in range(sequence.tree.num_nodes)
    ]


def run(sequences: list[Sequence], device: str, chunk: int = CHUNK, padding_rows: int = 0, **options) -> list[int]:
    """Return the kernels' tokens, and check them against the definition in PyTorch."""
    vocab = sequences[0].logits.shape[1]
    batch_slots = [2 * index + 1 for index in range(len(sequences))]
    state = new_state(sequences, batch_slots, vocab, 2 * len(sequences) + 1, device)
    batch = new_batch(sequences, batch_slots, vocab, device, padding_rows=padding_rows, **options)
    sampled = torch.full((len(batch.tokens),), -77, dtype=torch.int32, device=device)
    sample_rows(batch, state, sample_workspace(len(batch.tokens) + 2, vocab, device, chunk), sampled)
    reference = torch.full_like(sampled, -78)
    reference_sampling.sample_rows_reference(batch, state, reference)
    assert sampled.tolist() == reference.tolist()
    return sampled.tolist()


def one_row(logits: list[float] | np.ndarray, params: SamplingParams, **options) -> Sequence:
    row = np.array(logits, np.float32)[None]
    return Sequence(params, [1], [], DraftTree.root_only(1), row, **options)


@triton.jit
def _noise_kernel(counter_ptr, key_ptr, words_ptr, noise_ptr, estimate_ptr):
    zeros = tl.zeros([16], tl.uint32)
    w0, w1, w2, w3 = gpu_noise.philox4x32(
        zeros + tl.load(counter_ptr).to(tl.uint32),
        zeros + tl.load(counter_ptr + 1).to(tl.uint32),
        zeros + tl.load(counter_ptr + 2).to(tl.uint32),
        zeros + tl.load(counter_ptr + 3).to(tl.uint32),
        zeros + tl.load(key_ptr).to(tl.uint32),
        zeros + tl.load(key_ptr + 1).to(tl.uint32),
    )
    at = tl.arange(0, 16)
    picked = tl.where(at == 0, w0, tl.where(at == 1, w1, tl.where(at == 2, w2, w3)))
    tl.store(words_ptr + at, picked.to(tl.int64), mask=at < 4)
    tl.store(noise_ptr + at, gpu_noise.gumbel_from_words(picked))
    tl.store(estimate_ptr + at, gpu_noise.gumbel_estimate(picked))


@triton.jit
def _gumbel_kernel(words_ptr, noise_ptr, estimate_ptr, size: tl.constexpr):
    at = tl.arange(0, size)
    words = tl.load(words_ptr + at).to(tl.uint32)
    tl.store(noise_ptr + at, gpu_noise.gumbel_from_words(words))
    tl.store(estimate_ptr + at, gpu_noise.gumbel_estimate(words))


@triton.jit
def _words_kernel(words_ptr, position_ptr, choice_ptr, low_ptr, high_ptr, size: tl.constexpr):
    first = tl.program_id(0) * size
    words = gpu_noise.token_words(
        first // 4, tl.load(position_ptr), tl.load(choice_ptr), tl.load(low_ptr), tl.load(high_ptr), size
    )
    tl.store(words_ptr + first + tl.arange(0, size), words.to(tl.int64))


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, words, device):
    out = torch.zeros(16, dtype=torch.int64, device=device)
    gumbel, estimate = torch.zeros(16, device=device), torch.zeros(16, device=device)
    _noise_kernel[(1,)](torch.tensor(counter, device=device), torch.tensor(key, device=device), out, gumbel, estimate)
    assert tuple(out[:4].tolist()) == words
    assert_within_4_ulp(gumbel[:4].cpu().numpy(), noise.gumbel_from_words(np.array(words)))


def test_literal_words_become_literal_noise_and_estimates_are_close(device):
    literal = [word for word, _, _ in LITERAL_NOISE]
    # Values where the estimate changes its formula, and near both ends.
    edges = [int((1 - 0.03 + d) * 2**32) for d in (-1e-4, 0, 1e-4)] + [1 << 9, 0xFFFFFFFF - (1 << 9), 0xFFFF0000]
    spread = np.random.default_rng(0).integers(0, 2**32, 1024 - len(literal) - len(edges)).tolist()
    words = torch.tensor(literal + edges + spread, device=device)
    gumbel, estimate = torch.zeros(1024, device=device), torch.zeros(1024, device=device)
    _gumbel_kernel[(1,)](words, gumbel, estimate, size=1024)
    expected = np.array([bits for _, _, bits in LITERAL_NOISE], np.uint32).view(np.float32)
    assert_within_4_ulp(gumbel[: len(literal)].cpu().numpy(), expected)
    assert_within_4_ulp(gumbel.cpu().numpy(), noise.gumbel_from_words(words.cpu().numpy()))
    assert float((gumbel - estimate).abs().max()) < 0.2 * gpu_noise.ESTIMATE_ERROR.value


@pytest.mark.parametrize("seed, position, choice", [(0, 0, 0), (-1, 2**31 - 1, 15), (7 << 40, 4321, 3)])
def test_words_of_token_ids_are_those_of_the_definition(seed, position, choice, device):
    words = torch.zeros(128, dtype=torch.int64, device=device)
    numbers = [torch.tensor([n], device=device) for n in (position, choice, *noise_key(seed))]
    _words_kernel[(4,)](words, *numbers, size=32)
    ids = torch.arange(128)
    assert words.tolist() == noise.token_words(seed, position, choice, ids).tolist()
    assert words.tolist() == reference_sampling.token_words(ids, position, choice, *noise_key(seed)).tolist()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))])
def test_every_operation_together_gives_the_defined_tokens(seed, device, monkeypatch):
    # One piece of the vocabulary a program, several, all.
    monkeypatch.setattr(sample, "_PROGRAMS", [1000, 10, 1][seed % 3])
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([97, 200, 333]))
    sequences = [random_sequence(rng, vocab, int(rng.integers(1, 4))) for _ in range(3)]
    vocab_limit = int(rng.choice([vocab, vocab - 1, vocab // 2]))
    sampled = run(sequences, device, vocab_limit=vocab_limit, padding_rows=2)
    expected = [token for sequence in sequences for token in expected_tokens(sequence, vocab_limit)]
    assert sampled == [*expected, -1, -1]


@pytest.mark.parametrize("vocab, chunk", [(1000, 128), pytest.param(5000, 1024, marks=pytest.mark.slow)])
def test_larger_vocabularies(vocab, chunk, device):
    rng = np.random.default_rng(vocab)
    sequences = [random_sequence(rng, vocab, 1) for _ in range(6)]
    assert run(sequences, device, chunk) == [t for s in sequences for t in expected_tokens(s)]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_real_vocabularies(vocab, seed, device):
    rng = np.random.default_rng(seed)
    sequences = [random_sequence(rng, vocab, 2) for _ in range(2)]
    assert run(sequences, device, 2048) == [t for s in sequences for t in expected_tokens(s)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_temperature_in_both_element_types(dtype, device):
    rng = np.random.default_rng(5)
    rows = torch.from_numpy(rng.normal(0, 2, (4, 300)).astype(np.float32)).to(dtype).float().numpy()
    sequences = [one_row(row, SamplingParams(seed=index)) for index, row in enumerate(rows)]
    assert run(sequences, device, dtype=dtype) == [expected_tokens(s)[0] for s in sequences]


@pytest.mark.parametrize("constant", [0.0, 1e30, float("-inf"), float("nan")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("programs", [1, 100])
def test_rows_of_one_value(constant, temperature, programs, device, monkeypatch):
    monkeypatch.setattr(sample, "_PROGRAMS", programs)
    # At 1e30 the noise is lost: every token of a chunk is a rival, and the lowest id wins.
    sequence = one_row(np.full(150, constant), SamplingParams(temperature=temperature, seed=3))
    assert run([sequence], device) == expected_tokens(sequence)


@pytest.mark.parametrize(
    "top_p", [1e-9, 0.5, *(pytest.param(top_p, marks=pytest.mark.slow) for top_p in (0.25, 0.75, 0.999))]
)
def test_top_p_of_equal_logits_keeps_the_lowest_ids(top_p, device):
    row = np.full(160, -3.0)
    row[[5, 70, 71, 159]] = 2.0
    sequences = [one_row(row, SamplingParams(top_p=top_p, seed=seed)) for seed in range(6)]
    assert run(sequences, device) == [expected_tokens(s)[0] for s in sequences]


def test_top_k_keeps_what_equals_the_kth_and_zeros_of_both_signs_are_equal(device):
    row = np.full(100, -5.0)
    row[3], row[40], row[90] = 1.0, 0.0, -0.0
    sequences = [one_row(row, SamplingParams(top_k=2, seed=seed)) for seed in range(8)]
    sampled = run(sequences, device)
    assert sampled == [expected_tokens(s)[0] for s in sequences]
    assert {40, 90} <= set(sampled)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"top_k": 300}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.slow),
        {"top_k": 300, "top_p": 0.8},
        pytest.param({"top_p": 0.8, "min_p": 0.6}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("spread", [pytest.param(0.3, marks=pytest.mark.slow), 300.0])
def test_cuts_with_many_and_with_few_values_above_them(options, spread, device):
    # Flat rows have more values near the largest than can be gathered; in wide rows a few values
    # hold all of the mass.
    rng = np.random.default_rng(8)
    rows = np.round(rng.normal(0, spread, (3, 400)), 1)
    sequences = [one_row(row, SamplingParams(seed=index, **options)) for index, row in enumerate(rows)]
    assert run(sequences, device) == [expected_tokens(s)[0] for s in sequences]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"top_k": 3}, marks=pytest.mark.slow),
        {"top_p": 0.5, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_nan_or_infinity_gives_no_token_and_changes_no_other(fault, options, device):
    params = SamplingParams(logit_bias={70: -100.0}, **options)
    rng = np.random.default_rng(21)
    rows = rng.normal(0, 3, (5, 200))
    sound = run([one_row(row, params) for row in rows], device)
    assert min(sound) >= 0
    # The fault is in the first piece, in the last, at a token that a bias forbids, and beyond the
    # vocabulary.
    rows[1, 5], rows[2, 149], rows[3, 70], rows[4, 150] = [fault] * 4
    sequences = [one_row(row, params) for row in rows]
    sampled = run(sequences, device, vocab_limit=150)
    assert sampled == [expected_tokens(s, 150)[0] for s in sequences]
    broken = [False, True, True, True, False] if fault != float("-inf") else [False] * 5
    assert [token == NO_SAMPLE for token in sampled] == broken


@pytest.mark.filterwarnings("ignore:overflow")  # a logit overflows to infinity on purpose
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_a_logit_that_overflows_or_a_row_without_any_gives_no_token(temperature, device):
    large, empty = np.zeros(100, np.float32), np.full(100, -np.inf, np.float32)
    large[7] = 3e38
    masked = np.where(np.arange(100) == 3, 1.0, empty)
    params = SamplingParams(temperature=temperature, repetition_penalty=0.5)
    # Token 7 has been seen, so its logit is doubled.
    sequences = [
        Sequence(params, [7], [], DraftTree.root_only(7), large[None]),
        one_row(empty, SamplingParams(temperature=temperature)),
        one_row(masked, SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(3,))),
    ]
    assert run(sequences, device) == [NO_SAMPLE] * 3 == [expected_tokens(s)[0] for s in sequences]


def test_a_token_does_not_depend_on_the_batch(device):
    rng = np.random.default_rng(11)
    sequences = [random_sequence(rng, 130, 2) for _ in range(4)]
    together = run(sequences, device)
    assert run(sequences[::-1], device) == [t for i in (3, 2, 1, 0) for t in together[2 * i : 2 * i + 2]]
    assert run(sequences[2:3], device, chunk=32, padding_rows=1) == [*together[4:6], -1]


def test_logprobs_rank_equal_logits_by_id(device):
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, float("-inf"), float("nan")], [0.0] * 7], device=device)
    rows = torch.tensor([0, 0, 1], device=device)
    log_sums, logprobs, ranks = reference_sampling.row_logprobs(logits, rows, torch.tensor([2, 4, 6], device=device))
    assert ranks.tolist() == [2, 5, 7]
    log_sum = np.log(np.exp(1) + 2 * np.exp(2) + 2)
    np.testing.assert_allclose(log_sums.cpu(), [log_sum, log_sum, np.log(7)], rtol=1e-12)
    np.testing.assert_allclose(logprobs.cpu(), [2 - log_sum, -log_sum, -np.log(7)], rtol=1e-12)
    ids, best = reference_sampling.top_logprobs(logits, rows, log_sums, 5)
    assert ids.tolist() == [[1, 2, 0, 3, 4], [1, 2, 0, 3, 4], [0, 1, 2, 3, 4]]
    np.testing.assert_allclose(best[0].cpu(), np.array([2, 2, 1, 0, 0]) - log_sum, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
def test_kernels_compile_for_a_gpu(logits):
    # Use a process of its own: in this one, kernels may already be defined for the interpreter.
    environment = child_environment()
    environment.pop("TRITON_INTERPRET", None)
    command = f"from tests.kernels.compile_sampling import compile_all; compile_all({logits!r})"
    subprocess.run([sys.executable, "-c", command], env=environment, check=True)
