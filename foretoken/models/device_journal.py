"""What kernels leave again and again, and the host reads some launches later: copies in pinned memory, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Numbers that each array begins at a multiple of: kernels are compiled anew where one is not aligned.
_ALIGNMENT = 4


class DeviceJournal:
    """Arrays on the device, at fixed addresses, and the last few records of what they held.

    Attributes:
        device: by name.
        depth: records that may be unread.

    Args:
        arrays: by name: shape; all are int32.
    """

    def __init__(self, arrays: Mapping[str, tuple[int, ...]], depth: int, device: torch.device) -> None:
        self.depth = depth
        self._arrays = dict(arrays)
        counts = [int(np.prod(shape)) for shape in arrays.values()]
        sizes = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts]
        is_cuda = device.type == "cuda"
        # Whoever makes them: tensors made in inference mode may be written to there only.
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
        """Records that are unread."""
        return len(self._unread)

    def record(self) -> None:
        """Copy the arrays as they are at this place in the stream. There must be less than ``depth`` unread."""
        if len(self._unread) == self.depth:
            raise ValueError(f"a journal of {self.depth} records is full")
        self._hosts[self._next].copy_(self._device, non_blocking=True)
        if self._events[self._next] is not None:
            self._events[self._next].record()
        self._unread.append(self._next)
        self._next = (self._next + 1) % self.depth

    def is_ready(self) -> bool:
        """Whether the oldest unread record is here. Does not wait."""
        event = self._events[self._unread[0]]
        return event is None or bool(event.query())

    def wait(self) -> None:
        """Until the oldest unread record is here."""
        event = self._events[self._unread[0]]
        if event is not None:
            event.synchronize()

    def take(self) -> dict[str, NDArray[np.int32]]:
        """The oldest unread record, which must be ready; valid until ``depth`` more have been made."""
        record = self._hosts[self._unread.popleft()].numpy()
        return {name: record[span].reshape(self._arrays[name]) for name, span in self._spans.items()}
