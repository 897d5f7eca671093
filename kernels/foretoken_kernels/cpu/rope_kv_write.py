"""Apply bias, per-head norm and rotary embedding, and write keys and values to the paged KV cache.

Threads share the (row, head) pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretoken_kernels.cpu.compile import inlined
from foretoken_kernels.cpu.rms_norm import normalize
from foretoken_kernels.cpu.simd import LANES, add, load, store


@inlined
def rope_kv_write(
    shape: Any, batch: Any, qkv: Any, weights: Any, cos_sin: Any, keys: Any, values: Any, team: Any
) -> None:
    """Rotate this thread's share of queries in place; write keys and values to their KV slots.

    Args:
        shape: (num_heads, num_kv_heads, head_dim); head_dim is a multiple of 16.
        batch: (num_rows, positions, kv_slots), int32.
        qkv: float32, flat [num_rows, num_heads + 2 * num_kv_heads, head_dim].
        weights: (bias or empty, query norm or empty, key norm or empty, has_bias, has_norm,
            epsilon).
        cos_sin: float32, flat [positions, 2, head_dim / 2]: cosines, then sines.
        keys, values: flat [num_kv_slots, num_kv_heads, head_dim], float32, bfloat16 or float16
            bits.
        team: (thread, num_threads).
    """
    num_heads, num_kv_heads, head_dim = shape
    num_rows, positions, kv_slots = batch
    bias, query_norm, key_norm, has_bias, has_norm, epsilon = weights
    thread, num_threads = team
    heads = num_heads + 2 * num_kv_heads
    items = num_rows * heads
    for item in range(thread * items // num_threads, (thread + 1) * items // num_threads):
        row, head = item // heads, item % heads
        at = item * head_dim
        if has_bias:
            for dim in range(0, head_dim, LANES):
                store(qkv, at + dim, add(load(qkv, at + dim), load(bias, head * head_dim + dim)))
        kv_at = np.int64(kv_slots[row]) * num_kv_heads * head_dim
        if head >= num_heads + num_kv_heads:
            kv_at += (head - num_heads - num_kv_heads) * head_dim
            for dim in range(0, head_dim, LANES):
                store(values, kv_at + dim, load(qkv, at + dim))
            continue
        if has_norm:
            normalize(qkv, at, head_dim, query_norm if head < num_heads else key_norm, epsilon, qkv, at)
        _rotate(qkv, at, head_dim, cos_sin, np.int64(positions[row]) * head_dim)
        if head >= num_heads:
            kv_at += (head - num_heads) * head_dim
            for dim in range(0, head_dim, LANES):
                store(keys, kv_at + dim, load(qkv, at + dim))


@inlined
def _rotate(x: Any, at: int, head_dim: int, cos_sin: Any, angle_at: int) -> None:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) in place."""
    half = head_dim // 2
    for i in range(half):
        low, high = x[at + i], x[at + half + i]
        cosine, sine = cos_sin[angle_at + i], cos_sin[angle_at + half + i]
        x[at + i] = low * cosine - high * sine
        x[at + half + i] = high * cosine + low * sine
