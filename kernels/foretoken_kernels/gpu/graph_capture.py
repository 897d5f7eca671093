"""Capturing launches as a CUDA graph, by hand: torch.cuda.graph collects garbage first, which takes longer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(launch: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What ``launch`` enqueues on the current stream, which must not be the default one.

    Garbage is not collected meanwhile: another graph in it cannot be destroyed while a stream is captured, and the
    attempt would end the capture.

    Args:
        pool: of torch.cuda.graph_pool_handle, for the memory that is allocated meanwhile; None: one of its own.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        # Other threads may use the device as they like.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph
