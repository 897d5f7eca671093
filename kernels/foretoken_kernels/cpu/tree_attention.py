"""Attention of ragged token rows, tree nodes included, over paged keys and values.

A row's path is processed 16 positions at a time by logical position. Block size, prefill chunks and
the boundary between prefix and tree make no difference, so a row's bits depend on its own path
alone. Adjacent rows of one sequence share loads, but not arithmetic. Threads share (tile of rows,
key head) pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretoken_kernels.cpu.attention_blocks import block_size as query_block
from foretoken_kernels.cpu.attention_blocks import score_block, value_block
from foretoken_kernels.cpu.compile import inlined
from foretoken_kernels.cpu.simd import (
    LANES,
    add,
    load,
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

# Rows of one sequence that share loads of its keys.
ROW_TILE = 8
_MASK_BITS = 64
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-3.0e38)


@inlined
def tree_attention(
    shape: Any, batch: Any, query: Any, keys: Any, values: Any, out: Any, scratch: Any, team: Any
) -> None:
    """Compute this thread's share of the attention.

    Args:
        shape: (num_heads, num_kv_heads, head_dim, block_size, score_stride); head_dim is a multiple
            of 16, and no path is longer than score_stride, itself a multiple of 16.
        batch: (num_rows, row_seqs, context_lens, masks, mask_words, tree_starts, block_tables,
            max_blocks, context_starts), flat arrays as in the reference.
        query: (float32 flat array, row stride in elements); row r's heads start at r * stride.
        keys, values: flat [num_kv_slots, num_kv_heads, head_dim], float32, bfloat16 or float16
            bits.
        out: float32, flat [num_rows, num_heads, head_dim]; written.
        scratch: this thread's (scores float32 [8 * group * score_stride], offsets int64 [8 *
            score_stride], lengths int64 [8], partial float32 [1024], queries and sums float32 [8 *
            group * head_dim] each).
        team: (thread, num_threads).
    """
    num_rows, row_seqs, context_lens, context_starts = batch[0], batch[1], batch[2], batch[8]
    thread, num_threads = team
    first = 0
    item = 0
    while first < num_rows:
        end = first + 1
        shared = context_lens[first]
        while end < num_rows and end - first < ROW_TILE and row_seqs[end] == row_seqs[first]:
            shared = min(shared, context_lens[end])
            end += 1
        shared -= context_starts[row_seqs[first]]
        for kv_head in range(shape[1]):
            if item % num_threads == thread:
                _attend_tile(shape, batch, query, keys, values, out, scratch, (first, end, shared, kv_head))
            item += 1
        first = end


@inlined
def _attend_tile(shape: Any, batch: Any, query: Any, keys: Any, values: Any, out: Any, scratch: Any, tile: Any) -> None:
    """Attend rows ``first`` to ``end`` with one key head.

    The first ``shared`` positions are the same for all of these rows. A query is a (row, head of
    the group) pair, rows first.
    """
    first, end, shared, kv_head = tile
    group = shape[0] // shape[1]
    shared_end = shared // LANES * LANES
    _find_kv_slots(shape, batch, first, end, kv_head, scratch)
    _gather_queries(shape, query, first, end, kv_head, scratch)
    longest = _longest(scratch[2], end - first)
    for chunk in range(0, longest, LANES):
        if chunk < shared_end:
            _score_queries(shape, keys, chunk, chunk, 0, (end - first) * group, scratch)
        else:
            for row in range(end - first):
                if chunk < scratch[2][row]:
                    _score_queries(shape, keys, chunk, row * shape[4] + chunk, row * group, group, scratch)
    for row in range(end - first):
        for head in range(group):
            _softmax(scratch[0], (row * group + head) * shape[4], scratch[2][row])
    for chunk in range(0, longest, LANES):
        if chunk < shared_end:
            _sum_values(shape, values, chunk, chunk, 0, (end - first) * group, scratch)
        else:
            for row in range(end - first):
                if chunk < scratch[2][row]:
                    _sum_values(shape, values, chunk, row * shape[4] + chunk, row * group, group, scratch)
    _scatter_sums(shape, out, first, end, kv_head, scratch)


@inlined
def _find_kv_slots(shape: Any, batch: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    """Write the cache offset of each position on each row's path.

    The last chunk is padded with its last offset.
    """
    _, num_kv_heads, head_dim, block_size, stride = shape
    _, row_seqs, context_lens, masks, mask_words, tree_starts, block_tables, max_blocks, context_starts = batch
    offsets, lengths = scratch[1], scratch[2]
    table = row_seqs[first] * max_blocks
    context_start = np.int64(context_starts[row_seqs[first]])
    kv_slot_size = num_kv_heads * head_dim
    head = kv_head * head_dim
    for row in range(first, end):
        start = (row - first) * stride
        length = np.int64(context_lens[row]) - context_start
        shared = np.int64(0)
        if row > first:
            shared = min(length, np.int64(context_lens[first]) - context_start)
            for i in range(shared):
                offsets[start + i] = offsets[i]
        position = shared
        while position < length:
            block, inside = (context_start + position) // block_size, (context_start + position) % block_size
            offset = (np.int64(block_tables[table + block]) * block_size + inside) * kv_slot_size + head
            for i in range(min(block_size - inside, length - position)):
                offsets[start + position + i] = offset + i * kv_slot_size
            position += block_size - inside
        tree_start = np.int64(tree_starts[row_seqs[row]])
        for word in range(mask_words):
            bits = masks[row * mask_words + word]
            node = tree_start + word * _MASK_BITS
            while bits != np.uint64(0):
                if bits & np.uint64(1):
                    kv_slot = np.int64(block_tables[table + node // block_size]) * block_size + node % block_size
                    offsets[start + length] = kv_slot * kv_slot_size + head
                    length += 1
                bits >>= np.uint64(1)
                node += 1
        lengths[row - first] = length
        for i in range(length, (length + LANES - 1) // LANES * LANES):
            offsets[start + i] = offsets[start + length - 1]


@inlined
def _longest(lengths: Any, rows: int) -> int:
    longest = np.int64(0)
    for row in range(rows):
        longest = max(longest, lengths[row])
    return int(longest)


@inlined
def _gather_queries(shape: Any, query: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    """Copy the tile's queries side by side, times head_dim ** -0.5, and clear their sums."""
    num_heads, num_kv_heads, head_dim = shape[0], shape[1], shape[2]
    query_data, query_stride = query
    queries, sums = scratch[4], scratch[5]
    size = num_heads // num_kv_heads * head_dim
    scale = splat(np.float32(1.0 / np.sqrt(np.float64(head_dim))))
    for row in range(end - first):
        at = (first + row) * query_stride + kv_head * size
        for dim in range(0, size, LANES):
            store(queries, row * size + dim, multiply(load(query_data, at + dim), scale))
            store(sums, row * size + dim, splat(_ZERO))


@inlined
def _scatter_sums(shape: Any, out: Any, first: int, end: int, kv_head: int, scratch: Any) -> None:
    num_heads, num_kv_heads, head_dim = shape[0], shape[1], shape[2]
    size = num_heads // num_kv_heads * head_dim
    for row in range(end - first):
        at = ((first + row) * num_kv_heads + kv_head) * size
        for dim in range(0, size, LANES):
            store(out, at + dim, load(scratch[5], row * size + dim))


@inlined
def _score_queries(shape: Any, keys: Any, chunk: int, offsets_at: int, query: int, count: int, scratch: Any) -> None:
    """Score ``count`` queries, from ``query`` on, with the sixteen positions at ``offsets_at``."""
    scores, offsets, _, partial, queries, _ = scratch
    head_dim, stride = shape[2], shape[4]
    while count > 0:
        size = query_block(count)
        score_block(size, queries, query * head_dim, head_dim, keys, offsets, offsets_at, partial)
        for i in range(size):
            store(scores, (query + i) * stride + chunk, sum_rows(partial, i * LANES * LANES))
        query += size
        count -= size


@inlined
def _sum_values(shape: Any, values: Any, chunk: int, offsets_at: int, query: int, count: int, scratch: Any) -> None:
    """Add sixteen weighted values to the sums of ``count`` queries, from ``query`` on."""
    scores, offsets, _, _, _, sums = scratch
    head_dim, stride = shape[2], shape[4]
    while count > 0:
        size = query_block(count)
        weights_at = query * stride + chunk
        value_block(size, sums, query * head_dim, head_dim, values, offsets, offsets_at, scores, weights_at, stride)
        query += size
        count -= size


@inlined
def _softmax(scores: Any, at: int, length: int) -> None:
    """Turn scores into weights that sum to one; zero the rest of the last chunk."""
    largest = splat(_LOWEST)
    for chunk in range(0, length, LANES):
        # A padded lane repeats the last score, so it does not change the maximum.
        largest = maximum(load(scores, at + chunk), largest)
    shift = splat(reduce_max(largest))
    total = splat(_ZERO)
    for chunk in range(0, length, LANES):
        store(scores, at + chunk, exp(subtract(load(scores, at + chunk), shift)))
        for lane in range(max(0, length - chunk), LANES):
            scores[at + chunk + lane] = _ZERO
        total = add(total, load(scores, at + chunk))
    factor = splat(_ONE / reduce_add(total))
    for chunk in range(0, length, LANES):
        store(scores, at + chunk, multiply(load(scores, at + chunk), factor))
