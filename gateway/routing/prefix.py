"""Name a prompt's prefixes by hashes, which all gateways compute alike."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

# Tokens of the shortest prefix. Fixed, and not a verifier's block size, so that gateways agree
# before they have met a verifier.
BLOCK_TOKENS = 16
HASH_BYTES = 8


def prefix_keys(token_ids: Sequence[int], salt: str | None) -> Iterator[int]:
    """Yield a 64-bit key for each of the prompt's prefixes in ``prefix_lengths``, shortest first.

    Tenants with different salts share no keys. A key is only hashed when it is asked for, and each
    token is hashed once.
    """
    tagged = b"default" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    state = hashlib.blake2b(tagged, digest_size=HASH_BYTES).digest()
    start = 0
    for end in prefix_lengths(len(token_ids)):
        segment = array("I", token_ids[start:end]).tobytes()
        state = hashlib.blake2b(state + segment, digest_size=HASH_BYTES).digest()
        yield int.from_bytes(state, "little")
        start = end


def prefix_lengths(num_tokens: int) -> Iterator[int]:
    """Yield 16, 32, 48, 64, 96, 128, 192, ... tokens.

    The last count is all whole blocks without the final token.

    The final token always runs, to give logits, so a prompt of 16 tokens has no prefix. The steps
    grow by a half or a third: a conversation that grows past one of them keeps most of its keys.
    """
    longest = (num_tokens - 1) // BLOCK_TOKENS
    num_blocks = 1
    while num_blocks < longest:
        yield num_blocks * BLOCK_TOKENS
        half = 1 << (num_blocks.bit_length() - 1)
        num_blocks += max(half // 2, 1) if num_blocks != 1 else 1
    if longest > 0:
        yield longest * BLOCK_TOKENS
