"""The matmuls of a model's passes on a GPU.

They are the fastest for each batch, or give the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.linear import ADD, SILU_AND_MULTIPLY
from foretoken_kernels.gpu import matmul_choice
from foretoken_kernels.gpu.matmul_choice import Heads, MatmulShape, MatmulTable
from foretoken_kernels.gpu.matmul_timing import device_limits, timed_table
from foretoken_kernels.gpu.rope_kv_write import Rope, rope_kv_write
from foretoken_kernels.gpu.strict_matmul import StrictMatmuls

from foretoken.models.config import ModelConfig
from foretoken.models.device_buffers import GATE_UP, DeviceBuffers
from foretoken.models.device_program import Step
from foretoken.models.program import Operation


class PassMatmuls(Protocol):
    """The LINEAR operations of a pass."""

    def reserve(self, operation: Operation, weight: torch.Tensor) -> None:
        """Allocate what the operation needs in addition to input and output."""
        ...

    def tune(self, steps: Iterable[Step], path: Path | None) -> None:
        """Time the matmuls of these steps and use the fastest.

        ``path`` keeps the choices for the next start.
        """
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        """Launch LINEAR in this mode."""
        ...

    def qkv(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope) -> None:
        """Launch the matmul of queries, keys and values and its ROPE."""
        ...


class FastMatmuls:
    """The fastest kernel for each shape and number of rows.

    Args:
        max_rows: rows of the largest batch.
    """

    def __init__(self, config: ModelConfig, buffers: DeviceBuffers, max_rows: int, device: torch.device) -> None:
        self._config, self._buffers, self._max_rows = config, buffers, max_rows
        # Otherwise cuBLAS may add parts of a sum in float16. Other types have other switches.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._table = MatmulTable(device=device)

    def reserve(self, operation: Operation, weight: torch.Tensor) -> None:
        if operation.mode == SILU_AND_MULTIPLY:
            self._buffers.reserve(GATE_UP, self._max_rows * 2 * operation.out.size)

    def tune(self, steps: Iterable[Step], path: Path | None) -> None:
        weights: dict[MatmulShape, dict[int, torch.Tensor]] = {}
        for step in steps:
            weight = step.operation.weight
            if step.operation.code == kernel.LINEAR and weight is not None:
                weights.setdefault(self._shape(step, weight), {})[weight.data_ptr()] = weight
        self._table = timed_table({shape: list(found.values()) for shape, found in weights.items()}, path)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        if mode == SILU_AND_MULTIPLY:
            self._table.gate_up(x, weight, self._buffers.rows(GATE_UP, len(x), len(weight)), out)
        else:
            self._table.matmul(x, weight, out, add=mode == ADD)

    def qkv(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope) -> None:
        self._table.qkv(x, weight, out, rope)

    def _shape(self, step: Step, weight: torch.Tensor) -> MatmulShape:
        operation, config, heads = step.operation, self._config, None
        modes = {ADD: matmul_choice.ADD, SILU_AND_MULTIPLY: matmul_choice.GATE_UP}
        mode = modes.get(operation.mode, matmul_choice.STORE)
        if step.turned is not None:
            mode, weights = matmul_choice.QKV, step.turned.weights
            has_bias, has_norm = weights.qkv_bias.numel() > 0, weights.query_norm.numel() > 0
            heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, has_bias, has_norm)
        out_dtype = self._buffers.element_type(operation.out.buffer)
        return MatmulShape(weight.shape[0], weight.shape[1], mode, out_dtype, heads)


class SameBitsMatmuls:
    """Kernels that give a row the same bits in every batch.

    Args:
        on_move: as for DeviceBuffers.
    """

    def __init__(self, device: torch.device, on_move: Callable[[], None]) -> None:
        self._matmuls = StrictMatmuls(device, device_limits(device) if device.type == "cuda" else None)
        self._on_move = on_move

    def reserve(self, operation: Operation, weight: torch.Tensor) -> None:
        if self._matmuls.reserve(weight, operation.mode == SILU_AND_MULTIPLY):
            self._on_move()

    def tune(self, steps: Iterable[Step], path: Path | None) -> None:
        """Refuse to time matmuls. Raises ValueError: the fastest kernel depends on the rows."""
        raise ValueError("strict matmuls are never timed: the fastest kernel depends on the rows")

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        if mode == SILU_AND_MULTIPLY:
            self._matmuls.gate_up(x, weight, out)
        else:
            self._matmuls.matmul(x, weight, out, add=mode == ADD)

    def qkv(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope) -> None:
        self._matmuls.matmul(x, weight, out)
        rope_kv_write(out, *rope, strict=True)
