# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device functions for draft trees: read a request; order values and their ids by keys."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken_kernels.gpu import draft_tree_state as state

_MAX_NODES = tl.constexpr(state.MAX_NODES)
_MAX_DEPTH = tl.constexpr(state.MAX_DEPTH)
_MAX_BRANCHES = tl.constexpr(state.MAX_BRANCHES)
_TEMPERATURE = tl.constexpr(state.TEMPERATURE)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)
_LOW_BITS = tl.constexpr(0x7FFFFFFF)
NEVER = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
# Below every key.
NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def order_of(values):
    """Return int32 in the order of float32 values, which must not be NaN; -0.0 counts as 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LOW_BITS)


@triton.jit
def make_keys(values, ids):
    """Return int64 keys that order values, then ids: the lower id has the larger key.

    -inf has no key.
    """
    keys = (order_of(values).to(tl.int64) << 32) | (ids ^ _LOW_BITS).to(tl.int64)
    return tl.where(values > NEVER, keys, NO_KEY)


@triton.jit
def ids_of_keys(keys):
    return (keys & _LOW_BITS).to(tl.int32) ^ _LOW_BITS


@triton.jit
def values_of_keys(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _LOW_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def finite_flag(value):
    """Return 1 for a finite scalar, else 0; not for NaN.

    Triton's interpreter cannot broadcast a comparison of float scalars.
    """
    return ((value > NEVER) & (value < INFINITY)).to(tl.int32)


@triton.jit
def take_best(keys, K: tl.constexpr):
    """Return int64 [K]: the K largest keys, in order."""
    lanes = tl.arange(0, K)
    best_keys = tl.full([K], NO_KEY, tl.int64)
    for lane in range(K):
        best = tl.max(keys, axis=0)
        best_keys = tl.where(lanes == lane, best, best_keys)
        keys = tl.where(keys == best, NO_KEY, keys)
    return best_keys


@triton.jit
def temperature_of(requests, tree):
    return tl.load(requests + tree * _NUM_COLUMNS + _TEMPERATURE).to(tl.float32, bitcast=True)


@triton.jit
def branches_of(requests, tree, level, K: tl.constexpr):
    """Return how many children a node of ``level`` has at most: the beams of the tree's next level.

    It is 0 if the tree ends at this level.
    """
    request = requests + tree * _NUM_COLUMNS
    depth = tl.minimum(tl.load(request + _MAX_DEPTH), tl.load(request + _MAX_NODES) - 1)
    return tl.where(level < depth, tl.maximum(tl.minimum(tl.load(request + _MAX_BRANCHES), K), 0), 0)


@triton.jit
def children_of(requests, fed_counts, fed_stride, tree, beam, level, IS_ROOT: tl.constexpr, K: tl.constexpr):
    """Return how many children a row of logits has at most: 0 for a row without a beam."""
    most = branches_of(requests, tree, level, K)
    if not IS_ROOT:
        fed = fed_counts + tree * fed_stride + level
        most = tl.where(beam < tl.load(fed + 1) - tl.load(fed), most, 0)
    return most
