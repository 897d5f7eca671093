"""Products of tiles in Triton's interpreter as a GPU makes them: a row's bits do not depend on its place in the tile.

The interpreter calls NumPy, whose BLAS cuts a tile into blocks of rows. With AVX2 those left over behind the last whole
block are summed in another order than the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def dot(_builder: Any, a: Any, b: Any, d: Any, _input_precision: Any, _max_num_imprecise_acc: Any) -> Any:
    """``a @ b + d``: each element summed by itself, over ascending k. In place of ``InterpreterBuilder.create_dot``."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (operand.data.astype(d.data.dtype, copy=False) for operand in (a, b))
    total = np.zeros(d.data.shape, d.data.dtype)
    for k in range(left.shape[-1]):
        total += left[..., k, None] * right[..., k, None, :]
    return TensorHandle(total + d.data, d.dtype.scalar)
