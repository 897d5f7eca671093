"""Runs programs over batches on a GPU: static buffers, kernel launches, and CUDA graphs of them.

No launch waits for the device. What a pass leaves in its buffers is valid, in the order of the stream, until the next
pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.linear import ADD, SILU_AND_MULTIPLY
from foretoken_kernels.gpu import matmul_choice
from foretoken_kernels.gpu.embedding import copy_rows, embed, fill_rows
from foretoken_kernels.gpu.matmul_choice import Heads, MatmulShape, MatmulTable
from foretoken_kernels.gpu.matmul_timing import device_limits, timed_table
from foretoken_kernels.gpu.rms_norm import rms_norm
from foretoken_kernels.gpu.rope_kv_write import Rope, rope_kv_write
from foretoken_kernels.gpu.strict_attention import strict_attention
from foretoken_kernels.gpu.strict_matmul import StrictMatmuls
from foretoken_kernels.gpu.tree_attention import attention_workspace, tree_attention
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.device_batch import (
    BatchShape,
    DeviceArrays,
    DeviceBatch,
    Runs,
    bucket,
    runs_of,
    seq_bucket,
    table_bucket,
)
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_sizes import PassSizes
from foretoken.models.device_twins import PinnedRows
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.program import Attention, Operation, Program, Span
from foretoken.models.rope import cos_sin_table
from foretoken.tree import MASK_WORD_BITS

# The buffer between the gate's and the activation's kernel; the CPU has none, so its table has no name for it.
_GATE_UP = kernel.NUM_FIELDS
# Passes of more rows, not all of them wanted, are a prompt's: their kernels take longer than their launches, and hardly
# two have one size.
MAX_PROMPT_GRAPH_ROWS = 128
# Numbers on their way to a program that reads none.
_LEAST_PINNED = 16
# Programs that share the keys of a tile of rows, at most.
_NUM_SPLITS = 32


class _Step(NamedTuple):
    """One operation, and what one kernel may do with it.

    Attributes:
        turned: of the matmul of queries, keys and values: the attention whose ROPE is behind it.
        fetch: of a NORM: the EMBED or COPY ahead of it, whose rows it is the norm of.
    """

    operation: Operation
    turned: Attention | None = None
    fetch: Operation | None = None


@dataclass(slots=True, eq=False)
class DeviceProgram:
    """A program with its buffers there. ``number`` tells it from others in the keys of graphs."""

    steps: list[_Step]
    number: int


class DevicePass:
    """The buffers of one model. Not for two threads at once.

    Args:
        config: of the model whose attention runs over ``cache``, on whose device all of this lives.
        num_positions: rotary positions that may occur.
        strict: whether a row is to have the same bits in any batch; else the kernels are the fastest for each.
        flashinfer: the attention of ``run``'s passes without a graph; None: that of all others.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        num_positions: int,
        sizes: PassSizes,
        strict: bool = False,
        flashinfer: FlashInferAttention | None = None,
    ) -> None:
        assert not strict or flashinfer is None, "the order of FlashInfer's sums depends on the batch"
        device = cache.data.device
        self._config, self._cache, self._sizes = config, cache, sizes
        self._device, self._dtype = device, cache.data.dtype
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).contiguous().to(device)
        self._batches: dict[BatchShape, DeviceBatch] = {}
        self._graphs = DeviceGraphs(sizes.graphs and device.type == "cuda")
        self._buffers: dict[int, torch.Tensor] = {}
        self._given = PinnedRows(_LEAST_PINNED, self._dtype, device)
        self._programs: list[DeviceProgram] = []
        self._matmuls: MatmulTable | StrictMatmuls = MatmulTable(device=device)
        if strict:
            self._matmuls = StrictMatmuls(device, device_limits(device) if device.type == "cuda" else None)
        self._strict = strict
        self._attention = strict_attention if strict else tree_attention
        self._flashinfer = flashinfer
        # The interpreter runs programs one after the other: it would gain nothing by splits.
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        num_splits = _NUM_SPLITS if device.type == "cuda" else 1
        self._workspace = attention_workspace(sizes.rows, *heads, device, num_splits)

    def load(self, program: Program) -> DeviceProgram:
        """A program ready to run here."""
        for field, width in program.row_widths.items():
            self._reserve(field, self._sizes.rows * width)
        for field, width in program.wanted_widths.items():
            self._reserve(field, self._sizes.wanted * width)
        for operation in program.operations:
            if operation.x is not None and operation.x.buffer == kernel.GIVEN:
                size = self._sizes.rows * operation.x.width
                self._reserve(kernel.GIVEN, size)
                if len(self._given) < size:
                    self._given = PinnedRows(size, self._dtype, self._device)
            if operation.code == kernel.LINEAR:
                self._reserve_matmul(operation)
        self._programs.append(DeviceProgram(_steps_of(program), len(self._programs) + 1))
        return self._programs[-1]

    def _reserve_matmul(self, operation: Operation) -> None:
        assert operation.weight is not None
        is_gate_up = operation.mode == SILU_AND_MULTIPLY
        if isinstance(self._matmuls, StrictMatmuls):
            if self._matmuls.reserve(operation.weight, is_gate_up):
                self._graphs.clear()
        elif is_gate_up:
            self._reserve(_GATE_UP, self._sizes.rows * 2 * operation.out.size)

    def tune(self, path: Path | None) -> None:
        """Time matmuls of the programs loaded so far, and take the fastest from now on; not in strict mode.

        ``path``: where the choices are kept for the next start.
        """
        assert not self._strict, "which matmul is the fastest depends on the rows"
        weights: dict[MatmulShape, dict[int, torch.Tensor]] = {}
        for program in self._programs:
            for step in program.steps:
                weight = step.operation.weight
                if step.operation.code == kernel.LINEAR and weight is not None:
                    weights.setdefault(self._matmul_shape(step, weight), {})[weight.data_ptr()] = weight
        self._matmuls = timed_table({shape: list(found.values()) for shape, found in weights.items()}, path)
        self._graphs.clear()

    def _matmul_shape(self, step: _Step, weight: torch.Tensor) -> MatmulShape:
        operation, config, heads = step.operation, self._config, None
        mode = {ADD: matmul_choice.ADD, SILU_AND_MULTIPLY: matmul_choice.GATE_UP}.get(
            operation.mode, matmul_choice.STORE
        )
        if step.turned is not None:
            mode, weights = matmul_choice.QKV, step.turned.weights
            has_bias, has_norm = (_present(each) is not None for each in (weights.qkv_bias, weights.query_norm))
            heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, has_bias, has_norm)
        return MatmulShape(weight.shape[0], weight.shape[1], mode, self._element_type(operation.out.buffer), heads)

    @torch.inference_mode()
    def run(self, loaded: DeviceProgram, batch: ForwardBatch, given: NDArray[np.float32] | None = None) -> None:
        """Writes every row's keys and values to its slot first, so a tree's nodes see each other in the same pass.

        Args:
            given: float32 [rows, any]: what the program reads as GIVEN.

        Raises:
            ValueError: the batch is larger than ``sizes``; nothing was written.
        """
        wanted = len(batch.logit_rows)
        sizes = self._sizes
        runs = runs_of(batch)
        if batch.num_rows > sizes.rows or wanted > sizes.wanted or len(runs.seqs) > sizes.seqs:
            raise ValueError(f"a batch of {batch.num_rows} rows, {wanted} of them wanted, is more than {sizes}")
        shape = self._shape(batch, runs)
        arrays = self._upload(batch, runs, shape)
        if given is not None:
            self._given.send(given, self.buffer(kernel.GIVEN, *given.shape))
        if self._has_graph(batch):
            self._graphs.run((loaded.number, shape), lambda: self.launch(loaded, arrays))
            return
        if self._flashinfer is not None:
            self._flashinfer.plan(batch, runs)
        self.launch(loaded, arrays, self._flashinfer)

    def batch_of(self, rows: int, seqs: int, max_seq_rows: int, blocks: int) -> DeviceBatch:
        """The batch that holds so many rows, all of them wanted, of so many sequences. Kernels fill it.

        Raises ValueError for more than ``sizes``.
        """
        sizes = self._sizes
        if rows > sizes.wanted or seqs > sizes.seqs or blocks > sizes.blocks:
            raise ValueError(f"{rows} rows of {seqs} sequences of {blocks} blocks are more than {sizes}")
        return self._batch(self._graph_shape(rows, rows, seqs, max_seq_rows, blocks))

    @property
    def generation(self) -> int:
        """How often what kernels are launched over has moved: graphs of launches hold as long as it stays the same."""
        return self._graphs.generation

    def _batch(self, shape: BatchShape) -> DeviceBatch:
        if shape not in self._batches:
            self._batches[shape] = DeviceBatch(shape, self._sizes.mask_words, self._device)
        return self._batches[shape]

    def _upload(self, batch: ForwardBatch, runs: Runs, shape: BatchShape) -> DeviceArrays:
        # Where there is no graph, none knows the addresses.
        is_kept = self._has_graph(batch)
        uploaded = self._batch(shape) if is_kept else DeviceBatch(shape, self._sizes.mask_words, self._device)
        uploaded.upload(batch, runs)
        return uploaded.arrays

    def buffer(self, field: int, rows: int, width: int) -> torch.Tensor:
        """[rows, width]: a buffer after a run; a view."""
        return self._buffers[field][: rows * width].view(rows, width)

    def launch(self, loaded: DeviceProgram, arrays: DeviceArrays, planned: FlashInferAttention | None = None) -> None:
        """Launch a program's kernels over arrays that are on the device. ``planned``: attention of this very batch."""
        num_rows, num_wanted = len(arrays.token_ids), len(arrays.logit_rows)
        for operation, turned, fetch in loaded.steps:
            rows = num_rows if operation.rows == kernel.EVERY_ROW else num_wanted
            if rows > 0 and fetch is not None:
                self._fetch_and_norm(operation, fetch, arrays, rows)
            elif rows > 0:
                self._launch(operation, turned, arrays, rows, planned)

    def _launch(
        self,
        operation: Operation,
        turned: Attention | None,
        arrays: DeviceArrays,
        rows: int,
        planned: FlashInferAttention | None,
    ) -> None:
        code, weight = operation.code, operation.weight
        out = self._view(operation.out, rows)
        gathered = arrays.logit_rows if operation.rows == kernel.GATHERED else None
        if code == kernel.EMBED:
            assert weight is not None
            embed(arrays.token_ids, weight, out, arrays.positions, operation.zero_position)
        elif code == kernel.FILL:
            assert weight is not None
            fill_rows(weight, out)
        elif operation.attention is not None:
            self._attend(operation, operation.attention, arrays, rows, planned)
        else:
            assert operation.x is not None
            x = self._view(operation.x, len(arrays.token_ids) if gathered is not None else rows)
            if code == kernel.COPY:
                copy_rows(x, out, gathered)
            elif code == kernel.NORM:
                assert weight is not None
                rms_norm(x, weight, self._config.rms_norm_eps, out, gathered)
            elif turned is not None:
                assert weight is not None
                self._qkv(x, weight, out, self._rope(turned, arrays))
            else:
                assert weight is not None
                self._linear(x, weight, out, operation.mode)

    def _fetch_and_norm(self, operation: Operation, fetch: Operation, arrays: DeviceArrays, rows: int) -> None:
        assert operation.weight is not None
        token_ids = None
        if fetch.code == kernel.EMBED:
            assert fetch.weight is not None
            x, token_ids = fetch.weight, arrays.token_ids
        else:
            assert fetch.x is not None
            x = self._view(fetch.x, rows)
        copy, out = self._view(fetch.out, rows), self._view(operation.out, rows)
        rms_norm(x, operation.weight, self._config.rms_norm_eps, out, token_ids, copy)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        if isinstance(self._matmuls, StrictMatmuls):
            if mode == SILU_AND_MULTIPLY:
                self._matmuls.gate_up(x, weight, out)
            else:
                self._matmuls.matmul(x, weight, out, add=mode == ADD)
        elif mode == SILU_AND_MULTIPLY:
            gate_up = self._buffers[_GATE_UP][: len(x) * len(weight)].view(len(x), len(weight))
            self._matmuls.gate_up(x, weight, gate_up, out)
        else:
            self._matmuls.matmul(x, weight, out, add=mode == ADD)

    def _qkv(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rope: Rope) -> None:
        if isinstance(self._matmuls, StrictMatmuls):
            self._matmuls.matmul(x, weight, out)
            rope_kv_write(out, *rope, strict=True)
        else:
            self._matmuls.qkv(x, weight, out, rope)

    def _rope(self, attention: Attention, arrays: DeviceArrays) -> Rope:
        weights = attention.weights
        return Rope(
            _present(weights.qkv_bias),
            _present(weights.query_norm),
            _present(weights.key_norm),
            self._config.rms_norm_eps,
            self._cos_sin,
            arrays.positions,
            arrays.slot_mapping,
            *self._planes(attention),
            self._config.num_heads,
        )

    def _planes(self, attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [slots, num_kv_heads, head_dim] each."""
        keys, values = (plane.flatten(0, 1) for plane in self._cache.data[attention.plane])
        return keys, values

    def _attend(
        self,
        operation: Operation,
        attention: Attention,
        arrays: DeviceArrays,
        rows: int,
        planned: FlashInferAttention | None,
    ) -> None:
        config = self._config
        keys, values = self._planes(attention)
        assert operation.x is not None
        qkv = self._view(operation.x, rows)
        query = qkv[:, : config.num_heads * config.head_dim].view(rows, config.num_heads, config.head_dim)
        out = self._view(operation.out, rows).view(rows, config.num_heads, config.head_dim)
        if planned is not None:
            planned.attend(attention.plane, query, out)
            return
        self._attention(
            query,
            keys,
            values,
            arrays.row_starts,
            arrays.context_lens,
            arrays.masks,
            arrays.tree_starts,
            arrays.block_tables,
            arrays.context_starts,
            self._cache.block_size,
            arrays.max_seq_rows,
            self._workspace,
            out,
        )

    def _view(self, span: Span, rows: int) -> torch.Tensor:
        """[rows, span.size]; rows are ``span.width`` apart."""
        whole = self._buffers[span.buffer][: rows * span.width].view(rows, span.width)
        return whole[:, span.offset : span.offset + span.size]

    def gather_given(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Let programs read the rows ``rows`` (int32; None: all, in order) of ``x``, which may be another buffer, as
        GIVEN."""
        copy_rows(x, self.buffer(kernel.GIVEN, len(x if rows is None else rows), x.shape[1]), rows)

    def _shape(self, batch: ForwardBatch, runs: Runs) -> BatchShape:
        """The smallest captured size that holds a batch; a prompt's pass is run as it is."""
        rows, wanted, seqs = batch.num_rows, len(batch.logit_rows), len(runs.seqs)
        most = int((runs.starts[1:] - runs.starts[:-1]).max())
        sizes = self._sizes
        # A table may be wider than what its sequence has: a draft model's has room for the longest.
        longest = int(batch.context_lens.max()) + MASK_WORD_BITS * sizes.mask_words
        blocks = min(batch.block_tables.shape[1], -(-longest // self._cache.block_size))
        if not self._has_graph(batch):
            return BatchShape(rows, wanted, seqs, most, min(table_bucket(blocks), sizes.blocks))
        return self._graph_shape(rows, wanted, seqs, most, blocks)

    def _graph_shape(self, rows: int, wanted: int, seqs: int, most: int, blocks: int) -> BatchShape:
        sizes = self._sizes
        return BatchShape(
            min(bucket(rows), sizes.rows),
            wanted and min(bucket(wanted), sizes.wanted),
            min(seq_bucket(seqs), sizes.seqs),
            1 << (most - 1).bit_length(),
            min(table_bucket(blocks), sizes.blocks),
        )

    def _has_graph(self, batch: ForwardBatch) -> bool:
        """Whether a batch is of a kind that comes again: decode steps, whatever their size; and needs no plan."""
        if self._flashinfer is not None and self._flashinfer.every_pass:
            return False
        return batch.num_rows <= MAX_PROMPT_GRAPH_ROWS or len(batch.logit_rows) == batch.num_rows

    def _reserve(self, field: int, size: int) -> None:
        """Room for a program; graphs that know the smaller buffer are forgotten."""
        buffer = self._buffers.get(field)
        if buffer is None or len(buffer) < size:
            self._buffers[field] = torch.zeros(size, dtype=self._element_type(field), device=self._device)
            self._graphs.clear()

    def _element_type(self, field: int) -> torch.dtype:
        """Logits are float32: rounded to bfloat16 the best two would often be equal."""
        return torch.float32 if field == kernel.LOGITS else self._dtype


def _steps_of(program: Program) -> list[_Step]:
    steps: list[_Step] = []
    for operation in program.operations:
        before = steps[-1].operation if steps else None
        if operation.code == kernel.ROPE:
            linear = steps.pop().operation
            assert linear.code == kernel.LINEAR and linear.out == operation.x, "ROPE turns what a matmul has just left"
            steps.append(_Step(linear, operation.attention))
        elif before is not None and _is_norm_of(operation, before):
            steps[-1] = _Step(operation, fetch=before)
        elif before is not None and _passes_on_given(before, operation):
            assert before.x is not None
            steps[-1] = _Step(operation._replace(x=before.x))
        else:
            steps.append(_Step(operation))
    return steps


def _is_norm_of(operation: Operation, fetch: Operation) -> bool:
    """Whether one kernel may fetch rows and take their norm."""
    if operation.code != kernel.NORM or operation.rows != kernel.EVERY_ROW or fetch.rows != kernel.EVERY_ROW:
        return False
    if fetch.code == kernel.EMBED:
        return fetch.zero_position < 0 and operation.x == fetch.out
    return fetch.code == kernel.COPY and operation.x in (fetch.x, fetch.out)


def _passes_on_given(copy: Operation, operation: Operation) -> bool:
    """Whether a matmul may read the rows that are given, and not a copy of them: nobody else reads EMBEDDED as such."""
    return (
        copy.code == kernel.COPY
        and copy.x is not None
        and copy.x == Span(kernel.GIVEN, copy.x.size)
        and copy.out == Span(kernel.EMBEDDED, copy.x.size)
        and operation.code == kernel.LINEAR
        and operation.x == copy.out
    )


def _present(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None
