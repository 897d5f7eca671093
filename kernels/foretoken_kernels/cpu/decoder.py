"""Run one forward pass of a decoder or a draft head as one call on all threads of a team.

With one token a step, calls into an operator library would cost as much as the arithmetic. So a
pass is a program: a table of operations over whole rows, with a barrier between two operations.
foretoken/models/program.py writes it. A second table holds the batch and the buffers; operations
name a buffer by its field in that table.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.addresses import (
    array_like,
    as_int64,
    float32_at,
    int16_at,
    int32_at,
    int64_at,
    uint16_at,
    uint64_at,
)
from foretoken_kernels.cpu.attention_blocks import PARTIAL_FLOATS
from foretoken_kernels.cpu.compile import callback, carray, cgutils, compiled, emitted, inlined, ir, types
from foretoken_kernels.cpu.linear import ADD, PANEL, SILU_AND_MULTIPLY, STORE, SUM_FLOATS, linear
from foretoken_kernels.cpu.rms_norm import rms_norm
from foretoken_kernels.cpu.rope_kv_write import rope_kv_write
from foretoken_kernels.cpu.simd import HAS_FLOAT16, LANES, load, splat, store
from foretoken_kernels.cpu.thread_team import barrier, load_symbols, num_threads, thread_num
from foretoken_kernels.cpu.tree_attention import ROW_TILE, tree_attention

# Fields of a pass's int64 table: model constants, the program, the batch, then buffers and scratch.
(
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    BLOCK_SIZE,
    EPSILON,
    COS_SIN,
    OPERATIONS,
    NUM_OPERATIONS,
    NUM_ROWS,
    NUM_LOGIT_ROWS,
    MASK_WORDS,
    MAX_BLOCKS,
    SCORE_STRIDE,
    TOKEN_IDS,
    POSITIONS,
    KV_SLOTS,
    ROW_SEQS,
    CONTEXT_LENS,
    MASKS,
    TREE_STARTS,
    BLOCK_TABLES,
    LOGIT_ROWS,
    CONTEXT_STARTS,
    ALL_ROWS,
    GIVEN,
    HIDDEN,
    EMBEDDED,
    NORMED,
    QKV_OUT,
    ATTENTION_OUT,
    GATED,
    OUTPUT,
    CAPTURED,
    LOGITS,
    SCORES,
    OFFSETS,
    QUERIES,
    QUERY_SUMS,
    THREAD_SCRATCH,
    NUM_FIELDS,
) = range(40)

# Fields of an operation's int64 table. X and OUT name buffers: fields of the table above. Row r of
# a buffer is the SIZE elements from its offset + r * its stride on.
(CODE, X, X_STRIDE, X_OFFSET, OUT, OUT_STRIDE, OUT_OFFSET, SIZE, ROWS, WEIGHT, ELEMENT, MODE, NUM_OPERATION_FIELDS) = (
    range(13)
)

# Element types: what ELEMENT says of a matrix, and types of a KV cache.
FLOAT32, BFLOAT16, FLOAT16 = range(3)

# Operation codes. What each reads besides X:
# EMBED: WEIGHT, the [vocabulary, SIZE] embedding, or a head's panels (MODE 1). Rows at position
# ROWS become zeros.
# COPY: nothing. FILL: WEIGHT, one float32 row for all rows.
# NORM: WEIGHT, float32 [SIZE].
# LINEAR: WEIGHT, panels, from SIZE features to OUT_STRIDE features; MODE as in linear.py.
# X has no gaps.
# ROPE, ATTEND: WEIGHT, the table of an attention layer; on QKV_OUT and ATTENTION_OUT.
EMBED, COPY, FILL, NORM, LINEAR, ROPE, ATTEND = range(7)

# Which rows an operation processes. EVERY_ROW: all. GATHERED: the rows of X whose logits are
# needed; OUT holds them side by side. WANTED: the same, side by side in both buffers; ATTEND then
# processes all rows, but none if no logits are needed.
EVERY_ROW, GATHERED, WANTED = range(3)

# Fields of an attention layer's int64 table: addresses; 0 where there is no bias or norm.
(QKV_BIAS, QUERY_NORM, KEY_NORM, KEYS, VALUES, NUM_ATTENTION_FIELDS) = range(6)

# One thread's small scratch, in float32 elements: sums of a panel, partial sums of scores, and
# lengths (as int64).
THREAD_SCRATCH_FLOATS = SUM_FLOATS + PARTIAL_FLOATS + 2 * ROW_TILE
# Rows of one attention tile; it determines the size of scores and offsets.
ATTENTION_ROW_TILE = ROW_TILE


@compiled
def set_batch(  # noqa: PLR0913 - the fields of a ForwardBatch
    args: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    kv_slots: NDArray[np.int32],
    row_seqs: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    masks: NDArray[np.uint64],
    tree_starts: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    logit_rows: NDArray[np.int32],
    context_starts: NDArray[np.int32],
) -> None:
    """Write the sizes and addresses of a batch's arrays to the table of a pass.

    The arrays must have no gaps. Compiled, because asking numpy for eleven addresses takes as long
    as a small head's matrices.
    """
    args[NUM_ROWS], args[NUM_LOGIT_ROWS] = len(token_ids), len(logit_rows)
    args[MASK_WORDS], args[MAX_BLOCKS] = masks.shape[1], block_tables.shape[1]
    args[TOKEN_IDS], args[POSITIONS] = token_ids.ctypes.data, positions.ctypes.data
    args[KV_SLOTS], args[ROW_SEQS] = kv_slots.ctypes.data, row_seqs.ctypes.data
    args[CONTEXT_LENS], args[MASKS] = context_lens.ctypes.data, masks.ctypes.data
    args[TREE_STARTS], args[BLOCK_TABLES] = tree_starts.ctypes.data, block_tables.ctypes.data
    args[LOGIT_ROWS], args[CONTEXT_STARTS] = logit_rows.ctypes.data, context_starts.ctypes.data


@inlined
def _forward(args: Any, cache: Any) -> None:
    """Run the pass. ``cache`` is any array of the KV cache's element type."""
    team = (np.int64(thread_num()), np.int64(num_threads()))
    operations = int64_at(args[OPERATIONS])
    sums = float32_at(args[THREAD_SCRATCH] + 4 * THREAD_SCRATCH_FLOATS * team[0])
    for index in range(args[NUM_OPERATIONS]):
        if index > 0:
            barrier()
        operation = operations[index * NUM_OPERATION_FIELDS : (index + 1) * NUM_OPERATION_FIELDS]
        code = operation[CODE]
        if code == LINEAR:
            if operation[ELEMENT] == BFLOAT16:
                _linear(args, operation, uint16_at(operation[WEIGHT]), sums, team)
            elif HAS_FLOAT16 and operation[ELEMENT] == FLOAT16:
                _linear(args, operation, int16_at(operation[WEIGHT]), sums, team)
            else:
                _linear(args, operation, float32_at(operation[WEIGHT]), sums, team)
        elif code == NORM:
            _norm(args, operation, team)
        elif code == ROPE:
            _rope(args, operation, cache, team)
        elif code == ATTEND:
            _attend(args, operation, cache, team)
        elif code == EMBED:
            if operation[ELEMENT] == BFLOAT16:
                _embed(args, operation, uint16_at(operation[WEIGHT]), team)
            elif HAS_FLOAT16 and operation[ELEMENT] == FLOAT16:
                _embed(args, operation, int16_at(operation[WEIGHT]), team)
            else:
                _embed(args, operation, float32_at(operation[WEIGHT]), team)
        else:
            _copy(args, operation, team)


@inlined
def _epsilon(args: Any) -> np.float32:
    return np.float32(float32_at(args[EPSILON])[0])


@inlined
def _linear(args: Any, operation: Any, weight: Any, sums: Any, team: Any) -> None:
    num_rows = args[NUM_ROWS] if operation[ROWS] == EVERY_ROW else args[NUM_LOGIT_ROWS]
    x, out = float32_at(args[operation[X]]), float32_at(args[operation[OUT]])
    in_features, out_features, mode = operation[SIZE], operation[OUT_STRIDE], operation[MODE]
    # A constant mode lets the compiler test it once an operation instead of once a row of a panel.
    if mode == STORE:
        linear(x, num_rows, in_features, weight, out, out_features, STORE, team, sums)
    elif mode == ADD:
        linear(x, num_rows, in_features, weight, out, out_features, ADD, team, sums)
    else:
        linear(x, num_rows, in_features, weight, out, out_features, SILU_AND_MULTIPLY, team, sums)


@inlined
def _norm(args: Any, operation: Any, team: Any) -> None:
    num_rows = args[NUM_ROWS] if operation[ROWS] == EVERY_ROW else args[NUM_LOGIT_ROWS]
    rows = int32_at(args[LOGIT_ROWS] if operation[ROWS] == GATHERED else args[ALL_ROWS])
    x = (float32_at(args[operation[X]]), operation[X_STRIDE], operation[X_OFFSET])
    out = (float32_at(args[operation[OUT]]), operation[OUT_STRIDE], operation[OUT_OFFSET])
    rms_norm(x, rows, num_rows, operation[SIZE], float32_at(operation[WEIGHT]), _epsilon(args), out, team)


@inlined
def _copy(args: Any, operation: Any, team: Any) -> None:
    """Run COPY or FILL."""
    num_rows = args[NUM_ROWS] if operation[ROWS] == EVERY_ROW else args[NUM_LOGIT_ROWS]
    rows = int32_at(args[LOGIT_ROWS] if operation[ROWS] == GATHERED else args[ALL_ROWS])
    x = float32_at(operation[WEIGHT] if operation[CODE] == FILL else args[operation[X]])
    out = float32_at(args[operation[OUT]])
    for row in range(team[0] * num_rows // team[1], (team[0] + 1) * num_rows // team[1]):
        x_at = operation[X_OFFSET] + np.int64(rows[row]) * operation[X_STRIDE]
        out_at = operation[OUT_OFFSET] + row * operation[OUT_STRIDE]
        for i in range(0, operation[SIZE], LANES):
            store(out, out_at + i, load(x, x_at + i))


@inlined
def _embed(args: Any, operation: Any, table: Any, team: Any) -> None:
    """Write rows of the embedding. With tied weights they are columns of the head's panels."""
    token_ids, positions = int32_at(args[TOKEN_IDS]), int32_at(args[POSITIONS])
    out = float32_at(args[operation[OUT]])
    size, num_rows = operation[SIZE], args[NUM_ROWS]
    for row in range(team[0] * num_rows // team[1], (team[0] + 1) * num_rows // team[1]):
        token = np.int64(token_ids[row])
        at = operation[OUT_OFFSET] + row * operation[OUT_STRIDE]
        if positions[row] == operation[ROWS]:
            for i in range(0, size, LANES):
                store(out, at + i, splat(np.float32(0.0)))
        elif operation[MODE]:
            start = token // PANEL * PANEL * size + token % PANEL
            for i in range(size):
                out[at + i] = _widen(table[start + i * PANEL])
        else:
            for i in range(0, size, LANES):
                store(out, at + i, load(table, token * size + i))


@emitted
def _widen(_typing: Any, value: Any) -> Any:
    """Convert bfloat16 bits (uint16) or float16 bits (int16) to float32.

    Return a float32 as it is.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        if signature.args[0] == types.int16:
            half = builder.bitcast(args[0], ir.HalfType())
            return builder.fpext(half, context.get_value_type(types.float32))
        wide = builder.zext(args[0], cgutils.int32_t)
        shifted = builder.shl(wide, cgutils.int32_t(16))
        return builder.bitcast(shifted, context.get_value_type(types.float32))

    return types.float32(value), codegen


@inlined
def _rope(args: Any, operation: Any, cache: Any, team: Any) -> None:
    attention = int64_at(operation[WEIGHT])
    head_weights = (
        float32_at(attention[QKV_BIAS]),
        float32_at(attention[QUERY_NORM]),
        float32_at(attention[KEY_NORM]),
        attention[QKV_BIAS] != 0,
        attention[QUERY_NORM] != 0,
        _epsilon(args),
    )
    places = (args[NUM_ROWS], int32_at(args[POSITIONS]), int32_at(args[KV_SLOTS]))
    shape = (args[NUM_HEADS], args[NUM_KV_HEADS], args[HEAD_DIM])
    keys, values = array_like(attention[KEYS], cache), array_like(attention[VALUES], cache)
    cos_sin = float32_at(args[COS_SIN])
    rope_kv_write(shape, places, float32_at(args[QKV_OUT]), head_weights, cos_sin, keys, values, team)


@inlined
def _attend(args: Any, operation: Any, cache: Any, team: Any) -> None:
    attention = int64_at(operation[WEIGHT])
    num_heads, num_kv_heads, head_dim = args[NUM_HEADS], args[NUM_KV_HEADS], args[HEAD_DIM]
    num_rows = args[NUM_ROWS] if operation[ROWS] == EVERY_ROW or args[NUM_LOGIT_ROWS] > 0 else 0
    batch = (
        num_rows,
        int32_at(args[ROW_SEQS]),
        int32_at(args[CONTEXT_LENS]),
        uint64_at(args[MASKS]),
        args[MASK_WORDS],
        int32_at(args[TREE_STARTS]),
        int32_at(args[BLOCK_TABLES]),
        args[MAX_BLOCKS],
        int32_at(args[CONTEXT_STARTS]),
    )
    stride = args[SCORE_STRIDE]
    queries = ROW_TILE * (num_heads // num_kv_heads)
    small = args[THREAD_SCRATCH] + 4 * THREAD_SCRATCH_FLOATS * team[0]
    scratch = (
        float32_at(args[SCORES] + 4 * queries * stride * team[0]),
        int64_at(args[OFFSETS] + 8 * ROW_TILE * stride * team[0]),
        int64_at(small + 4 * (SUM_FLOATS + PARTIAL_FLOATS)),
        float32_at(small + 4 * SUM_FLOATS),
        float32_at(args[QUERIES] + 4 * queries * head_dim * team[0]),
        float32_at(args[QUERY_SUMS] + 4 * queries * head_dim * team[0]),
    )
    shape = (num_heads, num_kv_heads, head_dim, args[BLOCK_SIZE], stride)
    query = (float32_at(args[QKV_OUT]), (num_heads + 2 * num_kv_heads) * head_dim)
    keys, values = array_like(attention[KEYS], cache), array_like(attention[VALUES], cache)
    tree_attention(shape, batch, query, keys, values, float32_at(args[ATTENTION_OUT]), scratch, team)


def _forward_float32(data: Any) -> None:
    args = carray(as_int64(data), NUM_FIELDS)
    _forward(args, float32_at(args[HIDDEN]))


def _forward_bfloat16(data: Any) -> None:
    args = carray(as_int64(data), NUM_FIELDS)
    _forward(args, uint16_at(args[HIDDEN]))


def _forward_float16(data: Any) -> None:
    args = carray(as_int64(data), NUM_FIELDS)
    _forward(args, int16_at(args[HIDDEN]))


@cache
def forward_function(element: int) -> Any:
    """Return the compiled pass for a KV cache of this element type.

    The matrices' element types may differ: each operation states its own.
    """
    load_symbols()
    passes = {FLOAT32: _forward_float32, BFLOAT16: _forward_bfloat16, FLOAT16: _forward_float16}
    return callback(passes[element])
