"""The keyed noise: Philox's published vectors, our literal vectors, and nothing else in the key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foretoken_kernels.cpu import sample
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foretoken import noise
from foretoken.sampling import TOKEN_STREAM, noise_key

ALL_ONES = 0xFFFFFFFF
# Random123's known answers for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# Word, uniform, and the bits of its float32 noise (computed with 200 bits). The fourth is next to
# exp(-1), where the inner logarithm is close to 1 and float32 would lose half of the digits.
LITERAL_NOISE = [
    (0x00000000, 2.0**-24, 0xC033F049),
    (0xFFFFFFFF, 1 - 2.0**-24, 0x41851592),
    (0x80000000, 0.5 + 2.0**-24, 0x3EBBA79B),
    (0x5E2D58D8, 3085996.5 / 2**23, 0x32D5A542),
    (0x6627E8D5, 3347444.5 / 2**23, 0x3DADB641),
]
SEEDS = st.integers(-(2**63), 2**63 - 1)


def compiled_row(seed: int, position: int, choice_index: int, vocab_size: int) -> np.ndarray:
    """Return the noise of the token ids below
    ``vocab_size``, word by word as compiled code does.
    """
    low, high = map(np.uint64, noise_key(seed))
    out = np.empty(vocab_size, np.float32)
    for token_id in range(vocab_size):
        counter = map(np.uint64, (token_id // 4, position, choice_index, TOKEN_STREAM))
        out[token_id] = sample.gumbel_from_word(sample.philox4x32(*counter, low, high)[token_id % 4])
    return out


def assert_within_4_ulp(values: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(values).all()
    assert (np.abs(values.view(np.int32).astype(np.int64) - expected.view(np.int32)) <= 4).all()


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, words):
    assert tuple(int(word[0]) for word in noise.philox4x32(tuple(np.array([c]) for c in counter), key)) == words
    assert tuple(int(word) for word in noise.philox4x32(tuple(torch.tensor(c) for c in counter), key)) == words
    assert tuple(sample.philox4x32(*map(np.uint64, counter), *map(np.uint64, key))) == words


@pytest.mark.parametrize("word, uniform, bits", LITERAL_NOISE)
def test_literal_words_become_literal_noise(word, uniform, bits):
    expected = np.array([bits], np.uint32).view(np.float32)
    assert noise.uniform_from_words(np.array([word])) == np.float32(uniform)
    assert float(np.float32(uniform)) == uniform, "float32 holds it exactly"
    assert_within_4_ulp(noise.gumbel_from_words(np.array([word])), expected)
    assert_within_4_ulp(np.array([sample.gumbel_from_word(np.uint64(word))], np.float32), expected)


def test_literal_noise_of_one_position():
    # Words of counter (0, 0, 0, 0) and (1, 0, 0, 0) under key 0: token 1
    # is the published 0xE169C58D.
    words = noise.token_words(0, 0, 0, np.arange(6))
    assert [f"{word:08x}" for word in words[:4]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    expected = noise.gumbel_from_words(words)
    assert_within_4_ulp(noise.gumbel_noise(0, 0, 0, np.arange(6)), expected)
    assert_within_4_ulp(compiled_row(0, 0, 0, 6), expected)


@given(SEEDS, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_numpy_and_torch_agree_on_every_bit_of_the_words(seed, position, choice_index, token_id):
    ids = np.array([token_id, 0, 3, 4])
    words = noise.token_words(seed, position, choice_index, ids)
    assert ((words >= 0) & (words <= ALL_ONES)).all()
    assert words.tolist() == noise.token_words(seed, position, choice_index, torch.from_numpy(ids)).tolist()


@given(SEEDS, st.integers(0, 2**32 - 1), st.integers(0, 15), st.integers(1, 40))
def test_compiled_noise_is_the_reference_noise(seed, position, choice_index, vocab_size):
    expected = noise.gumbel_noise(seed, position, choice_index, np.arange(vocab_size))
    assert_within_4_ulp(compiled_row(seed, position, choice_index, vocab_size), expected)


def test_noise_does_not_depend_on_which_ids_are_asked_for():
    whole = noise.gumbel_noise(7, 5, 0, np.arange(1000))
    some = np.array([999, 3, 512, 3])
    assert (noise.gumbel_noise(7, 5, 0, some) == whole[some]).all()


def test_every_part_of_the_key_changes_the_noise():
    ids = np.arange(64)
    base = noise.token_words(1, 10, 0, ids)
    others = [
        noise.token_words(2, 10, 0, ids),
        noise.token_words(1 + 2**32, 10, 0, ids),
        noise.token_words(1, 11, 0, ids),
        noise.token_words(1, 10, 1, ids),
        noise.token_words(1, 10, 0, ids, stream=1),
    ]
    for other in others:
        assert not (other == base).any()


def test_seed_is_taken_modulo_two_to_the_64():
    assert noise_key(-1) == (ALL_ONES, ALL_ONES)
    assert noise_key(2**64 + 5) == (5, 0)
    assert noise_key(3 << 32) == (0, 3)


def test_noise_is_gumbel_distributed():
    values = noise.gumbel_noise(123, 0, 0, np.arange(100_000))
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-3
    pairs = np.corrcoef(values.reshape(-1, 4).T)
    assert np.abs(pairs - np.eye(4)).max() < 0.02, "the four lanes of a block are independent"
