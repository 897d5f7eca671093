"""Inner products of attention: a block of queries against the same sixteen positions.

A block loads each key and value once. The block size does not change any query's sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretoken_kernels.cpu.compile import cgutils, emitted, inlined, ir, types
from foretoken_kernels.cpu.simd import (
    LANES,
    REGISTERS,
    data_pointer,
    emit_fma,
    emit_load,
    emit_plus,
    emit_row_starts,
    emit_splat,
    emit_store,
)

# Queries in the largest block.
QUERY_BLOCK = 4
# Partial sums of a block: sixteen lanes for sixteen positions of each query.
PARTIAL_FLOATS = QUERY_BLOCK * LANES * LANES
# Most vectors of a head processed together; the remaining ones are processed one at a time.
_WIDEST = 4


def _for_dims(builder: Any, head_dim: Any, wide: int, emit: Callable[[Any, int], None]) -> None:
    """Emit ``emit(first dimension, number of vectors)`` over a head, ``wide`` vectors at a time."""
    width = ir.Constant(head_dim.type, wide * LANES)
    wide_end = builder.mul(builder.udiv(head_dim, width), width)
    with cgutils.for_range_slice(builder, ir.Constant(head_dim.type, 0), wide_end, width) as (dim, _):
        emit(dim, wide)
    with cgutils.for_range_slice(builder, wide_end, head_dim, ir.Constant(head_dim.type, LANES)) as (dim, _):
        emit(dim, 1)


def _load_vectors(builder: Any, data: Any, start: Any, num_vectors: int) -> list[Any]:
    return [emit_load(builder, data, emit_plus(builder, start, LANES * vector)) for vector in range(num_vectors)]


def _dot_block(num_queries: int) -> Any:
    """Return an operation that writes ``partial[q, p, l]``.

    That is the sum of ``query[q, d] * key[p, d]`` over the d equal to l modulo 16, in ascending
    order.
    """

    def typed(
        _typing: Any, query: Any, _at: Any, _head_dim: Any, keys: Any, offsets: Any, _start: Any, out: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, at, head_dim, _, _, start, _ = args
            query_data, key_data, offset_data, out_data = (
                data_pointer(context, builder, signature.args[i], args[i]) for i in (0, 3, 4, 6)
            )
            rows = emit_row_starts(builder, at, head_dim, num_queries)

            def emit_lanes(dim: Any, num_vectors: int, first: bool) -> None:
                held = [_load_vectors(builder, query_data, builder.add(row, dim), num_vectors) for row in rows]
                with cgutils.for_range(builder, ir.Constant(start.type, LANES)) as loop:
                    offset = builder.load(builder.gep(offset_data, [builder.add(start, loop.index)]))
                    key = _load_vectors(builder, key_data, builder.add(offset, dim), num_vectors)
                    lane = builder.mul(loop.index, ir.Constant(loop.index.type, LANES))
                    for row in range(num_queries):
                        place = emit_plus(builder, lane, row * LANES * LANES)
                        total = None if first else emit_load(builder, out_data, place)
                        for mine, theirs in zip(held[row], key, strict=True):
                            product = total is None
                            total = builder.fmul(mine, theirs) if product else emit_fma(builder, mine, theirs, total)
                        emit_store(builder, out_data, place, total)

            def emit_dims(dim: Any, num_vectors: int) -> None:
                is_first = builder.icmp_unsigned("==", dim, ir.Constant(dim.type, 0))
                with builder.if_else(is_first) as (then, otherwise):
                    with then:
                        emit_lanes(dim, num_vectors, True)
                    with otherwise:
                        emit_lanes(dim, num_vectors, False)

            # The queries stay in registers.
            _for_dims(builder, head_dim, min(_WIDEST, REGISTERS // num_queries), emit_dims)
            return context.get_dummy_value()

        return types.void(query, types.intp, types.intp, keys, offsets, types.intp, out), codegen

    return emitted(typed)


def _value_block(num_queries: int) -> Any:
    """Return an operation: ``out[q, d] += weight[q, p] * value[p, d]``.

    It adds p = 0 to 15 in ascending order.
    """

    def typed(
        _typing: Any, out: Any, _at: Any, _dim: Any, values: Any, offsets: Any, _start: Any, weights: Any,
        _weights_at: Any, _stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, at, head_dim, _, _, start, _, weights_at, stride = args
            out_data, value_data, offset_data, weight_data = (
                data_pointer(context, builder, signature.args[i], args[i]) for i in (0, 3, 4, 6)
            )
            rows = emit_row_starts(builder, at, head_dim, num_queries)
            weight_rows = emit_row_starts(builder, weights_at, stride, num_queries)

            def emit_dims(dim: Any, num_vectors: int) -> None:
                places = [builder.add(row, dim) for row in rows]
                sums = [
                    [
                        cgutils.alloca_once_value(builder, v)
                        for v in _load_vectors(builder, out_data, place, num_vectors)
                    ]
                    for place in places
                ]
                with cgutils.for_range(builder, ir.Constant(start.type, LANES)) as loop:
                    offset = builder.load(builder.gep(offset_data, [builder.add(start, loop.index)]))
                    value = _load_vectors(builder, value_data, builder.add(offset, dim), num_vectors)
                    for row in range(num_queries):
                        weight = builder.load(builder.gep(weight_data, [builder.add(weight_rows[row], loop.index)]))
                        factor = emit_splat(builder, weight)
                        for total, theirs in zip(sums[row], value, strict=True):
                            builder.store(emit_fma(builder, factor, theirs, builder.load(total)), total)
                for place, totals in zip(places, sums, strict=True):
                    for vector, total in enumerate(totals):
                        emit_store(builder, out_data, emit_plus(builder, place, LANES * vector), builder.load(total))

            # The sums stay in registers, beside values and weights.
            _for_dims(builder, head_dim, min(_WIDEST, REGISTERS // 2 // num_queries), emit_dims)
            return context.get_dummy_value()

        index = types.intp
        return types.void(out, index, index, values, offsets, index, weights, index, index), codegen

    return emitted(typed)


_dot_block_1, _dot_block_2, _dot_block_4 = _dot_block(1), _dot_block(2), _dot_block(QUERY_BLOCK)
_value_block_1, _value_block_2, _value_block_4 = _value_block(1), _value_block(2), _value_block(QUERY_BLOCK)


@inlined
def block_size(num_queries: int) -> int:
    """Return the size of the largest block that ``num_queries`` queries fill: 4, 2 or 1."""
    return 4 if num_queries >= 4 else min(num_queries, 2)


@inlined
def score_block(
    size: int, query: Any, at: int, head_dim: int, keys: Any, offsets: Any, start: int, partial: Any
) -> None:
    """Compute partial sums of ``size`` queries with sixteen keys.

    Args:
        query: float32, flat; query q starts at ``at + q * head_dim``.
        keys: flat, float32, bfloat16 or float16 bits; key p starts at ``offsets[start + p]``.
        partial: float32 [4 * 256]; written. ``sum_rows`` over a query's 256 numbers gives its
            scores.
    """
    if size == 4:
        _dot_block_4(query, at, head_dim, keys, offsets, start, partial)
    elif size == 2:
        _dot_block_2(query, at, head_dim, keys, offsets, start, partial)
    else:
        _dot_block_1(query, at, head_dim, keys, offsets, start, partial)


@inlined
def value_block(  # noqa: PLR0913 - addresses of flat arrays, all inlined
    size: int, out: Any, at: int, head_dim: int, values: Any, offsets: Any, start: int,
    weights: Any, weights_at: int, stride: int,
) -> None:  # fmt: skip
    """Add sixteen weighted values to each of ``size`` rows of ``out``.

    Args:
        out: float32, flat; row q starts at ``at + q * head_dim``.
        values: flat, float32, bfloat16 or float16 bits; value p starts at ``offsets[start + p]``.
        weights: float32, flat; row q's sixteen weights start at ``weights_at + q * stride``.
    """
    if size == 4:
        _value_block_4(out, at, head_dim, values, offsets, start, weights, weights_at, stride)
    elif size == 2:
        _value_block_2(out, at, head_dim, values, offsets, start, weights, weights_at, stride)
    else:
        _value_block_1(out, at, head_dim, values, offsets, start, weights, weights_at, stride)
