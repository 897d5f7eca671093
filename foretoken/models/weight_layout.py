"""The memory layout of weights: in panels for CPU kernels, in rows for GPU kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from foretoken_kernels.cpu.linear import PANEL, pack, pack_gate_up
from numpy.typing import NDArray

from foretoken.models.backend import Backend


class WeightLayout(Protocol):
    """Lays out tensors of a checkpoint."""

    def matrix(self, *parts: torch.Tensor) -> torch.Tensor:
        """Lay out a matrix of parts [out_features, in_features], one below the other."""
        ...

    def gate_up(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Lay out two [intermediate_size, hidden_size] for one product followed by
        SiLU-and-multiply."""
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


class PanelLayout:
    """The CPU kernels' layout: flat panels (foretoken_kernels.cpu.linear), float32 or bfloat16 bits
    as uint16."""

    def __init__(self, bfloat16: bool) -> None:
        self._bfloat16 = bfloat16

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
        if self._bfloat16:
            bits: NDArray[np.generic] = tensor.to(torch.bfloat16).view(torch.uint16).numpy()
            return bits
        floats: NDArray[np.generic] = tensor.to(torch.float32).numpy()
        return floats


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The GPU kernels' layout: [out_features, in_features] on the device, gate above up, as
    ``dtype``."""

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

    On a CPU, matrices also stay bfloat16 if all of them are stored so: kernels widen them while
    reading, which gives the results of float32 copies at half the memory.
    """
    if backend.kernels == "gpu":
        return RowLayout(backend.device, dtype)
    return PanelLayout(dtype == torch.bfloat16 or all(kind == torch.bfloat16 for kind in stored))


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors that a layout made hold neither NaN nor infinity.

    A sum is enough, because NaN and infinity never disappear from it; the sums of one GPU's tensors
    are fetched together. If a sum is not finite, the elements are checked, because the sum may have
    overflowed.
    """
    floats = [bits.view(torch.bfloat16) if bits.dtype == torch.uint16 else bits for bits in tensors]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for each in floats:
        sums.setdefault(each.device, []).append(each.sum().float())
    if all(bool(torch.stack(some).isfinite().all()) for some in sums.values()):
        return True
    return all(bool(each.isfinite().all()) for each in floats)


def _aligned(panels: NDArray[np.generic]) -> torch.Tensor:
    """Copy to memory of PyTorch, which begins at a cache line: a vector load across two lines costs
    double."""
    return torch.from_numpy(panels).clone()
