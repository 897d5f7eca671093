"""CUDA graphs of launches: captured at the first uses of a key, replayed from then on."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from foretoken_kernels.gpu.graph_capture import captured

_log = logging.getLogger(__name__)


class DeviceGraphs:
    """Graphs by key. Memory that they use must not move.

    Args:
        enabled: False: every call launches its kernels one by one, by the same code.
        eager_uses: uses of a key before it is captured. A capture waits for the device and takes
            some 100 ms, which a key of a passing moment does not repay.

    Attributes:
        enabled: as given.
        generation: number of calls of ``clear``, for other graphs over the same memory.
    """

    def __init__(self, enabled: bool, *, eager_uses: int = 0) -> None:
        self.enabled = enabled
        self._eager_uses = eager_uses
        # Uses of the keys that are not captured yet.
        self._uses: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        # All captures share one stream: cuBLAS takes a workspace for each new stream, 34 MB on
        # Hopper.
        self._stream: torch.cuda.Stream | None = None
        self.generation = 0

    def captures(self, key: Hashable) -> bool:
        """Return whether ``run`` will capture, which waits for all work on the device."""
        return self.lacks(key) and self._uses[key] >= self._eager_uses

    def lacks(self, key: Hashable) -> bool:
        """Return whether ``capture`` would have something to do."""
        return self.enabled and key not in self._graphs

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Run ``launch`` and capture it, whatever its uses so far.

        The key must not be captured yet.
        """
        # This call does the work, compiles kernels, and fails on what cannot be captured.
        launch()
        self._graphs[key] = self._capture(key, launch)

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Run ``launch`` or replay its graph.

        For one ``key``, ``launch`` must always launch the same kernels on the same memory.
        """
        if not self.enabled:
            launch()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if self.captures(key):
            del self._uses[key]
            self.capture(key, launch)
            return
        self._uses[key] += 1
        launch()

    def clear(self) -> None:
        """Forget all graphs, because memory that they use has moved."""
        self.generation += 1
        self._graphs.clear()
        self._uses.clear()
        # A pool is freed with the last graph that uses it.
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
