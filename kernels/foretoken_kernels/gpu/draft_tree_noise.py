# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The sampler's keyed noise on the device: Philox4x32-10 and Gumbel, as foretoken_kernels.cpu.sample computes them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four uint32 words of a counter and a key: ten rounds (Salmon et al., SC 2011). All are uint32, of one shape."""
    for _ in tl.static_range(10):
        even_low = c0 * 0xD2511F53
        even_high = tl.umulhi(c0, tl.zeros_like(c0) + 0xD2511F53)
        odd_low = c2 * 0xCD9E8D57
        odd_high = tl.umulhi(c2, tl.zeros_like(c2) + 0xCD9E8D57)
        c0 = odd_high ^ c1 ^ k0
        c1 = odd_low
        c2 = even_high ^ c3 ^ k1
        c3 = even_low
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel_from_word(word):
    """float32 noise of uint32 words; the logarithms in float64, as near zero float32 has too few digits."""
    uniform = ((word >> 9).to(tl.int32).to(tl.float64) + 0.5) * (1.0 / 8388608.0)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def token_noise(token_ids, position, choice_index, seed_low, seed_high):
    """float32 noise of int32 token ids at a position; position, choice and the seed's words are int32 scalars."""
    zeros = (token_ids * 0).to(tl.uint32)
    word0, word1, word2, word3 = philox4x32(
        (token_ids >> 2).to(tl.uint32),
        zeros + position.to(tl.uint32),
        zeros + choice_index.to(tl.uint32),
        zeros,
        zeros + seed_low.to(tl.uint32),
        zeros + seed_high.to(tl.uint32),
    )
    lane = token_ids & 3
    return gumbel_from_word(tl.where(lane == 0, word0, tl.where(lane == 1, word1, tl.where(lane == 2, word2, word3))))


@triton.jit
def run_noise(first_block, BLOCKS: tl.constexpr, position, choice_index, seed_low, seed_high):
    """float32 [4 * BLOCKS]: the noise of token ids from ``4 * first_block`` on, four of which share a counter."""
    blocks = (first_block + tl.arange(0, BLOCKS)).to(tl.uint32)
    zeros = blocks * 0
    word0, word1, word2, word3 = philox4x32(
        blocks,
        zeros + position.to(tl.uint32),
        zeros + choice_index.to(tl.uint32),
        zeros,
        zeros + seed_low.to(tl.uint32),
        zeros + seed_high.to(tl.uint32),
    )
    return gumbel_from_word(tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3)))
