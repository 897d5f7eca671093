# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Keyed noise as device functions: Philox4x32-10 words and their Gumbel noise.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The counter of token
ids 4 b to 4 b + 3 is (b, position, choice index, stream), the key is the seed.
reference_sampling.py defines the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MULTIPLIER_0: tl.constexpr = tl.constexpr(0xD2511F53)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0xCD9E8D57)
_INCREMENT_0: tl.constexpr = tl.constexpr(0x9E3779B9)
_INCREMENT_1: tl.constexpr = tl.constexpr(0xBB67AE85)
_UNIFORM_STEP: tl.constexpr = tl.constexpr(2.0**-23)
_LAST_UNIFORM: tl.constexpr = tl.constexpr(2**23 - 1)
# A bound on gumbel_estimate's error, which is at most 2e-5 where the inner logarithm is close to 0.
ESTIMATE_ERROR: tl.constexpr = tl.constexpr(5e-4)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return four uint32 words for each counter.

    All arguments are uint32, of one shape or scalars.
    """
    for _ in tl.static_range(10):
        even_high = tl.umulhi(_MULTIPLIER_0, c0)
        even_low = c0 * _MULTIPLIER_0
        odd_high = tl.umulhi(_MULTIPLIER_1, c2)
        odd_low = c2 * _MULTIPLIER_1
        c0 = odd_high ^ c1 ^ k0
        c1 = odd_low
        c2 = even_high ^ c3 ^ k1
        c3 = even_low
        k0 = k0 + _INCREMENT_0
        k1 = k1 + _INCREMENT_1
    return c0, c1, c2, c3


@triton.jit
def token_words(first_block, position, choice, key_low, key_high, TOKENS: tl.constexpr):
    """Return uint32 [TOKENS]: the words of the token ids from ``4 * first_block`` on.

    The stream is that of sampled tokens.
    """
    blocks = (first_block + tl.arange(0, TOKENS // 4)).to(tl.uint32)
    zeros = tl.zeros([TOKENS // 4], tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        blocks,
        zeros + position.to(tl.uint32),
        zeros + choice.to(tl.uint32),
        zeros,
        zeros + key_low.to(tl.uint32),
        zeros + key_high.to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel_from_words(words):
    """Return float32 noise of uint32 words."""
    uniform = ((words >> 9).to(tl.float64) + 0.5) * _UNIFORM_STEP
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def scattered_noise(token_ids, position, choice, key_low, key_high):
    """Return float32 noise of any int32 token ids, from the stream of sampled tokens."""
    zeros = (token_ids * 0).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        (token_ids >> 2).to(tl.uint32),
        zeros + position.to(tl.uint32),
        zeros + choice.to(tl.uint32),
        zeros,
        zeros + key_low.to(tl.uint32),
        zeros + key_high.to(tl.uint32),
    )
    lane = token_ids & 3
    return gumbel_from_words(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))


@triton.jit
def gumbel_estimate(words):
    """Return float32 noise to within ESTIMATE_ERROR, without float64.

    Close to 1, the logarithm is computed from the uniform number's distance to 1, which is exact. A
    float32 logarithm, and even more the device's approximate one, has no correct digit there.
    """
    steps = (words >> 9).to(tl.int32)
    distance = ((steps * -1 + _LAST_UNIFORM).to(tl.float32) + 0.5) * _UNIFORM_STEP
    series = distance * (1.0 + distance * (0.5 + distance * 0.33333334))
    logarithm = -tl.log((steps.to(tl.float32) + 0.5) * _UNIFORM_STEP)
    return -tl.log(tl.where(distance < 0.03, series, logarithm))
