"""Pinned buffers: copies of small arrays and rows between host and device.

A copy costs microseconds, however small it is, so one copy carries several arrays. A copy from
memory that is not pinned waits for all work on the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# Each array begins at a multiple of this, as vector loads need.
_ALIGNMENT = 16


class PinnedBuffers:
    """Arrays in pinned memory and their copies on the device, all at fixed addresses on the device.

    To send, call ``wait``, then fill ``host``, then ``send``; kernels that are launched later read
    ``device``. To receive, let kernels fill ``device``; ``receive`` waits for them.

    There are two sets of arrays on the host, by turns. So the host can prepare a copy while the one
    before still waits in the stream, behind a prefill pass for instance.

    Args:
        arrays: shape and element type by name.

    Attributes:
        host: the arrays to fill. ``wait`` replaces them by others with the same content.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        spans: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (shape, dtype) in arrays.items():
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            spans[name] = (size, size + num_bytes)
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        is_cuda = device.type == "cuda"

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: memory[low:high].view(arrays[name][1]).view(arrays[name][0])
                for name, (low, high) in spans.items()
            }

        # Tensors made in inference mode can only be written to in inference mode.
        with torch.inference_mode(False):
            self._device = torch.zeros(max(size, _ALIGNMENT), dtype=torch.uint8, device=device)
            hosts = [torch.zeros(max(size, _ALIGNMENT), dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self.device: dict[str, torch.Tensor] = views(self._device)
        self._side, self._last = (
            _Side(
                host,
                host.numpy().data,
                {name: view.numpy() for name, view in views(host).items()},
                _event(is_cuda),
            )
            for host in hosts
        )

    @property
    def host(self) -> dict[str, NDArray[Any]]:
        return self._side.arrays

    def wait(self) -> None:
        """Wait until ``host`` may be filled: no copy reads it any more."""
        self._side, self._last = self._last, self._side
        if self._side.sent is not None:
            self._side.sent.synchronize()
        # A slice of bytes is copied without giving up the GIL, which other threads keep for long.
        self._side.bytes[:] = self._last.bytes

    def send(self) -> None:
        """Copy ``host`` to the device, in stream order."""
        self._device.copy_(self._side.memory, non_blocking=True)
        if self._side.sent is not None:
            self._side.sent.record()

    def receive(self) -> dict[str, NDArray[Any]]:
        """Copy ``device`` to ``host`` in stream order, wait, and return ``host``."""
        self._side.memory.copy_(self._device, non_blocking=True)
        if self._side.sent is not None:
            self._side.sent.record()
            self._side.sent.synchronize()
        return self.host


class _Side(NamedTuple):
    """One set of arrays on the host.

    Attributes:
        memory, bytes: all arrays, one after the other.
        sent: an event after the last copy of them; None on a CPU.
    """

    memory: torch.Tensor
    bytes: memoryview
    arrays: dict[str, NDArray[Any]]
    sent: Any


def _event(is_cuda: bool) -> Any:
    return torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]


class SendRing:
    """Ring of pinned buffers for asynchronous host-to-device copies of one array.

    Args:
        out: the array on the device.
        size: copies that may be under way at once; the next one waits.
    """

    def __init__(self, out: torch.Tensor, size: int) -> None:
        self._out = out
        with torch.inference_mode(False):
            self._hosts = [torch.zeros(out.shape, dtype=out.dtype, pin_memory=out.is_cuda) for _ in range(size)]
        self._events = [_event(out.is_cuda) for _ in range(size)]
        self._next = 0

    def send(self, values: NDArray[Any]) -> None:
        """Copy ``values``, which have the array's shape, in stream order.

        The caller may change them at once.
        """
        host, event = self._hosts[self._next], self._events[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        if event is not None:
            event.synchronize()
        host.copy_(torch.from_numpy(values))
        self._out.copy_(host, non_blocking=True)
        if event is not None:
            event.record()


class FetchBuffer:
    """A copy in pinned memory of one array on the device, which the host reads later.

    Args:
        source: the array on the device.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        with torch.inference_mode(False):
            self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._arrived = _event(source.is_cuda)

    def fetch(self) -> None:
        """Copy the array in stream order, without waiting.

        Nobody may read the last copy any more.
        """
        self._host.copy_(self._source, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def is_ready(self) -> bool:
        """Return whether the last copy has arrived."""
        return self._arrived is None or bool(self._arrived.query())

    def values(self) -> NDArray[Any]:
        """Return the last copy, which must have arrived; valid until the next ``fetch``."""
        values: NDArray[Any] = self._host.numpy()
        return values


class PinnedRows:
    """A pinned buffer that converts rows to the device's element type.

    It copies them in stream order.

    Args:
        size: elements of the largest copy.
        dtype: element type on the device.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._host = torch.zeros(size, dtype=dtype, pin_memory=is_cuda)
        self._sent = _event(is_cuda)

    def __len__(self) -> int:
        return len(self._host)

    def send(self, rows: NDArray[np.float32], out: torch.Tensor) -> None:
        """Copy ``rows`` to ``out``, which has the same shape.

        The caller may change them at once.
        """
        if self._sent is not None:
            self._sent.synchronize()
        host = self._host[: rows.size].view(rows.shape)
        host.copy_(torch.from_numpy(rows))
        out.copy_(host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
