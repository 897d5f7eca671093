"""The decoder of Llama, Mistral, Qwen2 and Qwen3 over a paged cache, on the CPU: fills the kernels' tables.

Rows are independent: a row's logits have the same bits whatever rows, chunks and trees run beside it, and on any
number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.batch_check import longest_path
from foretoken_kernels.cpu.linear import ROW_TILE
from foretoken_kernels.cpu.thread_team import ThreadTeam
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import DecoderWeights
from foretoken.models.rope import cos_sin_table

_PATH_MULTIPLE = 64


class Llama:
    """One decoder with its buffers. Not for two threads at once.

    Args:
        num_positions: rotary positions that may occur; at least the context length.
        num_threads: threads of one pass, the caller counted.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, cache: KVCache, num_positions: int, num_threads: int
    ) -> None:
        self.config = config
        self._weights = weights
        self._cache = cache
        self._team = ThreadTeam(num_threads)
        self._function = kernel.forward_function(weights.bfloat16, cache.data.dtype == torch.bfloat16)
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).contiguous()
        self._limits = (config.vocab_size, num_positions, cache.num_blocks, cache.block_size)
        self._epsilon = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        self._layers = self._layer_table()
        self._args = self._fixed_table()
        self._buffers: dict[int, torch.Tensor] = {}
        self._all_rows = torch.empty(0, dtype=torch.int32)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 [len(logit_rows), vocab_size]; valid until the next call.

        Writes every row's keys and values to its slot first, so a tree's nodes see each other in the same pass.

        Raises:
            ValueError: an index of the batch is out of range; nothing was written.
        """
        longest = longest_path(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.row_seqs,
            batch.context_lens,
            batch.masks,
            batch.tree_starts,
            batch.block_tables,
            batch.logit_rows,
            self._limits,
        )
        if longest < 0:
            raise ValueError(f"row {-1 - longest} of the batch holds an index out of range")
        wanted = len(batch.logit_rows)
        self._set_batch(batch)
        self._reserve(batch.num_rows, wanted, longest)
        self._team.run(self._function, _address(self._args))
        return self._buffers[kernel.LOGITS][: wanted * self.config.vocab_size].view(wanted, self.config.vocab_size)

    def _set_batch(self, batch: ForwardBatch) -> None:
        args = self._args
        args[kernel.NUM_ROWS] = batch.num_rows
        args[kernel.NUM_LOGIT_ROWS] = len(batch.logit_rows)
        args[kernel.MASK_WORDS] = batch.masks.shape[1]
        args[kernel.MAX_BLOCKS] = batch.block_tables.shape[1]
        for field, array in (
            (kernel.TOKEN_IDS, batch.token_ids),
            (kernel.POSITIONS, batch.positions),
            (kernel.SLOT_MAPPING, batch.slot_mapping),
            (kernel.ROW_SEQS, batch.row_seqs),
            (kernel.CONTEXT_LENS, batch.context_lens),
            (kernel.MASKS, batch.masks),
            (kernel.TREE_STARTS, batch.tree_starts),
            (kernel.BLOCK_TABLES, batch.block_tables),
            (kernel.LOGIT_ROWS, batch.logit_rows),
        ):
            if not array.flags.c_contiguous:
                raise ValueError("the arrays of a batch must be contiguous")
            args[field] = _address(array)

    def _reserve(self, num_rows: int, wanted: int, longest: int) -> None:
        """Grow the buffers, to powers of two, so that this batch fits."""
        config, threads = self.config, self._team.num_threads
        rows = -(-num_rows // ROW_TILE) * ROW_TILE
        stride = -(-longest // _PATH_MULTIPLE) * _PATH_MULTIPLE
        self._args[kernel.SCORE_STRIDE] = stride
        if len(self._all_rows) < num_rows:
            self._all_rows = torch.arange(_power_of_two(num_rows), dtype=torch.int32)
            self._args[kernel.ALL_ROWS] = self._all_rows.data_ptr()
        queries = threads * kernel.ATTENTION_ROW_TILE * (config.num_heads // config.num_kv_heads)
        for field, size, dtype in (
            (kernel.HIDDEN, rows * config.hidden_size, torch.float32),
            (kernel.NORMED, rows * config.hidden_size, torch.float32),
            (kernel.QKV_OUT, rows * config.qkv_size, torch.float32),
            (kernel.ATTENTION_OUT, rows * config.num_heads * config.head_dim, torch.float32),
            (kernel.GATED, rows * config.intermediate_size, torch.float32),
            (kernel.LOGITS, max(wanted, 1) * config.vocab_size, torch.float32),
            (kernel.SCORES, queries * stride, torch.float32),
            (kernel.OFFSETS, threads * kernel.ATTENTION_ROW_TILE * stride, torch.int64),
            (kernel.QUERIES, queries * config.head_dim, torch.float32),
            (kernel.QUERY_SUMS, queries * config.head_dim, torch.float32),
            (kernel.THREAD_SCRATCH, threads * kernel.THREAD_SCRATCH_FLOATS, torch.float32),
        ):
            buffer = self._buffers.get(field)
            if buffer is None or len(buffer) < size:
                # Zeros, because a tile of rows reads past the last row: never a NaN's slow path.
                self._buffers[field] = buffer = torch.zeros(_power_of_two(size), dtype=dtype)
                self._args[field] = buffer.data_ptr()

    def _fixed_table(self) -> NDArray[np.int64]:
        config, weights = self.config, self._weights
        args = np.zeros(kernel.NUM_FIELDS, np.int64)
        for field, value in (
            (kernel.NUM_LAYERS, config.num_layers),
            (kernel.HIDDEN_SIZE, config.hidden_size),
            (kernel.INTERMEDIATE_SIZE, config.intermediate_size),
            (kernel.NUM_HEADS, config.num_heads),
            (kernel.NUM_KV_HEADS, config.num_kv_heads),
            (kernel.HEAD_DIM, config.head_dim),
            (kernel.VOCAB_SIZE, config.vocab_size),
            (kernel.BLOCK_SIZE, self._cache.block_size),
            (kernel.TIED, int(config.tie_word_embeddings)),
            (kernel.HAS_BIAS, int(config.qkv_bias)),
            (kernel.HAS_HEAD_NORM, int(config.head_norm)),
            (kernel.EPSILON, self._epsilon.data_ptr()),
            (kernel.EMBEDDING, weights.embedding.data_ptr()),
            (kernel.HEAD, weights.head.data_ptr()),
            (kernel.FINAL_NORM, weights.final_norm.data_ptr()),
            (kernel.LAYERS, _address(self._layers)),
            (kernel.COS_SIN, self._cos_sin.data_ptr()),
        ):
            args[field] = value
        return args

    def _layer_table(self) -> NDArray[np.int64]:
        table = np.zeros((self.config.num_layers, kernel.NUM_LAYER_FIELDS), np.int64)
        for index, layer in enumerate(self._weights.layers):
            for field, tensor in (
                (kernel.INPUT_NORM, layer.input_norm),
                (kernel.QKV, layer.qkv),
                (kernel.QKV_BIAS, layer.qkv_bias),
                (kernel.QUERY_NORM, layer.query_norm),
                (kernel.KEY_NORM, layer.key_norm),
                (kernel.OUTPUT, layer.output),
                (kernel.POST_ATTENTION_NORM, layer.post_attention_norm),
                (kernel.GATE_UP, layer.gate_up),
                (kernel.DOWN, layer.down),
                (kernel.KEYS, self._cache.keys(index)),
                (kernel.VALUES, self._cache.values(index)),
            ):
                table[index, field] = tensor.data_ptr()
        return table


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
