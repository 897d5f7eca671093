"""Root-mean-square norm of token rows. Threads share the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretoken_kernels.cpu.compile import inlined
from foretoken_kernels.cpu.simd import LANES, fma, load, multiply, reduce_add, splat, store

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inlined
def normalize(x: Any, at: int, size: int, weight: Any, epsilon: np.float32, out: Any, out_at: int) -> None:
    """Normalize one vector of ``size`` elements, a multiple of 16; ``out`` may be ``x``."""
    squares = splat(_ZERO)
    for i in range(0, size, LANES):
        value = load(x, at + i)
        squares = fma(value, value, squares)
    mean = reduce_add(squares) / np.float32(size)
    factor = splat(_ONE / np.sqrt(mean + epsilon))
    for i in range(0, size, LANES):
        store(out, out_at + i, multiply(load(weight, i), multiply(load(x, at + i), factor)))


@inlined
def rms_norm(
    x: Any, rows: Any, num_rows: int, size: int, weight: Any, epsilon: np.float32, out: Any, team: Any
) -> None:
    """Compute this thread's share of ``out[i] = norm(x[rows[i]]) * weight``.

    Args:
        x: (float32 flat array, stride, offset in elements); row r is the ``size`` elements from
            offset + r * stride on.
        rows: int32 [num_rows].
        weight: float32 [size].
        out: a tuple like ``x``; written. May be ``x`` where ``rows[i] == i``.
        team: (thread, num_threads).
    """
    thread, num_threads = team
    x_data, x_stride, x_offset = x
    out_data, out_stride, out_offset = out
    for i in range(thread * num_rows // num_threads, (thread + 1) * num_rows // num_threads):
        x_at = x_offset + np.int64(rows[i]) * x_stride
        normalize(x_data, x_at, size, weight, epsilon, out_data, out_offset + i * out_stride)
