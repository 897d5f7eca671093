"""The keyed noise.

It only depends on seed, position, choice and token id, so drafters and batches never change a text.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a
counter and a key into four 32-bit words. A word becomes a uniform number, and that becomes Gumbel
noise. The sampled token is the argmax of logit / temperature + noise (the Gumbel-max trick). The
functions here define the noise for numpy arrays, and its words for torch tensors too; the compiled
form is in foretoken_kernels.cpu.sample.

    key      seed modulo 2**64: low word, high word
    counter  (token id // 4, position of the token being sampled, choice index, stream tag)
    lane     token id % 4 picks one of the four words
    uniform  (top 23 bits of the word + 0.5) / 2**23: exact in float32, never 0 or 1
    Gumbel   -log(-log(uniform)) in float64, rounded to float32: finite, in [-2.82, 16.64]

The position is the token's index in prompt + output. The logarithms are float64: near zero, where
the inner one is close to 1, implementations that differ by one ulp in float32 would give very
different noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretoken.sampling import TOKEN_STREAM, noise_key

if TYPE_CHECKING:
    import torch

Float32 = NDArray[np.float32]
# 32-bit words, held in int64: torch has no arithmetic for unsigned integers.
Words = TypeVar("Words", NDArray[np.int64], "torch.Tensor")

WORD_MASK = 0xFFFFFFFF
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORDS_PER_BLOCK = 4
UNIFORM_BITS = 23


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return four random words for each counter, by ten rounds of Philox4x32.

    Args:
        counter: four int64 arrays of one shape, with values in [0, 2**32).
        key: two words in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap, which keeps all 64 bits; the mask undoes the arithmetic shift.
        even, odd = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((odd >> 32) & WORD_MASK) ^ c1 ^ k0,
            odd & WORD_MASK,
            ((even >> 32) & WORD_MASK) ^ c3 ^ k1,
            even & WORD_MASK,
        )
        k0 = (k0 + PHILOX_KEY_INCREMENTS[0]) & WORD_MASK
        k1 = (k1 + PHILOX_KEY_INCREMENTS[1]) & WORD_MASK
    return c0, c1, c2, c3


def token_words(seed: int, position: int, choice_index: int, token_ids: Words, stream: int = TOKEN_STREAM) -> Words:
    """Return the word of each token id at a position, int64 in the shape of ``token_ids``."""
    zeros = token_ids * 0
    counter = (token_ids // WORDS_PER_BLOCK, zeros + position, zeros + choice_index, zeros + stream)
    words = philox4x32(counter, noise_key(seed))
    lanes = token_ids % WORDS_PER_BLOCK
    picked = zeros
    for lane, word in enumerate(words):
        picked = picked + word * (lanes == lane)
    return picked


def uniform_from_words(words: NDArray[np.int64]) -> Float32:
    """Return exact float32 numbers in (0, 1)."""
    return ((words >> (32 - UNIFORM_BITS)).astype(np.float32) + np.float32(0.5)) / np.float32(2**UNIFORM_BITS)


def gumbel_from_words(words: NDArray[np.int64]) -> Float32:
    """Return float32 Gumbel noise for 32-bit words."""
    uniform = uniform_from_words(words).astype(np.float64)
    return (-np.log(-np.log(uniform))).astype(np.float32)


def gumbel_noise(seed: int, position: int, choice_index: int, token_ids: NDArray[np.integer]) -> Float32:
    """Return float32 noise for each token id.

    For a whole vocabulary, pass ``np.arange(vocab_size)``.
    """
    ids = np.asarray(token_ids, np.int64)
    return gumbel_from_words(token_words(seed, position, choice_index, ids))
