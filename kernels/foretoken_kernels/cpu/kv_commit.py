"""Move keys and values of accepted nodes, so that the committed path is contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.compile import compiled


@compiled
def kv_commit(cache: NDArray[Any], src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
    """Copy KV slot ``src_slots[i]`` to ``dst_slots[i]`` in every plane, in ascending i.

    Args:
        cache: [planes, slots, slot_size], contiguous; a plane is the keys or the values of one
            layer.
        src_slots, dst_slots: int32 [moves].
    """
    for plane in range(cache.shape[0]):
        for i in range(len(src_slots)):
            src, dst = src_slots[i], dst_slots[i]
            if src != dst:
                for j in range(cache.shape[2]):
                    cache[plane, dst, j] = cache[plane, src, j]
