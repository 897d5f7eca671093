"""Capture launches as a CUDA graph.

torch.cuda.graph would collect garbage first, which takes longer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(launch: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture what ``launch`` enqueues on the current stream, which must not be the default one.

    Garbage collection is off during the capture: if it destroyed another graph, the capture would
    fail.

    Args:
        pool: memory pool for allocations during the capture (torch.cuda.graph_pool_handle); None: a
            new one.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        # Other threads may use the device during the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph
