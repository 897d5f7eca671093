"""exp and silu of sixteen lanes, made of single IEEE operations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foretoken_kernels.cpu.compile import inlined
from foretoken_kernels.cpu.simd import (
    add,
    divide,
    fma,
    maximum,
    minimum,
    multiply,
    power_of_two,
    round_even,
    splat,
    subtract,
)

_LOG2_E = np.float32(math.log2(math.e))
# ln 2 in two parts. The first has 9 significant bits, so its product with a whole exponent is
# exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(math.log(2.0) - 0.693359375)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6, _C7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)


@inlined
def exp(x: Any) -> Any:
    """Return e to the power of each lane, clamped to [-87, 88].

    Takes out powers of two, then evaluates Taylor's polynomial.
    """
    x = minimum(maximum(x, splat(_LOWEST)), splat(_HIGHEST))
    exponent = round_even(multiply(x, splat(_LOG2_E)))
    rest = fma(exponent, splat(-_LN2_HIGH), x)
    rest = fma(exponent, splat(-_LN2_LOW), rest)
    value = fma(splat(_C7), rest, splat(_C6))
    value = fma(value, rest, splat(_C5))
    value = fma(value, rest, splat(_C4))
    value = fma(value, rest, splat(_C3))
    value = fma(value, rest, splat(_C2))
    value = fma(value, rest, splat(_ONE))
    value = fma(value, rest, splat(_ONE))
    return multiply(value, power_of_two(exponent))


@inlined
def silu(x: Any) -> Any:
    """Return x / (1 + exp(-x)) for each lane."""
    return divide(x, add(splat(_ONE), exp(subtract(splat(_ZERO), x))))
