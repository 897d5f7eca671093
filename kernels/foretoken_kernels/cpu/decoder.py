"""One forward pass of a whole decoder, run by all threads of a team at once with a barrier after each phase.

One call a step: at one token a step, the calls into an operator library would cost as much as the arithmetic.
The arguments are tables of numbers and addresses; foretoken/models/llama.py fills them in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from foretoken_kernels.cpu.attention_blocks import PARTIAL_FLOATS
from foretoken_kernels.cpu.compile import callback, carray, cgutils, emitted, inlined, types
from foretoken_kernels.cpu.linear import ADD, PANEL, SILU_AND_MULTIPLY, STORE, linear
from foretoken_kernels.cpu.rms_norm import rms_norm
from foretoken_kernels.cpu.rope_kv_write import rope_kv_write
from foretoken_kernels.cpu.simd import LANES, load, store
from foretoken_kernels.cpu.thread_team import barrier, load_symbols, num_threads, thread_num
from foretoken_kernels.cpu.tree_attention import ROW_TILE, tree_attention

# The int64 table of a pass: first what is fixed for a model, then the batch, then buffers and scratch.
(
    NUM_LAYERS,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    VOCAB_SIZE,
    BLOCK_SIZE,
    TIED,
    HAS_BIAS,
    HAS_HEAD_NORM,
    EPSILON,
    EMBEDDING,
    HEAD,
    FINAL_NORM,
    LAYERS,
    COS_SIN,
    NUM_ROWS,
    NUM_LOGIT_ROWS,
    MASK_WORDS,
    MAX_BLOCKS,
    SCORE_STRIDE,
    TOKEN_IDS,
    POSITIONS,
    SLOT_MAPPING,
    ROW_SEQS,
    CONTEXT_LENS,
    MASKS,
    TREE_STARTS,
    BLOCK_TABLES,
    LOGIT_ROWS,
    ALL_ROWS,
    HIDDEN,
    NORMED,
    QKV_OUT,
    ATTENTION_OUT,
    GATED,
    LOGITS,
    SCORES,
    OFFSETS,
    QUERIES,
    QUERY_SUMS,
    THREAD_SCRATCH,
    NUM_FIELDS,
) = range(44)

# The int64 table of a layer: addresses.
(
    INPUT_NORM,
    QKV,
    QKV_BIAS,
    QUERY_NORM,
    KEY_NORM,
    OUTPUT,
    POST_ATTENTION_NORM,
    GATE_UP,
    DOWN,
    KEYS,
    VALUES,
    NUM_LAYER_FIELDS,
) = range(12)

# One thread's small scratch, in float32 elements: sums of a panel, partial sums of scores, lengths (as int64).
_SUMS = 8 * PANEL
_PARTIAL = PARTIAL_FLOATS
THREAD_SCRATCH_FLOATS = _SUMS + _PARTIAL + 2 * ROW_TILE
# Rows of one attention tile: what scores and offsets are sized by.
ATTENTION_ROW_TILE = ROW_TILE
_FAR = 1 << 48


def _pointer_to(dtype: Any) -> Any:
    def typed(_typing: Any, _address: Any) -> Any:
        def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], _context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), codegen

    return emitted(typed)


_float32_pointer = _pointer_to(types.float32)
_uint16_pointer = _pointer_to(types.uint16)
_int32_pointer = _pointer_to(types.int32)
_int64_pointer = _pointer_to(types.int64)
_uint64_pointer = _pointer_to(types.uint64)


@inlined
def _float32_at(address: int) -> Any:
    return carray(_float32_pointer(address), _FAR)


@inlined
def _uint16_at(address: int) -> Any:
    return carray(_uint16_pointer(address), _FAR)


@inlined
def _int32_at(address: int) -> Any:
    return carray(_int32_pointer(address), _FAR)


@inlined
def _int64_at(address: int) -> Any:
    return carray(_int64_pointer(address), _FAR)


@inlined
def _uint64_at(address: int) -> Any:
    return carray(_uint64_pointer(address), _FAR)


@emitted
def _pointer_like(_typing: Any, _address: Any, template: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(template.dtype)(types.int64, template), codegen


@inlined
def _array_like(address: int, template: Any) -> Any:
    return carray(_pointer_like(address, template), _FAR)


@inlined
def _forward(args: Any, weights: Any, cache: Any) -> None:
    """The pass. ``weights`` and ``cache`` are any arrays of the weights' and the cache's element type."""
    team = (np.int64(thread_num()), np.int64(num_threads()))
    hidden = _float32_at(args[HIDDEN])
    normed = _float32_at(args[NORMED])
    num_rows, size, epsilon = args[NUM_ROWS], args[HIDDEN_SIZE], _epsilon(args)
    sums = _float32_at(args[THREAD_SCRATCH] + 4 * THREAD_SCRATCH_FLOATS * team[0])
    layers = _int64_at(args[LAYERS])
    _embed(args, weights, hidden, team)
    barrier()
    for index in range(args[NUM_LAYERS]):
        layer = layers[index * NUM_LAYER_FIELDS : (index + 1) * NUM_LAYER_FIELDS]
        all_rows = _int32_at(args[ALL_ROWS])
        rms_norm(hidden, all_rows, num_rows, size, _float32_at(layer[INPUT_NORM]), epsilon, normed, team)
        barrier()
        _attend(args, layer, weights, cache, normed, hidden, sums, team)
        barrier()
        norm = _float32_at(layer[POST_ATTENTION_NORM])
        rms_norm(hidden, all_rows, num_rows, size, norm, epsilon, normed, team)
        barrier()
        _feed_forward(args, layer, weights, normed, hidden, sums, team)
        barrier()
    wanted = args[NUM_LOGIT_ROWS]
    rows = _int32_at(args[LOGIT_ROWS])
    rms_norm(hidden, rows, wanted, size, _float32_at(args[FINAL_NORM]), epsilon, normed, team)
    barrier()
    head = _array_like(args[HEAD], weights)
    linear(normed, wanted, size, head, _float32_at(args[LOGITS]), args[VOCAB_SIZE], STORE, team, sums)


@inlined
def _epsilon(args: Any) -> np.float32:
    return np.float32(_float32_at(args[EPSILON])[0])


@inlined
def _embed(args: Any, weights: Any, hidden: Any, team: Any) -> None:
    """Rows of the embedding; of a tied one they are columns of the head's panels."""
    table = _array_like(args[EMBEDDING], weights)
    token_ids = _int32_at(args[TOKEN_IDS])
    size, num_rows = args[HIDDEN_SIZE], args[NUM_ROWS]
    for row in range(team[0] * num_rows // team[1], (team[0] + 1) * num_rows // team[1]):
        token = np.int64(token_ids[row])
        if args[TIED]:
            start = token // PANEL * PANEL * size + token % PANEL
            for i in range(size):
                hidden[row * size + i] = _widen(table[start + i * PANEL])
        else:
            for i in range(0, size, LANES):
                store(hidden, row * size + i, load(table, token * size + i))


@emitted
def _widen(_typing: Any, value: Any) -> Any:
    """float32 as it is, uint16 as the bits of a bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        wide = builder.zext(args[0], cgutils.int32_t)
        shifted = builder.shl(wide, cgutils.int32_t(16))
        return builder.bitcast(shifted, context.get_value_type(types.float32))

    return types.float32(value), codegen


@inlined
def _attend(args: Any, layer: Any, weights: Any, cache: Any, normed: Any, hidden: Any, sums: Any, team: Any) -> None:
    num_heads, num_kv_heads, head_dim = args[NUM_HEADS], args[NUM_KV_HEADS], args[HEAD_DIM]
    num_rows, size = args[NUM_ROWS], args[HIDDEN_SIZE]
    qkv, attended = _float32_at(args[QKV_OUT]), _float32_at(args[ATTENTION_OUT])
    keys, values = _array_like(layer[KEYS], cache), _array_like(layer[VALUES], cache)
    qkv_size = (num_heads + 2 * num_kv_heads) * head_dim
    linear(normed, num_rows, size, _array_like(layer[QKV], weights), qkv, qkv_size, STORE, team, sums)
    barrier()
    head_weights = (
        _float32_at(layer[QKV_BIAS]),
        _float32_at(layer[QUERY_NORM]),
        _float32_at(layer[KEY_NORM]),
        args[HAS_BIAS] != 0,
        args[HAS_HEAD_NORM] != 0,
        _epsilon(args),
    )
    places = (num_rows, _int32_at(args[POSITIONS]), _int32_at(args[SLOT_MAPPING]))
    shape = (num_heads, num_kv_heads, head_dim)
    rope_kv_write(shape, places, qkv, head_weights, _float32_at(args[COS_SIN]), keys, values, team)
    barrier()
    batch = (
        num_rows,
        _int32_at(args[ROW_SEQS]),
        _int32_at(args[CONTEXT_LENS]),
        _uint64_at(args[MASKS]),
        args[MASK_WORDS],
        _int32_at(args[TREE_STARTS]),
        _int32_at(args[BLOCK_TABLES]),
        args[MAX_BLOCKS],
    )
    stride = args[SCORE_STRIDE]
    queries = ROW_TILE * (num_heads // num_kv_heads)
    small = args[THREAD_SCRATCH] + 4 * THREAD_SCRATCH_FLOATS * team[0]
    scratch = (
        _float32_at(args[SCORES] + 4 * queries * stride * team[0]),
        _int64_at(args[OFFSETS] + 8 * ROW_TILE * stride * team[0]),
        _int64_at(small + 4 * (_SUMS + _PARTIAL)),
        _float32_at(small + 4 * _SUMS),
        _float32_at(args[QUERIES] + 4 * queries * head_dim * team[0]),
        _float32_at(args[QUERY_SUMS] + 4 * queries * head_dim * team[0]),
    )
    paged_shape = (num_heads, num_kv_heads, head_dim, args[BLOCK_SIZE], stride)
    tree_attention(paged_shape, batch, (qkv, qkv_size), keys, values, attended, scratch, team)
    barrier()
    output = _array_like(layer[OUTPUT], weights)
    linear(attended, num_rows, num_heads * head_dim, output, hidden, size, ADD, team, sums)


@inlined
def _feed_forward(args: Any, layer: Any, weights: Any, normed: Any, hidden: Any, sums: Any, team: Any) -> None:
    num_rows, size, middle = args[NUM_ROWS], args[HIDDEN_SIZE], args[INTERMEDIATE_SIZE]
    gated = _float32_at(args[GATED])
    gate_up = _array_like(layer[GATE_UP], weights)
    linear(normed, num_rows, size, gate_up, gated, middle, SILU_AND_MULTIPLY, team, sums)
    barrier()
    linear(gated, num_rows, middle, _array_like(layer[DOWN], weights), hidden, size, ADD, team, sums)


def _forward_float32(data: Any) -> None:
    args = carray(_as_int64(data), NUM_FIELDS)
    floats = _float32_at(args[HIDDEN])
    _forward(args, floats, floats)


def _forward_bfloat16_weights(data: Any) -> None:
    args = carray(_as_int64(data), NUM_FIELDS)
    _forward(args, _uint16_at(args[HEAD]), _float32_at(args[HIDDEN]))


def _forward_bfloat16(data: Any) -> None:
    args = carray(_as_int64(data), NUM_FIELDS)
    halves = _uint16_at(args[HEAD])
    _forward(args, halves, halves)


@emitted
def _as_int64(_typing: Any, _pointer: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.voidptr), codegen


@cache
def forward_function(bfloat16_weights: bool, bfloat16_cache: bool) -> Any:
    """The compiled pass for these element types; float32 weights with a bfloat16 cache do not occur."""
    load_symbols()
    assert bfloat16_weights or not bfloat16_cache
    if bfloat16_cache:
        return callback(_forward_bfloat16)
    return callback(_forward_bfloat16_weights if bfloat16_weights else _forward_float32)
