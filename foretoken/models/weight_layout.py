"""The memory layout of weights: in panels for CPU kernels, in rows for GPU kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from foretoken_kernels.cpu.linear import PANEL, pack, pack_gate_up
from foretoken_kernels.cpu.simd import HAS_FLOAT16
from numpy.typing import NDArray

from foretoken.models.backend import Backend

# How panels hold 16-bit types: as bits, because numpy has no bfloat16 and numba no float16.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_OF_BITS = {bits: dtype for dtype, bits in _BITS.items()}


class WeightLayout(Protocol):
    """Lays out tensors of a checkpoint.

    ``dtype``: the element type of matrices and tables.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def matrix(self, *parts: torch.Tensor) -> torch.Tensor:
        """Lay out a matrix of parts [out_features, in_features], one below the other."""
        ...

    def gate_up(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Lay out two [intermediate_size, hidden_size] for one product.

        SiLU-and-multiply follows it.
        """
        ...

    def table(self, rows: torch.Tensor) -> torch.Tensor:
        """Lay out an embedding [vocabulary, size], whose rows are looked up."""
        ...

    def select_rows(self, matrix: torch.Tensor, ids: NDArray[np.int64], in_features: int) -> torch.Tensor:
        """Return the rows ``ids`` of a result of ``matrix``, in the same layout."""
        ...

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values as float32."""
        ...


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """The CPU kernels' layout: flat panels (foretoken_kernels.cpu.linear).

    They hold float32, bfloat16 bits (uint16) or float16 bits (int16).
    """

    dtype: torch.dtype

    @staticmethod
    def holding(elements: torch.dtype) -> PanelLayout:
        """Return the layout of panels whose tensors have this type."""
        return PanelLayout(_OF_BITS.get(elements, elements))

    def matrix(self, *parts: torch.Tensor) -> torch.Tensor:
        arrays = [self._array(part) for part in parts]
        return _aligned(pack(np.concatenate(arrays) if len(arrays) > 1 else arrays[0]))

    def gate_up(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _aligned(pack_gate_up(self._array(gate), self._array(up)))

    def table(self, rows: torch.Tensor) -> torch.Tensor:
        return _aligned(self._array(rows).reshape(-1))

    def select_rows(self, matrix: torch.Tensor, ids: NDArray[np.int64], in_features: int) -> torch.Tensor:
        panels = matrix.numpy().reshape(-1, in_features, PANEL)
        return _aligned(pack(panels[ids // PANEL, :, ids % PANEL]))

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float32).contiguous()

    def _array(self, tensor: torch.Tensor) -> NDArray[np.generic]:
        elements: NDArray[np.generic] = tensor.to(self.dtype).view(_BITS.get(self.dtype, self.dtype)).numpy()
        return elements


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The GPU kernels' layout: [out_features, in_features] on the device, as ``dtype``.

    The gate is above the up projection.
    """

    device: torch.device
    dtype: torch.dtype

    def matrix(self, *parts: torch.Tensor) -> torch.Tensor:
        rows = sum(len(part) for part in parts)
        out = torch.empty((rows, parts[0].shape[1]), dtype=self.dtype, device=self.device)
        first = 0
        for part in parts:
            out[first : first + len(part)].copy_(part)
            first += len(part)
        return out

    def gate_up(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.matrix(gate, up)

    def table(self, rows: torch.Tensor) -> torch.Tensor:
        return self.matrix(rows)

    def select_rows(self, matrix: torch.Tensor, ids: NDArray[np.int64], in_features: int) -> torch.Tensor:
        return matrix[torch.from_numpy(ids).to(self.device)]

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, torch.float32)


def weight_layout(backend: Backend, dtype: torch.dtype, stored: Sequence[torch.dtype]) -> WeightLayout:
    """Return the layout for a model served as ``dtype`` whose matrices are stored as these types.

    On a CPU, matrices also stay bfloat16 or float16 if all of them are stored so: kernels widen
    them while reading, which gives the results of float32 copies at half the memory.
    """
    if backend.kernels == "gpu":
        return RowLayout(backend.device, dtype)
    narrow = [torch.bfloat16, *[torch.float16] * HAS_FLOAT16]
    kept = next((half for half in narrow if dtype == torch.float32 and set(stored) == {half}), dtype)
    return PanelLayout(kept)


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors that a layout made hold neither NaN nor infinity.

    A sum is enough, because NaN and infinity never disappear from it; the sums of one GPU's tensors
    are fetched together. If a sum is not finite, the elements are checked, because the sum may have
    overflowed.
    """
    floats = [each.view(_OF_BITS.get(each.dtype, each.dtype)) for each in tensors]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for each in floats:
        sums.setdefault(each.device, []).append(each.sum().float())
    if all(bool(torch.stack(some).isfinite().all()) for some in sums.values()):
        return True
    return all(bool(each.isfinite().all()) for each in floats)


def _aligned(panels: NDArray[np.generic]) -> torch.Tensor:
    """Copy to memory of PyTorch that begins at a cache line.

    A vector load across two lines costs double.
    """
    return torch.from_numpy(panels).clone()
