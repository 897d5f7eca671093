"""The target model of one verifier on a GPU: loads it, runs it over flat batches, moves accepted keys and values.

No call waits for the device but those that return values to the host. Knows nothing of sequences, scheduling or
sampling.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foretoken_kernels.gpu.kv_commit import copy_slots
from foretoken_kernels.gpu.matmul_choice import ROW_BUCKETS
from numpy.typing import NDArray

from foretoken.models.backend import Backend
from foretoken.models.batch import ForwardBatch, chain_batch, chains_batch
from foretoken.models.decoder_weights import Progress
from foretoken.models.device_llama import DeviceLlama, ResidentPass
from foretoken.models.device_sizes import PassSizes, choices_file
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.row_check import rows_are_independent
from verifier_svc.model.attention_choice import FlashInferPasses
from verifier_svc.model.runner import TargetModel, silent

_log = logging.getLogger(__name__)

# Of hidden rows that are fetched at once: a large batch's, accepted trees included.
_MOST_PINNED_BYTES = 16 << 20
# A prompt's pass of so many rows runs the kernels of longer ones too: attention's tiles are at their largest.
_PROMPT_ROWS = 1024
_FEW_ROWS = 32
# Trees of more sequences than keep a GPU busy have another tile from so many rows on, and yet another where they are
# larger.
_TREE_ROWS = 16
_LONG_CONTEXT = 4096
# Strict matmuls of many rows: two tiles of 128.
_STRICT_COUNTS = (130,)


class DeviceRunner(TargetModel):
    """The target model with its cache on a GPU. One thread calls it, any thread may build it.

    Args:
        sizes: of the largest batch.
        strict: whether a row is to have the same bits in any batch; else the kernels are the fastest for each.
        flashinfer: which passes FlashInfer is the attention of (verifier_svc.model.attention_choice).
        Others, errors and attributes as TargetModel.

    Attributes:
        planes: [2 * layers, slots, slot_size]; the cache, as kv_commit takes it.
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
        self._most_rows, self._most_wanted, self._most_seqs = sizes.rows, sizes.wanted, sizes.seqs
        self._strict = strict
        planned = None
        if flashinfer != "none":
            planned = FlashInferAttention(self.config, self.cache, every_pass=flashinfer == "all")
        self._model = DeviceLlama(
            self.config, self.weights, self.cache, self.max_model_len, sizes, strict=strict, flashinfer=planned
        )
        self.planes = self.cache.data.view(2 * self.config.num_layers, self.cache.num_slots, -1)

    @property
    def features(self) -> torch.Tensor:
        """[rows, captured * hidden_size] of the last pass, of the cache's type; valid until the next call."""
        return self._model.features

    def feature_rows(self, rows: list[int]) -> NDArray[np.float32]:
        """float32 [len(rows), captured * hidden_size] of the last pass, fetched."""
        features = self._model.features
        if len(rows) < len(features):
            features = features[torch.tensor(rows, device=self._device)]
        # Pinned memory comes back when its last view is gone, and is given out again: fresh memory takes longer to come
        # by than to copy to. A prompt's would stay pinned for nothing.
        is_pinned = self._device.type == "cuda" and 4 * features.numel() <= _MOST_PINNED_BYTES
        fetched = torch.empty(features.shape, dtype=torch.float32, pin_memory=is_pinned)
        rows_on_host: NDArray[np.float32] = fetched.copy_(features.to(torch.float32)).numpy()
        return rows_on_host

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, features: tuple[int, ...] = ()) -> torch.Tensor:
        """float32 [len(batch.logit_rows), vocab_size] on the device; valid until the next call.

        All rows' keys and values are written before any row attends. ``features``: hidden states to capture for all
        rows (foretoken.drafting.FINAL_NORM). Raises ValueError for a batch larger than ``sizes``.
        """
        return self._model.forward(batch, features)

    @torch.inference_mode()
    def commit(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy keys and values of slot ``src_slots[i]`` to ``dst_slots[i]`` in all layers, in ascending i.

        Raises:
            ValueError: the arrays differ in length or name a slot that is not there.
        """
        self.check_slots(src_slots, dst_slots)
        moves = torch.from_numpy(np.stack([src_slots, dst_slots])).to(self._device, non_blocking=True)
        copy_slots(self.planes, moves[0], moves[1])

    def resident_pass(
        self, features: tuple[int, ...], rows: int, seqs: int, max_seq_rows: int, blocks: int
    ) -> ResidentPass:
        """As DeviceLlama.resident_pass."""
        return self._model.resident_pass(features, rows, seqs, max_seq_rows, blocks)

    def tune(self, path: Path | None) -> None:
        """Time matmuls and take the fastest from now on; ``path`` keeps the choices for the next start."""
        self._model.tune(path)

    def warm_up(self, progress: Progress = silent, *, max_nodes: int = 1) -> None:
        """Choose matmuls, compile the kernels of prompts' passes and of trees up to ``max_nodes``, so that no request
        waits for a compiler; where strict passes are wanted, check that they are. Leaves noise in the cache. Sets
        ``mode``."""
        start = time.perf_counter()
        if self._device.type == "cuda" and not self._strict:
            progress(0, 1, "timing matmuls")
            self.tune(choices_file())
            progress(1, 1, "timing matmuls")
        room = min(self.max_model_len, self.cache.num_slots - self.block_size, self._most_rows)
        # The attention's kernel is another one for each of its tiles, which grow with the rows, for splits, and for
        # small tiles behind a long context, where few rows have the one that a single row has anywhere.
        # Matmuls have kernels for their own numbers of rows, that of logits too.
        counts = sorted({1 << power for power in range(max(max_nodes, _PROMPT_ROWS).bit_length())} | set(ROW_BUCKETS))
        longest = min(self.max_model_len, self.cache.num_slots - self.block_size, _LONG_CONTEXT)
        for done, rows in enumerate(count for count in counts if count <= room):
            progress(done, len(counts), "compiling kernels")
            wanted = None if rows <= min(ROW_BUCKETS[-1], self._most_wanted) else np.array([rows - 1], np.int32)
            for first in {0, max(longest - rows, 0) if rows > _FEW_ROWS else 0}:
                self.forward(chain_batch(np.zeros(rows, np.int32), first, self.block_size, wanted))
        # Many sequences leave nothing to split, and have the largest tiles of trees.
        seqs = min(self._most_seqs, self._most_wanted)
        largest_tree = max(min(max_nodes, room, self._most_wanted // seqs), 1)
        for length in {1, min(_TREE_ROWS, largest_tree), largest_tree}:
            self.forward(chains_batch(seqs, length, self.block_size, self.cache.num_slots // self.block_size - 1))
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
        most = min(self.cache.num_slots, self.max_model_len, self._most_rows, self._most_wanted)
        independent = rows_are_independent(self.forward, self.config, self.block_size, most, progress, _STRICT_COUNTS)
        self.set_mode(independent, time.perf_counter() - start)
