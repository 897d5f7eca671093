"""Device functions that the attention kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[[Any], Any] = triton.jit


@jit
def bit_length(word):  # type: ignore[no-untyped-def]
    """Return the bit length of an int32 read as unsigned."""
    length = tl.where(word > 0, 1, 0)
    rest = word
    for step in tl.static_range(5):
        shift = 16 >> step
        upper = rest >> shift
        length = tl.where(upper > 0, length + shift, length)
        rest = tl.where(upper > 0, upper, rest)
    return tl.where(word < 0, 32, length)


@jit
def low_bits(count):  # type: ignore[no-untyped-def]
    """Return an int32 with the lowest ``count`` bits set: none for <= 0, all for >= 32."""
    within = tl.minimum(tl.maximum(count, 0), 31)
    return tl.where(count >= 32, -1, ~(tl.full([], -1, tl.int32) << within))


@jit
def kv_slots_of(logical, live, table, max_blocks, num_kv_slots, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the int64 KV slots of logical KV slots, and which of them are in the block table."""
    block = logical // BLOCK_SIZE
    live = live & (logical >= 0) & (block < max_blocks)
    entry = tl.load(table + block, mask=live, other=0)
    # If a bad table entry makes this overflow, the clamp keeps the result inside the cache.
    kv_slot = entry * BLOCK_SIZE + logical % BLOCK_SIZE
    return tl.minimum(tl.maximum(kv_slot, 0), num_kv_slots - 1).to(tl.int64), live


@jit
def gather(plane, kv_slot, live, kv_slot_stride, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load [keys, BLOCK_DIM] from the cache, zero where not live.

    KV slots that are not live may hold anything, even NaN.
    """
    column = tl.arange(0, BLOCK_DIM)
    mask = live[:, None]
    if BLOCK_DIM != HEAD_DIM:
        mask = mask & (column < HEAD_DIM)[None, :]
    return tl.load(plane + (kv_slot * kv_slot_stride)[:, None] + column[None, :], mask=mask, other=0.0)


@jit
def attend(  # type: ignore[no-untyped-def]
    query, key, value, visible, scale, sums, maxima, weights, WIDE: tl.constexpr, is_masked=True
):
    """Add one block of keys to the running softmax.

    ``is_masked``: whether ``visible`` applies; otherwise all keys are visible.
    """
    if WIDE:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if is_masked:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(maxima, tl.max(scores, 1) * scale)
    # A row that has seen no key yet has no finite maximum to subtract.
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(scores * scale - finite[:, None])
    decay = tl.exp2(maxima - finite)
    weights = weights * decay + tl.sum(weight, 1)
    sums = sums * decay[:, None]
    sums = tl.dot(weight.to(value.dtype), value, sums, input_precision="ieee")
    return sums, highest, weights


@jit
def write(out, sums, weights, offset, mask):  # type: ignore[no-untyped-def]
    """Store the normalised sums; a row that saw no key becomes zero."""
    result = sums * (1.0 / tl.where(weights > 0, weights, 1.0))[:, None]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)
