"""Pinned memory: small arrays that one copy brings to a device, or back, and rows of numbers on their way there.

A copy costs microseconds however little it carries; one from other memory waits for all that the stream has to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Each array begins at a multiple of this: what a vector load wants.
_ALIGNMENT = 16


class PinnedBuffers:
    """Arrays in pinned memory with twins on the device, both at fixed addresses.

    What the host is to say: fill ``host`` between ``wait`` and ``send``; kernels that are launched later see it in
    ``device``. What it is to learn: kernels fill ``device``, ``receive`` waits for them.

    Args:
        arrays: by name: shape and element type.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        spans: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (shape, dtype) in arrays.items():
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            spans[name] = (size, size + num_bytes)
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        is_cuda = device.type == "cuda"
        # Whoever makes them: tensors made in inference mode may be written to there only.
        with torch.inference_mode(False):
            self._host = torch.zeros(max(size, _ALIGNMENT), dtype=torch.uint8, pin_memory=is_cuda)
            self._device = torch.zeros(max(size, _ALIGNMENT), dtype=torch.uint8, device=device)
        self._sent: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: memory[low:high].view(arrays[name][1]).view(arrays[name][0])
                for name, (low, high) in spans.items()
            }

        self.device: dict[str, torch.Tensor] = views(self._device)
        self.host: dict[str, NDArray[Any]] = {name: view.numpy() for name, view in views(self._host).items()}

    def wait(self) -> None:
        """Until the last copy has read the host's arrays."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy all to the device, in the order of the stream."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def receive(self) -> dict[str, NDArray[Any]]:
        """``host``, as ``device`` is at this place in the stream; waits for it."""
        self._host.copy_(self._device, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
            self._sent.synchronize()
        return self.host


class SendRing:
    """The way of an array to a device, for who does not wait until an earlier one has been read.

    Args:
        out: on the device.
        size: arrays that are under way at once; the next one waits.
    """

    def __init__(self, out: torch.Tensor, size: int) -> None:
        self._out = out
        with torch.inference_mode(False):
            self._hosts = [torch.zeros(out.shape, dtype=out.dtype, pin_memory=out.is_cuda) for _ in range(size)]
        self._events: list[Any] = [torch.cuda.Event() if out.is_cuda else None for _ in range(size)]  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, values: NDArray[Any]) -> None:
        """Copy ``values``, of the array's shape, in the order of the stream. They may change once this returns."""
        host, event = self._hosts[self._next], self._events[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        if event is not None:
            event.synchronize()
        host.copy_(torch.from_numpy(values))
        self._out.copy_(host, non_blocking=True)
        if event is not None:
            event.record()


class PinnedRows:
    """The way of rows of numbers to a device: converted into pinned memory, then copied in the order of the stream.

    Args:
        size: numbers at most.
        dtype: of the device's.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._host = torch.zeros(size, dtype=dtype, pin_memory=is_cuda)
        self._sent: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._host)

    def send(self, rows: NDArray[np.float32], out: torch.Tensor) -> None:
        """Copy ``rows`` to ``out``, of the same shape. They may change once this returns."""
        if self._sent is not None:
            self._sent.synchronize()
        host = self._host[: rows.size].view(rows.shape)
        host.copy_(torch.from_numpy(rows))
        out.copy_(host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
