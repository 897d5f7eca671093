"""The matmul of each shape and row count: PyTorch's, one of the skinny kernels, as was found to be fastest, or of many
rows the wide one; with what follows it, where one kernel can do both."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple

import torch

from foretoken_kernels.gpu.activation import silu_and_multiply
from foretoken_kernels.gpu.qkv_rope import qkv_rope
from foretoken_kernels.gpu.rope_kv_write import Rope, rope_kv_write
from foretoken_kernels.gpu.skinny_configs import MAX_SPLIT_K, SkinnyConfig
from foretoken_kernels.gpu.skinny_matmul import (
    skinny_gate_up,
    skinny_matmul,
    skinny_matmul_workspace,
)
from foretoken_kernels.gpu.wide_gate_up import fits_wide_gate_up, pays_wide_gate_up, wide_gate_up

# Not powers of two alone: at 24 rows cuBLAS takes other kernels than at 32, which may be slower than both.
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
STORE, ADD, GATE_UP, QKV = "store", "add", "gate_up", "qkv"

# Of each row bucket: a configuration, or None for PyTorch.
Choices = Mapping[int, SkinnyConfig | None]


class Heads(NamedTuple):
    """Of an attention whose queries, keys and values are one matmul's, and what is done to them."""

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
    """A kind of matmul: ``out_features`` and ``in_features`` are the weight's, for GATE_UP of gate and up together.
    ``heads``: of QKV."""

    out_features: int
    in_features: int
    mode: str
    out_dtype: torch.dtype = torch.bfloat16
    heads: Heads | None = None

    @property
    def key(self) -> str:
        """Its name in a file."""
        words = [f"{self.out_features}x{self.in_features}", self.mode, str(self.out_dtype).removeprefix("torch.")]
        if self.heads is not None:
            *sizes, has_bias, has_norm = self.heads
            words += ["x".join(map(str, sizes)), *["bias"] * has_bias, *["norm"] * has_norm]
        return " ".join(words)


class MatmulTable:
    """Matmuls as chosen; what has no choice goes to PyTorch. matmul_timing.timed_table makes the choices.

    One table's matmuls must not run at the same time as each other (on two streams), since they share a workspace.

    Args:
        wide_programs: programs that gate and up of more rows than ``choices`` are for may have; 0: those are PyTorch's.
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
        """Take these choices from now on. Not once a CUDA graph has captured a matmul: the workspace may move."""
        if tuple(by_rows) != ROW_BUCKETS:
            raise ValueError(f"choices for {tuple(by_rows)} rows, not for {ROW_BUCKETS}")
        self._choices[shape] = dict(by_rows)
        if any(config is not None and config.split_k > 1 for config in by_rows.values()):
            self.reserve(shape.out_features)

    def reserve(self, out_features: int) -> None:
        """Make room for sums of so many features in parts. Not once a CUDA graph has captured a matmul, either."""
        workspace = skinny_matmul_workspace(out_features, MAX_SPLIT_K, self._device)
        if workspace.partials.numel() > self._workspace.partials.numel():
            self._workspace = workspace

    def choice(self, shape: MatmulShape, rows: int) -> SkinnyConfig | None:
        """The configuration for ``rows``, None for PyTorch."""
        if not 1 <= rows <= ROW_BUCKETS[-1]:
            return None
        bucket = ROW_BUCKETS[bisect.bisect_left(ROW_BUCKETS, rows)]
        return self._choices[shape][bucket] if shape in self._choices else None

    def matmul(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """``out = x @ weight.T``, or ``out += x @ weight.T`` with ``add``.

        Args:
            x: [rows, in_features]; rows may be apart, columns may not.
            weight: [out_features, in_features], contiguous, x's dtype.
            out: [rows, out_features], x's dtype or float32; rows may be apart, columns may not. Not x.
        """
        out_features, in_features = weight.shape
        shape = MatmulShape(out_features, in_features, ADD if add else STORE, out.dtype)
        self.matmul_by(self.choice(shape, len(x)), x, weight, out, add)

    def gate_up(self, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out = silu(x @ gate.T) * (x @ up.T)``.

        Args:
            x: [rows, in_features]; rows may be apart, columns may not.
            weight: [2 * size, in_features], contiguous: gate, then up.
            gate_up: [rows, 2 * size]; left in any state.
            out: [rows, size].
        """
        if self._is_wide(x, weight):
            wide_gate_up(x, weight, out, self._wide_programs)
            return
        out_features, in_features = weight.shape
        config = self.choice(MatmulShape(out_features, in_features, GATE_UP, out.dtype), len(x))
        self.gate_up_by(config, x, weight, gate_up, out)

    def _is_wide(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether gate and up are many rows' whose tiles the GPU has use for."""
        programs = self._wide_programs
        if programs == 0 or len(x) <= ROW_BUCKETS[-1] or not pays_wide_gate_up(len(x), len(weight) // 2, programs):
            return False
        return fits_wide_gate_up(x, weight)

    def qkv(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope) -> None:
        """rope_kv_write of ``x @ weight.T``, of which the turned queries are left in ``out``.

        Args:
            x: [rows, in_features]; rows may be apart, columns may not.
            weight: [(num_heads + 2 * num_kv_heads) * head_dim, in_features], contiguous, x's dtype.
            out: [rows, the same]. What is behind the queries is left in any state.
            rope: as for rope_kv_write.
        """
        out_features, in_features = weight.shape
        shape = MatmulShape(out_features, in_features, QKV, out.dtype, Heads.of(rope))
        self.qkv_by(self.choice(shape, len(x)), x, weight, out, rope)

    def matmul_by(
        self, config: SkinnyConfig | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool
    ) -> None:
        """matmul with this configuration."""
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
        """gate_up with this configuration, where None means the matmul that was chosen, and then the activation."""
        if config is None:
            self.matmul(x, weight, gate_up)
            silu_and_multiply(gate_up, out)
        else:
            skinny_gate_up(x, weight, out, self._workspace, config)

    def qkv_by(
        self, config: SkinnyConfig | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope
    ) -> None:
        """qkv with this configuration, where None means the matmul that was chosen, and then rope_kv_write."""
        if config is None:
            self.matmul(x, weight, out)
            rope_kv_write(out, *rope)
        else:
            qkv_rope(x, weight, out, rope, self._workspace, config)


def torch_matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """MatmulTable.matmul by PyTorch's library."""
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
