"""Records that kernels write step by step and the host reads some launches later, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Each array begins at a multiple of so many elements: kernels are compiled again for unaligned
# arrays.
_ALIGNMENT = 4


class DeviceJournal:
    """Arrays on the device, at fixed addresses.

    Pinned memory has copies of their last few states.

    Attributes:
        device: the arrays by name.
        depth: number of records that may be unread.

    Args:
        arrays: shapes by name; all are int32.
    """

    def __init__(self, arrays: Mapping[str, tuple[int, ...]], depth: int, device: torch.device) -> None:
        self.depth = depth
        self._arrays = dict(arrays)
        counts = [int(np.prod(shape)) for shape in arrays.values()]
        sizes = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts]
        is_cuda = device.type == "cuda"
        # Tensors made in inference mode can only be written to in inference mode.
        with torch.inference_mode(False):
            self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
            self._hosts = torch.zeros((depth, sum(sizes)), dtype=torch.int32, pin_memory=is_cuda)
        self._events: list[Any] = [torch.cuda.Event() if is_cuda else None for _ in range(depth)]  # type: ignore[no-untyped-call]
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self._spans = {
            name: slice(start, start + count) for name, start, count in zip(arrays, starts, counts, strict=True)
        }
        self.device: dict[str, torch.Tensor] = {
            name: self._device[span].view(arrays[name]) for name, span in self._spans.items()
        }
        self._unread: deque[int] = deque()
        self._next = 0

    def __len__(self) -> int:
        """Return the number of unread records."""
        return len(self._unread)

    def record(self) -> None:
        """Copy the arrays in stream order. Raises ValueError if ``depth`` records are unread."""
        if len(self._unread) == self.depth:
            raise ValueError(f"a journal of {self.depth} records is full")
        self._hosts[self._next].copy_(self._device, non_blocking=True)
        if self._events[self._next] is not None:
            self._events[self._next].record()
        self._unread.append(self._next)
        self._next = (self._next + 1) % self.depth

    def is_ready(self) -> bool:
        """Return whether the oldest unread record has arrived. Does not wait."""
        event = self._events[self._unread[0]]
        return event is None or bool(event.query())

    def wait(self) -> None:
        """Wait until the oldest unread record has arrived."""
        event = self._events[self._unread[0]]
        if event is not None:
            event.synchronize()

    def take(self) -> dict[str, NDArray[np.int32]]:
        """Return the oldest unread record, which must be ready.

        Valid until ``depth`` more have been made.
        """
        record = self._hosts[self._unread.popleft()].numpy()
        return {name: record[span].reshape(self._arrays[name]) for name, span in self._spans.items()}
