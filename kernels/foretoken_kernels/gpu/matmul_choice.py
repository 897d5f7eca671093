"""Run each matmul by the implementation chosen for its shape and row count.

The choices are PyTorch, a skinny kernel, or the wide kernel for many rows. Where one kernel can do
both, it also does the operation that follows the matmul.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple

import torch

from foretoken_kernels.gpu.activation import silu_and_multiply
from foretoken_kernels.gpu.qkv_rope import qkv_rope
from foretoken_kernels.gpu.rope_kv_write import Rope, rope_kv_write
from foretoken_kernels.gpu.skinny_configs import MAX_SPLIT_K, SkinnyConfig
from foretoken_kernels.gpu.skinny_matmul import skinny_matmul, skinny_matmul_workspace
from foretoken_kernels.gpu.wide_gate_up import fits_wide_gate_up, pays_wide_gate_up, wide_gate_up

# Not only powers of two: at 24 rows cuBLAS uses other kernels than at 32, and both may be slower.
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
STORE, ADD, GATE_UP, QKV = "store", "add", "gate_up", "qkv"

# For each row bucket: a configuration, or None for PyTorch.
Choices = Mapping[int, SkinnyConfig | None]


class Heads(NamedTuple):
    """Head counts and size of an attention layer with a fused QKV matmul; its bias and norm."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool
    has_norm: bool

    @staticmethod
    def of(rope: Rope) -> Heads:
        _, num_kv_heads, head_dim = rope.keys.shape
        return Heads(rope.num_heads, num_kv_heads, head_dim, rope.bias is not None, rope.query_norm is not None)


class MatmulShape(NamedTuple):
    """A kind of matmul.

    Attributes:
        out_features, in_features: sizes of the weight; for GATE_UP, gate and up together.
        mode: STORE, ADD, GATE_UP or QKV.
        heads: for QKV only.
    """

    out_features: int
    in_features: int
    mode: str
    out_dtype: torch.dtype = torch.bfloat16
    heads: Heads | None = None

    @property
    def key(self) -> str:
        """Return the shape's name, which matmul_timing.name_of writes to a file."""
        words = [f"{self.out_features}x{self.in_features}", self.mode, str(self.out_dtype).removeprefix("torch.")]
        if self.heads is not None:
            *sizes, has_bias, has_norm = self.heads
            words += ["x".join(map(str, sizes)), *["bias"] * has_bias, *["norm"] * has_norm]
        return " ".join(words)


class MatmulTable:
    """Run matmuls as chosen; a shape without a choice goes to PyTorch.

    matmul_timing.timed_table makes the choices. One table's matmuls share a workspace, so they must
    not run at the same time (on two streams).

    Args:
        wide_programs: number of programs of the wide kernel, for gate and up with more rows than
            ``choices`` cover; 0: PyTorch computes these.
    """

    def __init__(
        self,
        choices: Mapping[MatmulShape, Choices] | None = None,
        device: torch.device | str = "cpu",
        wide_programs: int = 0,
    ) -> None:
        self._choices: dict[MatmulShape, Choices] = {}
        self._device, self._wide_programs = device, wide_programs
        self._workspace = skinny_matmul_workspace(0, MAX_SPLIT_K, device)
        for shape, by_rows in (choices or {}).items():
            self.choose(shape, by_rows)

    def choose(self, shape: MatmulShape, by_rows: Choices) -> None:
        """Use these choices from now on.

        Do not call it after a CUDA graph has captured a matmul: the workspace may move.

        Raises:
            ValueError: the choices are not for ROW_BUCKETS.
        """
        if tuple(by_rows) != ROW_BUCKETS:
            raise ValueError(f"choices for {tuple(by_rows)} rows, not for {ROW_BUCKETS}")
        self._choices[shape] = dict(by_rows)
        if any(config is not None and config.split_k > 1 for config in by_rows.values()):
            self.reserve(shape.out_features)

    def reserve(self, out_features: int) -> None:
        """Make room for partial sums of ``out_features`` features.

        Do not call it after a CUDA graph has captured a matmul: the workspace may move.
        """
        workspace = skinny_matmul_workspace(out_features, MAX_SPLIT_K, self._device)
        if workspace.partials.numel() > self._workspace.partials.numel():
            self._workspace = workspace

    def choice(self, shape: MatmulShape, rows: int) -> SkinnyConfig | None:
        """Return the configuration for ``rows``, or None for PyTorch."""
        if not 1 <= rows <= ROW_BUCKETS[-1]:
            return None
        bucket = ROW_BUCKETS[bisect.bisect_left(ROW_BUCKETS, rows)]
        return self._choices[shape][bucket] if shape in self._choices else None

    def matmul(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Compute ``out = x @ weight.T``, or ``out += x @ weight.T`` with ``add``.

        Args:
            x: [rows, in_features]; rows may be apart, columns may not.
            weight: [out_features, in_features], contiguous, x's dtype.
            out: [rows, out_features], x's dtype or float32; rows may be apart, columns may not. Not
                x.
        """
        out_features, in_features = weight.shape
        shape = MatmulShape(out_features, in_features, ADD if add else STORE, out.dtype)
        self.matmul_by(self.choice(shape, len(x)), x, weight, out, add)

    def gate_up(self, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Compute ``out = silu(x @ gate.T) * (x @ up.T)``.

        Args:
            x: [rows, in_features]; rows may be apart, columns may not.
            weight: [2 * size, in_features], contiguous: gate, then up.
            gate_up: [rows, 2 * size]; scratch, left in any state.
            out: [rows, size].
        """
        if self._is_wide(x, weight):
            wide_gate_up(x, weight, out, self._wide_programs)
            return
        out_features, in_features = weight.shape
        config = self.choice(MatmulShape(out_features, in_features, GATE_UP, out.dtype), len(x))
        self.gate_up_by(config, x, weight, gate_up, out)

    def _is_wide(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether the wide kernel can compute these rows, and is faster than PyTorch."""
        programs = self._wide_programs
        if programs == 0 or len(x) <= ROW_BUCKETS[-1] or not pays_wide_gate_up(len(x), len(weight) // 2, programs):
            return False
        return fits_wide_gate_up(x, weight)

    def qkv(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope) -> None:
        """Apply rope_kv_write to ``x @ weight.T``, and leave the rotated queries in ``out``.

        Args:
            x: [rows, in_features]; rows may be apart, columns may not.
            weight: [(num_heads + 2 * num_kv_heads) * head_dim, in_features], contiguous, x's dtype.
            out: [rows, (num_heads + 2 * num_kv_heads) * head_dim]. The columns after the queries
                are left in any state.
            rope: the other arguments of rope_kv_write.
        """
        out_features, in_features = weight.shape
        shape = MatmulShape(out_features, in_features, QKV, out.dtype, Heads.of(rope))
        self.qkv_by(self.choice(shape, len(x)), x, weight, out, rope)

    def matmul_by(
        self, config: SkinnyConfig | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool
    ) -> None:
        """Run matmul with this configuration."""
        if config is None:
            torch_matmul(x, weight, out, add)
        else:
            skinny_matmul(x, weight, out, self._workspace, config, add)

    def gate_up_by(
        self,
        config: SkinnyConfig | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        gate_up: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run gate_up with this configuration.

        None means the chosen matmul, then the activation.
        """
        if config is None:
            self.matmul(x, weight, gate_up)
            silu_and_multiply(gate_up, out)
        else:
            skinny_matmul(x, weight, out, self._workspace, config, gate_up=True)

    def qkv_by(
        self, config: SkinnyConfig | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope
    ) -> None:
        """Run qkv with this configuration.

        None means the chosen matmul, then rope_kv_write.
        """
        if config is None:
            self.matmul(x, weight, out)
            rope_kv_write(out, *rope)
        else:
            qkv_rope(x, weight, out, rope, self._workspace, config)


def torch_matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """Compute MatmulTable.matmul with PyTorch."""
    if out.dtype == x.dtype:
        if add:
            torch.addmm(out, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)
    elif x.is_cuda:
        if add:
            torch.addmm(out, x, weight.t(), out_dtype=out.dtype, out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    else:
        torch_matmul(x.to(out.dtype), weight.to(out.dtype), out, add)
