"""Run programs over batches on a GPU: static buffers, kernel launches, and CUDA graphs of them.

No launch waits for the device. A pass's results are valid, in stream order, until the next pass.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.gpu.embedding import copy_rows, embed, fill_rows
from foretoken_kernels.gpu.rms_norm import rms_norm
from foretoken_kernels.gpu.rope_kv_write import Rope
from foretoken_kernels.gpu.strict_attention import SPLIT_KEYS, strict_attention
from foretoken_kernels.gpu.tree_attention import attention_workspace, tree_attention
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.device_batch import WIDE_BLOCKS, BatchShape, DeviceArrays, DeviceBatch, PromptArrays, runs_of
from foretoken.models.device_batches import MAX_PROMPT_GRAPH_ROWS, DeviceBatches
from foretoken.models.device_buffers import DeviceBuffers
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_matmuls import FastMatmuls, PassMatmuls, SameBitsMatmuls
from foretoken.models.device_program import DeviceProgram, fused_steps
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.pinned_buffers import PinnedRows
from foretoken.models.program import Attention, Columns, Operation, Program
from foretoken.models.rope import cos_sin_table
from foretoken.tree import MASK_WORD_BITS

# Elements of the pinned buffer when no program reads GIVEN.
_MIN_PINNED = 16
# Prompt passes of more rows have FlashInfer's attention, where it is installed, and no graph.
_FLASHINFER_FROM = 512
# Programs that share the keys of a tile of rows, at most.
_NUM_SPLITS = 32


class DevicePass:
    """The passes of one model on a GPU. Only one thread at a time may use it.

    Args:
        config: of the model whose keys and values are in ``cache``; all buffers are on the cache's
            device.
        num_positions: rotary positions that may occur.
        strict: give a row the same bits in every batch; otherwise use the fastest kernels for each
            batch.
        flashinfer: attention of ``run``'s passes that have no graph; None: the project's own
            kernels run it.
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
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).contiguous().to(device)
        has_graphs = flashinfer is None or not flashinfer.every_pass
        prompt_rows = MAX_PROMPT_GRAPH_ROWS if flashinfer is None else _FLASHINFER_FROM
        self._batches = DeviceBatches(sizes, cache.block_size, device, graphs=has_graphs, prompt_graph_rows=prompt_rows)
        self._graphs = DeviceGraphs(sizes.graphs and device.type == "cuda")
        self._buffers = DeviceBuffers(cache.data.dtype, device, self._graphs.clear)
        self._given = PinnedRows(_MIN_PINNED, cache.data.dtype, device)
        self._programs: list[DeviceProgram] = []
        self._matmuls: PassMatmuls = (
            SameBitsMatmuls(device, self._graphs.clear)
            if strict
            else FastMatmuls(config, self._buffers, sizes.rows, device)
        )
        self._attention = strict_attention if strict else tree_attention
        self._flashinfer = flashinfer
        # Triton's interpreter runs programs one after the other: splits would gain nothing.
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        num_splits = _NUM_SPLITS if device.type == "cuda" else 1
        if strict and device.type == "cuda":
            # Strict attention divides the keys of a whole table, or none.
            most_keys = WIDE_BLOCKS * cache.block_size + MASK_WORD_BITS * sizes.mask_words
            num_splits = max(num_splits, -(-most_keys // SPLIT_KEYS))
        self._workspace = attention_workspace(sizes.rows, *heads, device, num_splits)

    @property
    def most_prompt_rows(self) -> int:
        """Return the rows of the largest pass without logits that has a graph."""
        return self._batches.most_prompt_rows

    def load(self, program: Program) -> DeviceProgram:
        """Allocate what the program needs and return it ready to run."""
        for field, width in program.row_widths.items():
            self._buffers.reserve(field, self._sizes.rows * width)
        for field, width in program.wanted_widths.items():
            self._buffers.reserve(field, self._sizes.wanted * width)
        for operation in program.operations:
            if operation.x is not None and operation.x.buffer == kernel.GIVEN:
                size, data = self._sizes.rows * operation.x.width, self._cache.data
                self._buffers.reserve(kernel.GIVEN, size)
                if len(self._given) < size:
                    self._given = PinnedRows(size, data.dtype, data.device)
            if operation.code == kernel.LINEAR:
                self._matmuls.reserve(operation, _weight_of(operation))
        self._programs.append(DeviceProgram(fused_steps(program), len(self._programs) + 1))
        return self._programs[-1]

    def tune(self, path: Path | None) -> None:
        """Time the matmuls of the programs loaded so far and use the fastest from now on.

        ``path``: where the choices are kept for the next start. Raises ValueError in strict mode.
        """
        self._matmuls.tune((step for program in self._programs for step in program.steps), path)
        self._graphs.clear()

    @torch.inference_mode()
    def run(self, loaded: DeviceProgram, batch: ForwardBatch, given: NDArray[np.float32] | None = None) -> None:
        """Run a program over a batch, as Executor.run.

        Raises:
            ValueError: the batch is larger than ``sizes``; nothing was written.
        """
        runs = runs_of(batch)
        arrays, graph_shape = self._batches.upload(
            batch, runs, is_captured=lambda shape: not self._graphs.lacks((loaded.number, shape))
        )
        if given is not None:
            self._given.send(given, self.buffer(kernel.GIVEN, *given.shape))
        if graph_shape is not None:
            self._graphs.run((loaded.number, graph_shape), lambda: self.launch(loaded, arrays))
            return
        if self._flashinfer is not None:
            self._flashinfer.plan(batch, runs)
        self.launch(loaded, arrays, self._flashinfer)

    def upload(self, batch: ForwardBatch) -> DeviceArrays:
        """Copy a batch to arrays of its own, in stream order, without waiting for the device.

        Raises ValueError for a batch larger than ``sizes``.
        """
        return self._batches.upload(batch, runs_of(batch), is_new=True).arrays

    def batch_of(self, rows: int, seqs: int, max_seq_rows: int, blocks: int) -> DeviceBatch:
        """Make a batch as DeviceBatches.batch_of does."""
        return self._batches.batch_of(rows, seqs, max_seq_rows, blocks)

    def joined_batch(self, shape: BatchShape) -> DeviceBatch:
        """Make a batch as DeviceBatches.joined_batch does."""
        return self._batches.joined_batch(shape)

    @property
    def generation(self) -> int:
        """Return a number that grows when memory moves.

        A graph of launches is only valid while it stays the same.
        """
        return self._graphs.generation

    def buffer(self, field: int, rows: int, width: int) -> torch.Tensor:
        """Return the buffer ``field`` after a run, as a view [rows, width]."""
        return self._buffers.rows(field, rows, width)

    def gather_given(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Copy rows of ``x``, which may be another buffer, to GIVEN.

        ``rows``: int32; None: all, in order.
        """
        copy_rows(x, self.buffer(kernel.GIVEN, len(x if rows is None else rows), x.shape[1]), rows)

    def launch(self, loaded: DeviceProgram, arrays: DeviceArrays, planned: FlashInferAttention | None = None) -> None:
        """Launch a program's kernels over arrays on the device.

        ``planned``: attention that was planned for them.
        """
        num_rows, num_wanted = len(arrays.token_ids), len(arrays.logit_rows)
        for operation, turned, fetch in loaded.steps:
            rows = num_rows if operation.rows == kernel.EVERY_ROW else num_wanted
            if rows > 0 and fetch is not None:
                self._fetch_and_norm(operation, fetch, arrays, rows)
            elif rows > 0:
                self._launch(operation, turned, arrays, rows if operation.attention is None else num_rows, planned)

    def _launch(
        self,
        operation: Operation,
        turned: Attention | None,
        arrays: DeviceArrays,
        rows: int,
        planned: FlashInferAttention | None,
    ) -> None:
        code = operation.code
        out = self._buffers.view(operation.out, rows)
        gathered = arrays.logit_rows if operation.rows == kernel.GATHERED else None
        if code == kernel.EMBED:
            embed(arrays.token_ids, _weight_of(operation), out, arrays.positions, operation.zero_position)
        elif code == kernel.FILL:
            fill_rows(_weight_of(operation), out)
        elif operation.attention is not None:
            self._attend(operation, operation.attention, arrays, rows, planned)
        else:
            x = self._buffers.view(_input_of(operation), len(arrays.token_ids) if gathered is not None else rows)
            if code == kernel.COPY:
                copy_rows(x, out, gathered)
            elif code == kernel.NORM:
                rms_norm(x, _weight_of(operation), self._config.rms_norm_eps, out, gathered)
            elif turned is not None:
                self._matmuls.qkv(x, _weight_of(operation), out, self._rope(turned, arrays))
            else:
                self._matmuls.linear(x, _weight_of(operation), out, operation.mode)

    def _fetch_and_norm(self, operation: Operation, fetch: Operation, arrays: DeviceArrays, rows: int) -> None:
        if fetch.code == kernel.EMBED:
            x, token_ids = _weight_of(fetch), arrays.token_ids
        else:
            x, token_ids = self._buffers.view(_input_of(fetch), rows), None
        copy, out = self._buffers.view(fetch.out, rows), self._buffers.view(operation.out, rows)
        rms_norm(x, _weight_of(operation), self._config.rms_norm_eps, out, token_ids, copy)

    def _rope(self, attention: Attention, arrays: DeviceArrays) -> Rope:
        weights = attention.weights
        return Rope(
            _present(weights.qkv_bias),
            _present(weights.query_norm),
            _present(weights.key_norm),
            self._config.rms_norm_eps,
            self._cos_sin,
            arrays.positions,
            arrays.kv_slots,
            *self._planes(attention),
            self._config.num_heads,
        )

    def _planes(self, attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [num_kv_slots, num_kv_heads, head_dim] each."""
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
        qkv = self._buffers.view(_input_of(operation), rows)
        query = qkv[:, : config.num_heads * config.head_dim].view(rows, config.num_heads, config.head_dim)
        out = self._buffers.view(operation.out, rows).view(rows, config.num_heads, config.head_dim)
        if planned is not None:
            planned.attend(attention.plane, query, out)
            return
        # Rows of trees come first: fewer rows leave attention room for more splits.
        num_wanted = len(arrays.logit_rows) if arrays.prompts is not None else rows
        runs: list[tuple[DeviceArrays | PromptArrays, int]] = [(arrays, num_wanted)]
        if arrays.prompts is not None and operation.rows != kernel.WANTED:
            runs.append((arrays.prompts, rows))
        for each, num_rows in runs:
            self._attention(
                query[:num_rows],
                keys,
                values,
                each.row_starts,
                arrays.context_lens,
                arrays.masks,
                each.tree_starts,
                each.block_tables,
                each.context_starts,
                self._cache.block_size,
                each.max_seq_rows,
                self._workspace,
                out,
            )


def _weight_of(operation: Operation) -> torch.Tensor:
    assert operation.weight is not None, "EMBED, FILL, NORM and LINEAR have one"
    return operation.weight


def _input_of(operation: Operation) -> Columns:
    assert operation.x is not None, "only EMBED and FILL read no buffer"
    return operation.x


def _present(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None
