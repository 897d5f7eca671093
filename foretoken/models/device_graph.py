"""CUDA graphs of launches: captured when a shape is first met, replayed from then on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from foretoken_kernels.gpu.graph_capture import captured

_log = logging.getLogger(__name__)


class DeviceGraphs:
    """Graphs by what they were captured for. Everything that they touch must stay where it is.

    Args:
        enabled: if not, every call launches its kernels one by one: the same code.

    Attributes:
        generation: how often ``clear`` was called; for others whose graphs know the same memory.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        # One for all captures: for each stream that is new to it cuBLAS takes a workspace, 34 MB on Hopper.
        self._stream: torch.cuda.Stream | None = None
        self.generation = 0

    def captures(self, key: Hashable) -> bool:
        """Whether ``run`` will capture, which waits for all that the device has to do."""
        return self._enabled and key not in self._graphs

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Do what ``launch`` does, which must launch the same kernels on the same memory for the same ``key``."""
        if not self._enabled:
            launch()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        # The first call does the work, compiles what is not yet compiled, and shows what cannot be captured.
        launch()
        self._graphs[key] = self._capture(key, launch)

    def clear(self) -> None:
        """Forget all graphs: memory that they know has moved."""
        self.generation += 1
        self._graphs.clear()
        # A pool ends with the last graph that has memory of it.
        self._pool = None

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current, side = torch.cuda.current_stream(), self._stream
        side.wait_stream(current)
        with torch.cuda.stream(side):
            graph = captured(launch, self._pool)
        current.wait_stream(side)
        _log.debug("captured %s in %.0f ms", key, (time.perf_counter() - started) * 1e3)
        return graph
