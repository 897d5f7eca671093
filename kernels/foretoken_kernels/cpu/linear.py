"""y = x W^T with every output summed over the input features in ascending order, one fma each.

A row's result therefore does not depend on how many rows run beside it, on the number of threads, nor on the CPU.
Weights are packed into panels of 32 outputs, ``[panels, in_features, 32]``, in float32 or as bfloat16 bits; the last
panel is filled up with zeros. Threads share the panels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.compile import cgutils, emitted, inlined, ir, types
from foretoken_kernels.cpu.simd import (
    LANES,
    add,
    data_pointer,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    load,
    multiply,
    store,
)
from foretoken_kernels.cpu.vector_math import silu

PANEL = 2 * LANES
# Rows that share one pass over a panel: their sums fill half of 32 vector registers.
ROW_TILE = 8
# Input features that a panel is asked for ahead of its use: the hardware's own guess stops at each page.
PREFETCH_DISTANCE = 64

STORE = 0
ADD = 1
SILU_AND_MULTIPLY = 2


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """Panels of a [out_features, in_features] matrix (float32, or uint16 holding bfloat16), flat."""
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    packed = np.zeros((panels, in_features, PANEL), weight.dtype)
    for panel in range(panels):
        rows = weight[panel * PANEL : (panel + 1) * PANEL]
        packed[panel, :, : len(rows)] = rows.T
    return packed.reshape(-1)


def pack_gate_up(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Panels with 16 outputs of ``gate`` beside the same 16 of ``up``, for SILU_AND_MULTIPLY."""
    out_features, in_features = gate.shape
    paired = np.stack([gate.reshape(-1, LANES, in_features), up.reshape(-1, LANES, in_features)], axis=1)
    return pack(paired.reshape(2 * out_features, in_features))


def _panel_product(num_rows: int) -> Any:
    """The micro-kernel for ``num_rows`` rows and one panel; its 2 * num_rows sums stay in registers."""

    def typed(_typing: Any, x: Any, x_start: Any, x_stride: Any, w: Any, w_start: Any, depth: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_data = data_pointer(context, builder, signature.args[0], args[0])
            w_data = data_pointer(context, builder, signature.args[3], args[3])
            out_data = data_pointer(context, builder, signature.args[6], args[6])
            _, x_start, x_stride, _, w_start, depth, _ = args
            stride = ir.Constant(x_stride.type, PANEL)
            vector = ir.VectorType(ir.FloatType(), LANES)
            zero = ir.Constant(vector, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2 * num_rows)]
            rows = [
                builder.gep(x_data, [builder.add(x_start, builder.mul(x_stride, ir.Constant(x_stride.type, row)))])
                for row in range(num_rows)
            ]
            with cgutils.for_range(builder, depth) as loop:
                at = builder.add(w_start, builder.mul(loop.index, stride))
                left = emit_load(builder, w_data, at)
                right = emit_load(builder, w_data, builder.add(at, ir.Constant(at.type, LANES)))
                ahead = builder.add(at, ir.Constant(at.type, PREFETCH_DISTANCE * PANEL))
                emit_prefetch(builder, w_data, ahead)
                if signature.args[3].dtype == types.float32:
                    emit_prefetch(builder, w_data, builder.add(ahead, ir.Constant(at.type, LANES)))
                for row in range(num_rows):
                    factor = emit_splat(builder, builder.load(builder.gep(rows[row], [loop.index])))
                    for total, weights in ((sums[2 * row], left), (sums[2 * row + 1], right)):
                        builder.store(emit_fma(builder, factor, weights, builder.load(total)), total)
            for index, total in enumerate(sums):
                place = builder.gep(out_data, [ir.Constant(ir.IntType(64), index * LANES)])
                builder.store(builder.load(total), builder.bitcast(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp, w, types.intp, types.intp, out), codegen

    return emitted(typed)


_panel_product_1 = _panel_product(1)
_panel_product_2 = _panel_product(2)
_panel_product_3 = _panel_product(3)
_panel_product_4 = _panel_product(4)
_panel_product_5 = _panel_product(5)
_panel_product_6 = _panel_product(6)
_panel_product_7 = _panel_product(7)
_panel_product_8 = _panel_product(ROW_TILE)


@inlined
def linear(
    x: Any, num_rows: int, in_features: int, weight: Any, out: Any, out_features: int, mode: int, team: Any, sums: Any
) -> None:
    """This thread's share of the panels.

    Args:
        x: float32, flat [num_rows up to a multiple of 8, in_features]; the rows past num_rows are read and ignored.
        weight: flat panels as packed above.
        out: float32, flat [num_rows, out_features]; for SILU_AND_MULTIPLY out_features counts the products.
        mode: STORE the result, ADD it to ``out``, or SILU_AND_MULTIPLY: silu of a panel's first half times the second.
        team: (thread, num_threads).
        sums: float32 [8 * 32], this thread's scratch.
    """
    thread, num_threads = team
    width = LANES if mode == SILU_AND_MULTIPLY else PANEL
    panels = (out_features + width - 1) // width
    for panel in range(thread * panels // num_threads, (thread + 1) * panels // num_threads):
        start = panel * PANEL * in_features
        for row in range(0, num_rows, ROW_TILE):
            rows = min(ROW_TILE, num_rows - row)
            x_start = row * in_features
            if rows == 1:
                _panel_product_1(x, x_start, in_features, weight, start, in_features, sums)
            elif rows == 2:
                _panel_product_2(x, x_start, in_features, weight, start, in_features, sums)
            elif rows == 3:
                _panel_product_3(x, x_start, in_features, weight, start, in_features, sums)
            elif rows == 4:
                _panel_product_4(x, x_start, in_features, weight, start, in_features, sums)
            elif rows == 5:
                _panel_product_5(x, x_start, in_features, weight, start, in_features, sums)
            elif rows == 6:
                _panel_product_6(x, x_start, in_features, weight, start, in_features, sums)
            elif rows == 7:
                _panel_product_7(x, x_start, in_features, weight, start, in_features, sums)
            else:
                _panel_product_8(x, x_start, in_features, weight, start, in_features, sums)
            for tile_row in range(rows):
                _finish(sums, tile_row * PANEL, out, (row + tile_row) * out_features, panel * width, out_features, mode)


@inlined
def _finish(sums: Any, at: int, out: Any, row_start: int, column: int, out_features: int, mode: int) -> None:
    """Bring one row's sums of one panel to ``out``."""
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
