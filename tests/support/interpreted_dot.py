"""Products of tiles in Triton's interpreter as on a GPU: a row's place in the tile changes no bit.

The interpreter calls NumPy, whose BLAS cuts a tile into blocks of rows. With AVX2 it sums the rows
after the last whole block in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def dot(_builder: Any, a: Any, b: Any, d: Any, _input_precision: Any, _max_num_imprecise_acc: Any) -> Any:
    """Return ``a @ b + d``, each element summed over ascending k.

    Replaces ``InterpreterBuilder.create_dot``.
    """
    from triton.runtime.interpreter import TensorHandle

    left, right = (operand.data.astype(d.data.dtype, copy=False) for operand in (a, b))
    total = np.zeros(d.data.shape, d.data.dtype)
    for k in range(left.shape[-1]):
        total += left[..., k, None] * right[..., k, None, :]
    return TensorHandle(total + d.data, d.dtype.scalar)
