"""Run the target model on a GPU: load it, run flat batches, move accepted KV entries.

Only calls that return values to the host wait for the device. This module knows no sequences, no
scheduling and no sampling.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foretoken_kernels.gpu.kv_commit import copy_kv_slots
from foretoken_kernels.gpu.matmul_choice import ROW_BUCKETS
from numpy.typing import NDArray

from foretoken.models.backend import Backend
from foretoken.models.batch import ForwardBatch, chain_batch, chains_batch
from foretoken.models.decoder_weights import Progress
from foretoken.models.device_batch import BatchShape
from foretoken.models.device_llama import DeviceLlama, OverlapPass
from foretoken.models.device_sizes import PassSizes, choices_file
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.row_check import rows_are_independent
from verifier_svc.model.attention_choice import FlashInferPasses
from verifier_svc.model.runner import TargetModel, silent

_log = logging.getLogger(__name__)

# Most bytes of hidden states to fetch into pinned memory: enough for a large batch with accepted
# trees.
_MOST_PINNED_BYTES = 16 << 20
# A prompt pass of this many rows uses the same kernels as longer ones: attention tiles grow no
# further.
_PROMPT_ROWS = 1024
_FEW_ROWS = 32
# With enough sequences to fill the GPU, attention changes its tile at these numbers of a tree's rows,
# and again for larger trees.
_TREE_ROWS = 8, 16
_LONG_CONTEXT = 4096
# Row count that checks strict matmuls of many rows: it needs two tiles of 128.
_STRICT_COUNTS = (130,)


class DeviceRunner(TargetModel):
    """The target model with its KV cache on a GPU. Any thread may build it; one thread calls it.

    TargetModel describes the other arguments and attributes, and the errors.

    Args:
        sizes: sizes of the largest batch.
        strict: give a row the same bits in any batch. If false, use the fastest kernels for each
            batch.
        flashinfer: passes that use FlashInfer's attention (verifier_svc.model.attention_choice).

    Attributes:
        planes: the KV cache as [2 * layers, num_kv_slots, kv_slot_size], the shape that kv_commit
            takes.
    """

    def __init__(
        self,
        path: Path,
        *,
        backend: Backend,
        sizes: PassSizes,
        strict: bool = False,
        flashinfer: FlashInferPasses = "none",
        **options: Any,
    ) -> None:
        super().__init__(path, backend=backend, **options)
        self._device = backend.device
        self._sizes = sizes
        self._strict = strict
        planned = None
        if flashinfer != "none":
            planned = FlashInferAttention(self.config, self.cache, every_pass=flashinfer == "all")
        self._model = DeviceLlama(
            self.config, self.weights, self.cache, self.max_model_len, sizes, strict=strict, flashinfer=planned
        )
        self.planes = self.cache.data.view(2 * self.config.num_layers, self.cache.num_kv_slots, -1)

    @property
    def hidden_states(self) -> torch.Tensor:
        """Return the last pass's hidden states, [rows, captured * hidden_size].

        They have the cache's type and are valid until the next call.
        """
        return self._model.hidden_states

    def fetch_hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        """Fetch these rows of ``hidden_states``, float32 [len(rows), captured * hidden_size]."""
        hidden_states = self._model.hidden_states
        if len(rows) < len(hidden_states):
            hidden_states = hidden_states[torch.tensor(rows, device=self._device)]
        # Pinned memory is reused once its last view is gone: allocating fresh memory takes longer
        # than the copy. A prompt's large buffer would stay pinned without use.
        is_pinned = self._device.type == "cuda" and 4 * hidden_states.numel() <= _MOST_PINNED_BYTES
        fetched = torch.empty(hidden_states.shape, dtype=torch.float32, pin_memory=is_pinned)
        rows_on_host: NDArray[np.float32] = fetched.copy_(hidden_states.to(torch.float32)).numpy()
        return rows_on_host

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
        """Run a batch and return its logits, float32 [len(batch.logit_rows), vocab_size].

        They are on the device and valid until the next call. The pass writes the KV entries of all
        rows before any row attends.

        Args:
            captured_layers: layers whose hidden states to capture for all rows
                (foretoken.drafting.FINAL_NORM).

        Raises:
            ValueError: the batch is larger than ``sizes``.
        """
        return self._model.forward(batch, captured_layers)

    @torch.inference_mode()
    def commit(self, src_kv_slots: NDArray[np.int32], dst_kv_slots: NDArray[np.int32]) -> None:
        """Copy KV entries from ``src_kv_slots`` to ``dst_kv_slots`` one by one, in all layers.

        Raises:
            ValueError: the arrays differ in length, or a KV slot is out of range.
        """
        self.check_kv_slots(src_kv_slots, dst_kv_slots)
        moves = torch.from_numpy(np.stack([src_kv_slots, dst_kv_slots])).to(self._device, non_blocking=True)
        copy_kv_slots(self.planes, moves[0], moves[1])

    @property
    def sizes(self) -> PassSizes:
        """Return the sizes of the largest pass."""
        return self._sizes

    @property
    def generation(self) -> int:
        """Return a number that grows when the passes' buffers move; see OverlapPass."""
        return self._model.generation

    @property
    def most_prompt_rows(self) -> int:
        """Return the rows of the largest pass over prompts alone that has a graph."""
        return self._model.most_prompt_rows

    def overlap_pass(
        self, captured_layers: tuple[int, ...], rows: int, seqs: int, max_seq_rows: int, blocks: int
    ) -> OverlapPass:
        """Return the buffers of an overlapped pass; see DeviceLlama.overlap_pass."""
        return self._model.overlap_pass(captured_layers, rows, seqs, max_seq_rows, blocks)

    def joined_pass(self, captured_layers: tuple[int, ...], shape: BatchShape) -> OverlapPass:
        """Return the buffers of an overlapped pass with prompts; see DeviceLlama.joined_pass."""
        return self._model.joined_pass(captured_layers, shape)

    def tune(self, path: Path | None) -> None:
        """Time the matmul kernels and use the fastest. ``path``: a file that keeps the choices."""
        self._model.tune(path)

    def choose_matmuls(self, progress: Progress = silent) -> None:
        """Use the fastest matmuls, timed unless an earlier start kept the times.

        Call it before ``warm_up``.

        Strict numerics leave no choice. Nothing else should use the GPU meanwhile.
        """
        if self._device.type == "cuda" and not self._strict:
            progress(0, 1, "timing matmuls")
            self.tune(choices_file())
            progress(1, 1, "timing matmuls")

    def warm_up(self, progress: Progress = silent, *, max_nodes: int = 1) -> None:
        """Compile the kernels of prompts and trees before the first request.

        If strict numerics are wanted, it also checks them and sets ``mode``. It writes noise to the
        cache.

        ``max_nodes``: most nodes of one tree.
        """
        start = time.perf_counter()
        room = min(self.max_model_len, self.cache.num_kv_slots - self.block_size, self._sizes.rows)
        # Attention has a kernel for each tile size, which grows with the rows, for splits, and for
        # small tiles after a long context; there, few rows use the kernel of a single row. Matmuls,
        # including the logits', have kernels for their own row counts.
        counts = sorted({1 << power for power in range(max(max_nodes, _PROMPT_ROWS).bit_length())} | set(ROW_BUCKETS))
        longest = min(self.max_model_len, self.cache.num_kv_slots - self.block_size, _LONG_CONTEXT)
        for done, rows in enumerate(count for count in counts if count <= room):
            progress(done, len(counts), "compiling kernels")
            wanted = None if rows <= min(ROW_BUCKETS[-1], self._sizes.wanted) else np.array([rows - 1], np.int32)
            for first in {0, max(longest - rows, 0) if rows > _FEW_ROWS else 0}:
                self.forward(chain_batch(np.zeros(rows, np.int32), first, self.block_size, wanted))
        # With many sequences attention uses the largest tiles of trees, and splits only the keys of
        # small trees after a long context.
        seqs = min(self._sizes.seqs, self._sizes.wanted)
        largest_tree = max(min(max_nodes, room, self._sizes.wanted // seqs), 1)
        num_blocks = self.cache.num_kv_slots // self.block_size - 1
        for length in {1, largest_tree, *(min(rows, largest_tree) for rows in _TREE_ROWS)}:
            for first in {0, max(longest - length, 0)}:
                self.forward(chains_batch(seqs, length, self.block_size, num_blocks, first))
        nowhere = np.zeros(1, np.int32)
        self.commit(nowhere, nowhere)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        progress(1, 1, "compiling kernels")
        _log.info("kernels ready in %.2f s", time.perf_counter() - start)
        if not self._strict:
            _log.info("numerics: fast; a near-tie may fall differently with and without speculation")
            return
        start = time.perf_counter()
        most = min(self.cache.num_kv_slots, self.max_model_len, self._sizes.rows, self._sizes.wanted)
        independent = rows_are_independent(self.forward, self.config, self.block_size, most, progress, _STRICT_COUNTS)
        self.set_mode(independent, time.perf_counter() - start)
