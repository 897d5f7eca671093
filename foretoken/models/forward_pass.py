"""Run programs over batches on the CPU; check every index before compiled code uses it.

Rows are independent: a row's results have the same bits whatever rows, chunks and trees run beside
it, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.batch_check import longest_path
from foretoken_kernels.cpu.draft_levels import LevelPass
from foretoken_kernels.cpu.thread_team import ThreadTeam
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.program import Attention, Operation, Program
from foretoken.models.rope import cos_sin_table

# Rows from which on a pass counts as a prompt's. It is long enough that threads which wait at its
# barriers lose little to other processes on their cores. On two cores, trees of a few rows were
# slower with both.
WIDE_ROWS = 64
_PATH_MULTIPLE = 64
# The kernels' numbers of element types; panels hold bits (foretoken.models.weight_layout).
ELEMENTS = {
    torch.float32: kernel.FLOAT32,
    torch.bfloat16: kernel.BFLOAT16,
    torch.uint16: kernel.BFLOAT16,
    torch.float16: kernel.FLOAT16,
    torch.int16: kernel.FLOAT16,
}


@dataclass(slots=True, eq=False)
class LoadedProgram:
    """A program as compiled code reads it.

    Attributes:
        kept: tensors whose addresses are in ``table``.
        fits: the largest (rows, wanted rows, path) that the buffers hold so far.
    """

    program: Program
    kept: list[torch.Tensor]
    table: NDArray[np.int64]
    address: int
    fits: tuple[int, int, int] = (-1, -1, -1)


class ForwardPass:
    """The buffers and the compiled function of one model. Only one thread at a time may use it.

    Args:
        config: of the model whose keys and values are in ``cache``.
        vocab_size: token ids of a batch are below it.
        num_positions: rotary positions that may occur; at least the context length.
        num_threads: threads of one pass, including the caller.
        wide_threads: threads of a pass of WIDE_ROWS rows or more; 0: the same number.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        vocab_size: int,
        num_positions: int,
        num_threads: int,
        wide_threads: int = 0,
    ) -> None:
        self._config = config
        self._cache = cache
        self._num_threads, self._wide_threads = num_threads, wide_threads or num_threads
        self._team = ThreadTeam(max(num_threads, wide_threads))
        self._function = kernel.forward_function(ELEMENTS[cache.data.dtype])
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).contiguous()
        self._limits = (vocab_size, num_positions, cache.num_blocks, cache.block_size)
        self._epsilon = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        self._args = self._fixed_table()
        self._args_address = _address(self._args)
        self._attention_tables: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._all_rows = torch.empty(0, dtype=torch.int32)
        self._no_starts = np.zeros(0, np.int32)

    def load(self, program: Program) -> LoadedProgram:
        """Return the program ready to run."""
        kept: list[torch.Tensor] = []
        table = np.array([self._entry(operation, kept) for operation in program.operations], np.int64)
        table = table.reshape(-1, kernel.NUM_OPERATION_FIELDS)
        return LoadedProgram(program, kept, table, _address(table))

    def _entry(self, operation: Operation, kept: list[torch.Tensor]) -> list[int]:
        """Return one operation as a row of the kernel's table.

        Append the tensors that it names to ``kept``.
        """
        x, out, weight = operation.x, operation.out, operation.weight
        if operation.attention is not None:
            weight = self._attention_table(operation.attention)
        rows = operation.zero_position if operation.code == kernel.EMBED else operation.rows
        entry = [0] * kernel.NUM_OPERATION_FIELDS
        for index, value in (
            (kernel.CODE, operation.code),
            (kernel.OUT, out.buffer),
            (kernel.OUT_STRIDE, out.width),
            (kernel.OUT_OFFSET, out.offset),
            (kernel.SIZE, x.size if x is not None else out.size),
            (kernel.ROWS, rows),
            (kernel.MODE, operation.mode),
        ):
            entry[index] = value
        if x is not None:
            entry[kernel.X], entry[kernel.X_STRIDE], entry[kernel.X_OFFSET] = x.buffer, x.width, x.offset
        if weight is not None:
            entry[kernel.WEIGHT] = weight.data_ptr()
            entry[kernel.ELEMENT] = ELEMENTS.get(weight.dtype, kernel.FLOAT32)
            kept.append(weight)
        return entry

    def _attention_table(self, attention: Attention) -> torch.Tensor:
        """Return the addresses that ROPE and ATTEND read for one layer."""
        plane, weights = attention
        if plane not in self._attention_tables:
            table = np.zeros(kernel.NUM_ATTENTION_FIELDS, np.int64)
            for index, tensor in (
                (kernel.QKV_BIAS, weights.qkv_bias),
                (kernel.QUERY_NORM, weights.query_norm),
                (kernel.KEY_NORM, weights.key_norm),
                (kernel.KEYS, self._cache.keys(plane)),
                (kernel.VALUES, self._cache.values(plane)),
            ):
                table[index] = tensor.data_ptr() if tensor.numel() else 0
            self._attention_tables[plane] = torch.from_numpy(table)
        return self._attention_tables[plane]

    def run(self, loaded: LoadedProgram, batch: ForwardBatch, given: NDArray[np.float32] | None = None) -> None:
        """Run a program over a batch, as Executor.run.

        Raises:
            ValueError: an index of the batch is out of range; nothing was written.
        """
        arrays = (
            batch.token_ids,
            batch.positions,
            batch.kv_slots,
            batch.row_seqs,
            batch.context_lens,
            batch.masks,
            batch.tree_starts,
            batch.block_tables,
            batch.logit_rows,
            self._context_starts(batch),
        )
        if not all(array.flags.c_contiguous for array in arrays):
            raise ValueError("the arrays of a batch must be contiguous")
        longest = longest_path(*arrays, self._limits)
        if longest < 0:
            raise ValueError(f"row {-1 - longest} of the batch holds an index out of range")
        args = self._args
        args[kernel.OPERATIONS], args[kernel.NUM_OPERATIONS] = loaded.address, len(loaded.table)
        args[kernel.GIVEN] = 0 if given is None else _address(given)
        kernel.set_batch(args, *arrays)
        self._reserve(loaded, batch.num_rows, len(batch.logit_rows), longest)
        num_threads = self._num_threads if batch.num_rows < WIDE_ROWS else self._wide_threads
        self._team.run(self._function, self._args_address, num_threads)

    def level_pass(
        self, programs: Sequence[LoadedProgram], num_rows: int, longest: int, output_field: int, hidden_size: int
    ) -> LevelPass:
        """Return the arguments with which compiled code runs the programs itself.

        Args:
            programs: one for each module.
            num_rows: rows of one pass at most.
            longest: positions that one row attends to at most.
            output_field, hidden_size: as for LevelPass.
        """
        for loaded in programs:
            self._reserve(loaded, num_rows, num_rows, longest)
        table = np.array([(loaded.address, len(loaded.table)) for loaded in programs], np.int64)
        num_threads = min(self._num_threads, self._team.num_threads)
        return LevelPass(
            self._args,
            table,
            self._function.address,
            num_threads,
            output_field,
            hidden_size,
            num_rows,
            self._limits,
        )

    def buffer(self, field: int, rows: int, width: int) -> torch.Tensor:
        """Return the buffer ``field`` after a run, as a float32 view [rows, width].

        It is valid until the next run.
        """
        return self._buffers[field][: rows * width].view(rows, width)

    def _context_starts(self, batch: ForwardBatch) -> NDArray[np.int32]:
        num_seqs = len(batch.tree_starts)
        if batch.context_starts is None:
            if len(self._no_starts) < num_seqs:
                self._no_starts = np.zeros(_power_of_two(num_seqs), np.int32)
            return self._no_starts[:num_seqs]
        if len(batch.context_starts) != num_seqs:
            raise ValueError("context_starts and tree_starts differ in length")
        return batch.context_starts

    def _reserve(self, loaded: LoadedProgram, num_rows: int, wanted: int, longest: int) -> None:
        """Grow the buffers to powers of two that hold this batch."""
        config, threads, program = self._config, self._team.num_threads, loaded.program
        stride = -(-longest // _PATH_MULTIPLE) * _PATH_MULTIPLE
        self._args[kernel.SCORE_STRIDE] = stride
        fits = loaded.fits
        if num_rows <= fits[0] and wanted <= fits[1] and stride <= fits[2]:
            return
        loaded.fits = (max(num_rows, fits[0]), max(wanted, fits[1]), max(stride, fits[2]))
        if len(self._all_rows) < num_rows:
            self._all_rows = torch.arange(_power_of_two(num_rows), dtype=torch.int32)
            self._args[kernel.ALL_ROWS] = self._all_rows.data_ptr()
        for field, width in program.row_widths.items():
            self._grow(field, num_rows * width)
        for field, width in program.wanted_widths.items():
            self._grow(field, max(wanted, 1) * width)
        queries = threads * kernel.ATTENTION_ROW_TILE * (config.num_heads // config.num_kv_heads)
        self._grow(kernel.SCORES, queries * stride)
        self._grow(kernel.OFFSETS, threads * kernel.ATTENTION_ROW_TILE * stride, torch.int64)
        self._grow(kernel.QUERIES, queries * config.head_dim)
        self._grow(kernel.QUERY_SUMS, queries * config.head_dim)
        self._grow(kernel.THREAD_SCRATCH, threads * kernel.THREAD_SCRATCH_FLOATS)

    def _grow(self, field: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        buffer = self._buffers.get(field)
        if buffer is None or len(buffer) < size:
            self._buffers[field] = buffer = torch.empty(_power_of_two(size), dtype=dtype)
            self._args[field] = buffer.data_ptr()

    def _fixed_table(self) -> NDArray[np.int64]:
        config = self._config
        args = np.zeros(kernel.NUM_FIELDS, np.int64)
        for field, value in (
            (kernel.NUM_HEADS, config.num_heads),
            (kernel.NUM_KV_HEADS, config.num_kv_heads),
            (kernel.HEAD_DIM, config.head_dim),
            (kernel.BLOCK_SIZE, self._cache.block_size),
            (kernel.EPSILON, self._epsilon.data_ptr()),
            (kernel.COS_SIN, self._cos_sin.data_ptr()),
        ):
            args[field] = value
        return args


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
