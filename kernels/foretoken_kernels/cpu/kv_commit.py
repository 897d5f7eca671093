"""Move keys and values of accepted nodes, so that the committed path is contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.compile import compiled


@compiled
def kv_commit(cache: NDArray[Any], src_kv_slots: NDArray[np.int32], dst_kv_slots: NDArray[np.int32]) -> None:
    """Copy KV slots ``src_kv_slots`` to ``dst_kv_slots`` one by one, in every plane.

    Args:
        cache: [planes, num_kv_slots, kv_slot_size], contiguous; a plane is the keys or the values
            of one layer.
        src_kv_slots, dst_kv_slots: int32 [moves].
    """
    for plane in range(cache.shape[0]):
        for i in range(len(src_kv_slots)):
            src, dst = src_kv_slots[i], dst_kv_slots[i]
            if src != dst:
                for j in range(cache.shape[2]):
                    cache[plane, dst, j] = cache[plane, src, j]
