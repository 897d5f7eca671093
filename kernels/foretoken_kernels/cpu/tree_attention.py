"""Attention of ragged token rows over paged keys and values, tree nodes included.

The positions on a row's path are taken 16 at a time by logical position, whatever the block size, the chunk of a
prefill or the boundary between prefix and tree: a row's bits depend on its own path alone. Rows of one sequence that
stand side by side share their trips to memory, not their arithmetic. Threads share (tile of rows, key head) pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretoken_kernels.cpu.compile import inlined
from foretoken_kernels.cpu.simd import (
    LANES,
    add,
    fma,
    load,
    load_splat,
    maximum,
    multiply,
    reduce_add,
    reduce_max,
    splat,
    store,
    subtract,
    sum_rows,
)
from foretoken_kernels.cpu.vector_math import exp

# Rows of one sequence that go over its keys together.
ROW_TILE = 8
_MASK_BITS = 64
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-3.0e38)


@inlined
def tree_attention(
    shape: Any, batch: Any, query: Any, keys: Any, values: Any, out: Any, scratch: Any, team: Any
) -> None:
    """This thread's share.

    Args:
        shape: (num_heads, num_kv_heads, head_dim, block_size, score_stride); head_dim is a multiple of 16 and
            score_stride one that no path is longer than.
        batch: (num_rows, row_seqs, context_lens, masks, mask_words, tree_starts, block_tables, max_blocks), flat
            arrays as in the reference.
        query: (float32 flat array, row stride in elements); row r's heads start at r * stride.
        keys, values: flat [slots, num_kv_heads, head_dim], float32 or bfloat16 bits.
        out: float32, flat [num_rows, num_heads, head_dim].
        scratch: (scores float32 [8 * group * score_stride], offsets int64 [8 * score_stride], lengths int64 [8],
            partial float32 [256]), this thread's own.
        team: (thread, num_threads).
    """
    num_kv_heads = shape[1]
    num_rows, row_seqs = batch[0], batch[1]
    thread, num_threads = team
    first = 0
    item = 0
    while first < num_rows:
        end = first + 1
        while end < num_rows and end - first < ROW_TILE and row_seqs[end] == row_seqs[first]:
            end += 1
        for kv_head in range(num_kv_heads):
            if item % num_threads == thread:
                _find_slots(shape, batch, first, end, kv_head, scratch)
                _score_tile(shape, query, keys, first, end, kv_head, scratch)
                _softmax_tile(shape, out, first, end, kv_head, scratch)
                _sum_values_tile(shape, values, out, first, end, kv_head, scratch)
            item += 1
        first = end


@inlined
def _find_slots(shape: Any, batch: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    """Where in the cache each position of each row's path lies; a last chunk is filled up with its last slot."""
    _, num_kv_heads, head_dim, block_size, stride = shape
    _, row_seqs, context_lens, masks, mask_words, tree_starts, block_tables, max_blocks = batch
    _, offsets, lengths, _ = scratch
    table = row_seqs[first] * max_blocks
    slot_size = num_kv_heads * head_dim
    head = kv_head * head_dim
    for row in range(first, end):
        start = (row - first) * stride
        length = np.int64(context_lens[row])
        shared = np.int64(0)
        if row > first:
            shared = min(length, np.int64(context_lens[first]))
            for position in range(shared):
                offsets[start + position] = offsets[position]
        for position in range(shared, length):
            slot = np.int64(block_tables[table + position // block_size]) * block_size + position % block_size
            offsets[start + position] = slot * slot_size + head
        tree_start = np.int64(tree_starts[row_seqs[row]])
        for word in range(mask_words):
            bits = masks[row * mask_words + word]
            node = tree_start + word * _MASK_BITS
            while bits != np.uint64(0):
                if bits & np.uint64(1):
                    slot = np.int64(block_tables[table + node // block_size]) * block_size + node % block_size
                    offsets[start + length] = slot * slot_size + head
                    length += 1
                bits >>= np.uint64(1)
                node += 1
        lengths[row - first] = length
        for position in range(length, (length + LANES - 1) // LANES * LANES):
            offsets[start + position] = offsets[start + length - 1]


@inlined
def _longest(lengths: Any, rows: int) -> int:
    longest = np.int64(0)
    for row in range(rows):
        longest = max(longest, lengths[row])
    return int(longest)


@inlined
def _score_tile(shape: Any, query: Any, keys: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    """scores[row, head, position] = query . key; unscaled."""
    num_heads, num_kv_heads, head_dim, _, stride = shape
    scores, offsets, lengths, partial = scratch
    query_data, query_stride = query
    group = num_heads // num_kv_heads
    for chunk in range(0, _longest(lengths, end - first), LANES):
        for row in range(end - first):
            if chunk < lengths[row]:
                for head in range(group):
                    at = (first + row) * query_stride + (kv_head * group + head) * head_dim
                    _dot_chunk(query_data, at, keys, offsets, row * stride + chunk, head_dim, partial)
                    store(scores, (row * group + head) * stride + chunk, sum_rows(partial))


@inlined
def _dot_chunk(query: Any, at: int, keys: Any, offsets: Any, offsets_at: int, head_dim: int, partial: Any) -> None:
    """Sixteen partial sums for each of sixteen keys: lane l takes the dimensions that are l modulo 16, ascending.

    Four vectors of the query at a time stay in registers.
    """
    dim = 0
    while dim < head_dim:
        if dim + 4 * LANES <= head_dim:
            query0, query1 = load(query, at + dim), load(query, at + dim + 16)
            query2, query3 = load(query, at + dim + 32), load(query, at + dim + 48)
            for lane in range(LANES):
                key_at = offsets[offsets_at + lane] + dim
                total = (
                    multiply(query0, load(keys, key_at))
                    if dim == 0
                    else fma(query0, load(keys, key_at), load(partial, lane * LANES))
                )
                total = fma(query1, load(keys, key_at + 16), total)
                total = fma(query2, load(keys, key_at + 32), total)
                store(partial, lane * LANES, fma(query3, load(keys, key_at + 48), total))
            dim += 4 * LANES
        else:
            query0 = load(query, at + dim)
            for lane in range(LANES):
                product = multiply(query0, load(keys, offsets[offsets_at + lane] + dim))
                store(partial, lane * LANES, product if dim == 0 else add(product, load(partial, lane * LANES)))
            dim += LANES


@inlined
def _softmax_tile(shape: Any, out: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    """Scores become weights that sum to one; those behind the path's end become zero. Clears the rows of ``out``."""
    num_heads, num_kv_heads, head_dim, _, stride = shape
    scores, _, lengths, _ = scratch
    group = num_heads // num_kv_heads
    scale = np.float32(1.0 / np.sqrt(np.float64(head_dim)))
    for row in range(end - first):
        length = lengths[row]
        for head in range(group):
            at = (row * group + head) * stride
            for dim in range(0, head_dim, LANES):
                store(out, ((first + row) * num_heads + kv_head * group + head) * head_dim + dim, splat(_ZERO))
            _softmax(scores, at, length, scale)


@inlined
def _softmax(scores: Any, at: int, length: int, scale: np.float32) -> None:
    largest = splat(_LOWEST)
    for chunk in range(0, length, LANES):
        # A filled-up lane repeats the last score, which leaves the maximum as it is.
        largest = maximum(load(scores, at + chunk), largest)
    shift = splat(reduce_max(largest) * scale)
    total = splat(_ZERO)
    for chunk in range(0, length, LANES):
        store(scores, at + chunk, exp(subtract(multiply(load(scores, at + chunk), splat(scale)), shift)))
        for lane in range(max(0, length - chunk), LANES):
            scores[at + chunk + lane] = _ZERO
        total = add(total, load(scores, at + chunk))
    factor = splat(_ONE / reduce_add(total))
    for chunk in range(0, length, LANES):
        store(scores, at + chunk, multiply(load(scores, at + chunk), factor))


@inlined
def _sum_values_tile(shape: Any, values: Any, out: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    """out[row, head] = the weighted sum of values, position after position."""
    num_heads, num_kv_heads, head_dim, _, stride = shape
    scores, offsets, lengths, _ = scratch
    group = num_heads // num_kv_heads
    for chunk in range(0, _longest(lengths, end - first), LANES):
        for row in range(end - first):
            if chunk < lengths[row]:
                for head in range(group):
                    at = ((first + row) * num_heads + kv_head * group + head) * head_dim
                    weights_at = (row * group + head) * stride + chunk
                    _add_weighted(out, at, values, offsets, row * stride + chunk, scores, weights_at, head_dim)


@inlined
def _add_weighted(
    out: Any, at: int, values: Any, offsets: Any, offsets_at: int, weights: Any, weights_at: int, head_dim: int
) -> None:
    """Add sixteen positions' values to one head's output, 64 dimensions at a time and then 16."""
    dim = 0
    while dim + 4 * LANES <= head_dim:
        sum0, sum1 = load(out, at + dim), load(out, at + dim + 16)
        sum2, sum3 = load(out, at + dim + 32), load(out, at + dim + 48)
        for lane in range(LANES):
            weight = load_splat(weights, weights_at + lane)
            value_at = offsets[offsets_at + lane] + dim
            sum0 = fma(weight, load(values, value_at), sum0)
            sum1 = fma(weight, load(values, value_at + 16), sum1)
            sum2 = fma(weight, load(values, value_at + 32), sum2)
            sum3 = fma(weight, load(values, value_at + 48), sum3)
        store(out, at + dim, sum0)
        store(out, at + dim + 16, sum1)
        store(out, at + dim + 32, sum2)
        store(out, at + dim + 48, sum3)
        dim += 4 * LANES
    while dim < head_dim:
        total = load(out, at + dim)
        for lane in range(LANES):
            weight = load_splat(weights, weights_at + lane)
            total = fma(weight, load(values, offsets[offsets_at + lane] + dim), total)
        store(out, at + dim, total)
        dim += LANES
