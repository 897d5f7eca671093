"""Compute x W^T; each output sums over the input features in ascending order, one fma each.

So a row's result does not depend on the other rows, on the number of threads, or on the CPU.
Weights are packed into panels of 32 outputs, ``[panels, in_features, 32]``, as float32, bfloat16
bits or float16 bits. The last panel is padded with zeros. Threads share the panels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.compile import cgutils, emitted, inlined, ir, types
from foretoken_kernels.cpu.simd import (
    LANES,
    REGISTERS,
    add,
    data_pointer,
    emit_fma,
    emit_load,
    emit_plus,
    emit_prefetch,
    emit_row_starts,
    emit_splat,
    emit_store,
    load,
    multiply,
    store,
)
from foretoken_kernels.cpu.vector_math import silu

PANEL = 2 * LANES
# Rows that share one pass over a panel: all of their sums stay in registers, beside weights and
# factors.
ROW_TILE = 8 if REGISTERS >= 32 else 6
# One thread's scratch, in float32 elements: enough on any CPU.
SUM_FLOATS = 8 * PANEL
# How many input features ahead a panel is prefetched: the hardware prefetcher stops at each page.
PREFETCH_DISTANCE = 64

STORE = 0
ADD = 1
SILU_AND_MULTIPLY = 2


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """Pack a [out_features, in_features] matrix into panels.

    Args:
        weight: float32, uint16 holding bfloat16 bits, or int16 holding float16 bits.

    Returns:
        The panels, flat, of the same dtype.
    """
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    packed = np.zeros((panels, in_features, PANEL), weight.dtype)
    for panel in range(panels):
        rows = weight[panel * PANEL : (panel + 1) * PANEL]
        packed[panel, :, : len(rows)] = rows.T
    return packed.reshape(-1)


def pack_gate_up(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Pack two matrices for SILU_AND_MULTIPLY: 16 outputs of ``gate``, then these of ``up``."""
    out_features, in_features = gate.shape
    paired = np.stack([gate.reshape(-1, LANES, in_features), up.reshape(-1, LANES, in_features)], axis=1)
    return pack(paired.reshape(2 * out_features, in_features))


def _emit_sums(
    builder: Any, rows: list[Any], depth: Any, w_data: Any, w_start: Any, halves: range, out_data: Any
) -> None:
    """Emit one pass over some halves of a panel; the sums of all ``rows`` stay in registers."""
    stride = ir.Constant(depth.type, PANEL)
    vector = ir.VectorType(ir.FloatType(), LANES)
    zero = ir.Constant(vector, [0.0] * LANES)
    is_float = w_data.type.pointee == ir.FloatType()
    sums = {(row, half): cgutils.alloca_once_value(builder, zero) for row in range(len(rows)) for half in halves}
    with cgutils.for_range(builder, depth) as loop:
        at = builder.add(w_start, builder.mul(loop.index, stride))
        weights = {half: emit_load(builder, w_data, emit_plus(builder, at, half * LANES)) for half in halves}
        # The second half is cached already: it shares the first half's cache lines, or (float32) it
        # was fetched one panel ago, as the next panel's is now.
        next_panel = builder.mul(depth, stride)
        ahead = emit_plus(builder, at, PREFETCH_DISTANCE * PANEL) if 0 in halves else builder.add(at, next_panel)
        # A cache line holds 32 outputs of 16 bits, or 16 of float32.
        for half in halves if is_float else halves[:1]:
            emit_prefetch(builder, w_data, emit_plus(builder, ahead, half * LANES))
        for row, start in enumerate(rows):
            factor = emit_splat(builder, builder.load(builder.gep(start, [loop.index])))
            for half in halves:
                total = sums[row, half]
                builder.store(emit_fma(builder, factor, weights[half], builder.load(total)), total)
    for (row, half), total in sums.items():
        emit_store(builder, out_data, ir.Constant(depth.type, row * PANEL + half * LANES), builder.load(total))


def panel_product(registers: int, row_tile: int) -> Any:
    """Return an operation that writes ``out`` [rows, 32]: a panel times 1 to ``row_tile`` rows.

    The rows of ``x`` are ``in_features`` apart. ``registers`` does not change the bits.
    """

    def typed(_typing: Any, x: Any, _start: Any, _in_features: Any, _rows: Any, w: Any, _w_start: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_data, w_data, out_data = (data_pointer(context, builder, signature.args[i], args[i]) for i in (0, 4, 6))
            _, start, depth, num_rows, _, w_start, _ = args
            end = builder.append_basic_block("panel.end")
            switch = builder.switch(num_rows, end)
            for count in range(1, row_tile + 1):
                case = builder.append_basic_block(f"panel.{count}")
                switch.add_case(ir.Constant(num_rows.type, count), case)
                builder.position_at_end(case)
                rows = [builder.gep(x_data, [at]) for at in emit_row_starts(builder, start, depth, count)]
                # Sums of whole panels take at most half of the registers; with more rows, the
                # halves of a panel are summed one after the other.
                for halves in [range(2)] if 2 * count <= registers // 2 else [range(1), range(1, 2)]:
                    _emit_sums(builder, rows, depth, w_data, w_start, halves, out_data)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp, types.intp, w, types.intp, out), codegen

    return emitted(typed)


_panel_product = panel_product(REGISTERS, ROW_TILE)


@inlined
def linear(  # noqa: PLR0913 - addresses of flat arrays, all inlined
    x: Any, num_rows: int, in_features: int, weight: Any, out: Any, out_features: int, mode: int, team: Any, sums: Any
) -> None:
    """Compute this thread's share of the panels of x W^T.

    Args:
        x: float32, flat [num_rows, in_features].
        weight: flat panels as packed above.
        out: float32, flat [num_rows, out_features]; for SILU_AND_MULTIPLY out_features counts the
            products.
        mode: STORE the result, ADD it to ``out``, or SILU_AND_MULTIPLY: silu of a panel's first
            half times the second.
        team: (thread, num_threads).
        sums: float32 [SUM_FLOATS], this thread's scratch.
    """
    thread, num_threads = team
    width = LANES if mode == SILU_AND_MULTIPLY else PANEL
    panels = (out_features + width - 1) // width
    tiles = (num_rows + ROW_TILE - 1) // ROW_TILE
    for panel in range(thread * panels // num_threads, (thread + 1) * panels // num_threads):
        start = panel * PANEL * in_features
        for tile in range(tiles):
            row = tile * num_rows // tiles
            rows = (tile + 1) * num_rows // tiles - row
            _panel_product(x, row * in_features, in_features, rows, weight, start, sums)
            for tile_row in range(rows):
                _finish(sums, tile_row * PANEL, out, (row + tile_row) * out_features, panel * width, out_features, mode)


@inlined
def _finish(sums: Any, at: int, out: Any, row_start: int, column: int, out_features: int, mode: int) -> None:
    """Write one row's sums of one panel to ``out``."""
    if mode == SILU_AND_MULTIPLY:
        store(out, row_start + column, multiply(silu(load(sums, at)), load(sums, at + LANES)))
        return
    for half in range(0, PANEL, LANES):
        place = row_start + column + half
        if column + half + LANES <= out_features:
            value = load(sums, at + half)
            store(out, place, add(load(out, place), value) if mode == ADD else value)
        else:
            for lane in range(max(0, out_features - column - half)):
                value = sums[at + half + lane]
                out[place + lane] = out[place + lane] + value if mode == ADD else value
