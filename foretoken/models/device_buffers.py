"""The buffers of one model's passes on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from foretoken_kernels.cpu import decoder as kernel

from foretoken.models.program import Columns

# The input of the activation. The CPU's kernel has no such buffer, so its table has no name for it.
GATE_UP = kernel.NUM_FIELDS


class DeviceBuffers:
    """Buffers by field; they only grow while programs are loaded.

    Args:
        on_move: called when a buffer is replaced: graphs that know its address are useless from
            then on.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, on_move: Callable[[], None]) -> None:
        self._dtype, self._device, self._on_move = dtype, device, on_move
        self._buffers: dict[int, torch.Tensor] = {}

    def reserve(self, field: int, size: int) -> None:
        """Make room for ``size`` elements."""
        buffer = self._buffers.get(field)
        if buffer is None or len(buffer) < size:
            self._buffers[field] = torch.zeros(size, dtype=self.element_type(field), device=self._device)
            self._on_move()

    def rows(self, field: int, rows: int, width: int) -> torch.Tensor:
        """Return the buffer as a view [rows, width]."""
        return self._buffers[field][: rows * width].view(rows, width)

    def view(self, columns: Columns, rows: int) -> torch.Tensor:
        """Return a view [rows, columns.size], whose rows are ``columns.width`` apart."""
        return self.rows(columns.buffer, rows, columns.width)[:, columns.offset : columns.offset + columns.size]

    def element_type(self, field: int) -> torch.dtype:
        """Return a buffer's element type.

        Logits are float32: in 16 bits the best two would often be equal.
        """
        return torch.float32 if field == kernel.LOGITS else self._dtype
