"""Compute one tile of x W^T on a GPU, for the matmuls of fast and of strict mode.

A program computes BLOCK_M rows, BLOCK_N output features and one of SPLIT_K parts of the sum, so
that small matrices still keep every SM busy. The last of a tile's programs to arrive adds the parts
in their order, so the bits are the same whichever program is last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_jit: Callable[[Any], Any] = triton.jit


class MatmulWorkspace(NamedTuple):
    """Partial sums and counters of a launch.

    Kernels that may run at the same time need one workspace each.

    Attributes:
        partials: float32 [elements].
        counters: int32 [tiles]; zero between kernels.
    """

    partials: torch.Tensor
    counters: torch.Tensor


class Product(NamedTuple):
    """What a launch of ``x @ weight.T`` reads, and where it keeps partial sums."""

    x: Any
    weight: Any
    partials: Any
    counters: Any
    num_rows: Any
    in_features: Any
    split_size: Any
    x_stride: Any


@_jit
def multiply_tile(  # type: ignore[no-untyped-def]
    product,
    out,
    out_features,
    out_stride,
    first_row,
    feature_tile,
    split,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ADD: tl.constexpr,
    GATE_UP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute a tile of ``out = x @ weight.T``.

    With ADD it adds to ``out``. With GATE_UP it multiplies silu of gate's sums by up's sums.

    Args:
        first_row, feature_tile: the tile's first row, and the number of its BLOCK_N features.
        split: number of the sum's part.
        tile: number of the tile's counter and partial sums.
        WIDEN: multiply in float32.
    """
    m = first_row + tl.arange(0, BLOCK_M)
    n = feature_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = (m < product.num_rows)[:, None] & (n < out_features)[None, :]
    # Features past the end repeat the last one and are not stored: a mask would slow down the
    # loads.
    source = n
    if not EVEN_N:
        source = tl.minimum(n, out_features - 1)
    out_at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    start = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ADD:
        # The first part's sum starts with the old value.
        limit = tl.where(split == 0, product.num_rows, 0)
        start += tl.load(out_at, mask=is_output & (m < limit)[:, None], other=0.0).to(tl.float32)
    total, up_total, is_whole = sum_tile(
        product, source, out_features, start, m, split, tile, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, EVEN_K, GATE_UP, WIDEN
    )
    if is_whole:
        if GATE_UP:
            total = total / (1.0 + tl.exp(-total)) * up_total
        tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output)


@_jit
def sum_tile(  # type: ignore[no-untyped-def]  # noqa: C901 -- most branches are compile-time
    product,
    source,
    out_features,
    start,
    m,
    split,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATE_UP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return a tile's sums, the sums of ``up``, and whether this program has to store them.

    The sums of ``up`` are zero without GATE_UP. Only the program with whole sums stores them.

    Args:
        source: [BLOCK_N]; rows of the weight, all in range.
        out_features: distance in rows from gate to up.
        start: float32 [BLOCK_M, BLOCK_N]; added to this part's sums.
        m: [BLOCK_M]; rows of x.
        split, tile, WIDEN: as for multiply_tile.
    """
    is_row = (m < product.num_rows)[:, None]
    k = split * product.split_size + tl.arange(0, BLOCK_K)
    x_at = product.x + m.to(tl.int64)[:, None] * product.x_stride + k[None, :]
    weight_at = product.weight + source.to(tl.int64)[:, None] * product.in_features + k[None, :]
    up_at = weight_at + out_features.to(tl.int64) * product.in_features

    total = start
    up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, product.split_size, BLOCK_K):
        if EVEN_K:
            rows = tl.load(x_at, mask=is_row, other=0.0)
            features = tl.load(weight_at, eviction_policy="evict_first")
        else:
            rows = tl.load(x_at, mask=is_row & (k < product.in_features)[None, :], other=0.0)
            features = tl.load(
                weight_at, mask=(k < product.in_features)[None, :], other=0.0, eviction_policy="evict_first"
            )
        if WIDEN:
            rows = rows.to(tl.float32)
            features = features.to(tl.float32)
        total = tl.dot(rows, tl.trans(features), total, input_precision="ieee")
        if GATE_UP:
            if EVEN_K:
                up_features = tl.load(up_at, eviction_policy="evict_first")
            else:
                up_features = tl.load(
                    up_at, mask=(k < product.in_features)[None, :], other=0.0, eviction_policy="evict_first"
                )
            if WIDEN:
                up_features = up_features.to(tl.float32)
            up_total = tl.dot(rows, tl.trans(up_features), up_total, input_precision="ieee")
            up_at += BLOCK_K
        x_at += BLOCK_K
        weight_at += BLOCK_K
        k += BLOCK_K

    # Without parts, every program has whole sums.
    is_whole = split == SPLIT_K - 1
    if SPLIT_K > 1:
        PARTS: tl.constexpr = 2 if GATE_UP else 1
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        inside_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        begin = product.partials + tile.to(tl.int64) * (SPLIT_K * PARTS * TILE) + inside_tile
        tl.store(begin + split * (PARTS * TILE), total, mask=is_row)
        if GATE_UP:
            tl.store(begin + split * (PARTS * TILE) + TILE, up_total, mask=is_row)
        # All threads' parts are written before one thread counts this program as done. What that
        # thread reads holds for all threads after the barrier.
        tl.debug_barrier()
        is_whole = tl.atomic_add(product.counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
        if is_whole:
            # Read back every part, this program's own too. ".cg" bypasses the first-level cache,
            # which does not see other SMs' writes.
            total = tl.load(begin, mask=is_row, other=0.0, cache_modifier=".cg")
            for part in tl.static_range(1, SPLIT_K):
                total += tl.load(begin + part * (PARTS * TILE), mask=is_row, other=0.0, cache_modifier=".cg")
            if GATE_UP:
                up_total = tl.load(begin + TILE, mask=is_row, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, SPLIT_K):
                    up_total += tl.load(
                        begin + part * (PARTS * TILE) + TILE, mask=is_row, other=0.0, cache_modifier=".cg"
                    )
            tl.store(product.counters + tile, 0)
    return total, up_total, is_whole
