"""The decoder on a GPU: passes over batches that the host or kernels fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from foretoken_kernels.cpu import decoder as kernel

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import DecoderWeights
from foretoken.models.device_batch import BatchShape, DeviceArrays, DeviceBatch
from foretoken.models.device_pass import DevicePass
from foretoken.models.device_program import DeviceProgram
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.llama import Llama


class OverlapPass(NamedTuple):
    """A pass over a batch that kernels fill.

    Attributes:
        batch: the arrays to fill; call ``clear`` on it first.
        launch: launches the kernels of the pass; the caller may capture it in a graph.
        generation: of the buffers; a graph is only valid for the generation that it was captured
            with.
        logits: float32 [wanted, vocab_size], after a launch.
        hidden_states: [rows, captured * hidden_size], after a launch; None if no hidden states are
            kept.
    """

    batch: DeviceBatch
    launch: Callable[[], None]
    generation: int
    logits: torch.Tensor
    hidden_states: torch.Tensor | None


class DeviceLlama(Llama[DeviceProgram]):
    """A decoder whose weights and cache are on a GPU.

    Args:
        num_positions, sizes, strict, flashinfer: as for DevicePass.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        cache: KVCache,
        num_positions: int,
        sizes: PassSizes,
        strict: bool = False,
        flashinfer: FlashInferAttention | None = None,
    ) -> None:
        self._passes = DevicePass(config, cache, num_positions, sizes, strict, flashinfer)
        super().__init__(config, weights, self._passes)

    def tune(self, path: Path | None) -> None:
        """Time the matmuls and use the fastest from now on.

        ``path`` keeps the choices for the next start.
        """
        # Both, because loading the other one later would move memory that callers' graphs know.
        self._loaded(())
        self._loaded((), wants_few=True)
        self._passes.tune(path)

    def upload(self, batch: ForwardBatch) -> DeviceArrays:
        """Upload as DevicePass.upload does."""
        return self._passes.upload(batch)

    def launch(self, arrays: DeviceArrays) -> torch.Tensor:
        """Launch ``forward`` over arrays on the GPU, without waiting; a graph may capture it."""
        self._passes.launch(self._loaded(()), arrays)
        return self._passes.buffer(kernel.LOGITS, len(arrays.logit_rows), self.config.vocab_size)

    @property
    def generation(self) -> int:
        """Return the generation of the passes' buffers; see OverlapPass."""
        return self._passes.generation

    @property
    def most_prompt_rows(self) -> int:
        """Return the rows of the largest pass over prompts alone that has a graph."""
        return self._passes.most_prompt_rows

    def overlap_pass(
        self, captured_layers: tuple[int, ...], rows: int, seqs: int, max_seq_rows: int, blocks: int
    ) -> OverlapPass:
        """Return a pass over batches of these sizes, which kernels fill on the device.

        ``captured_layers``: as for ``forward``. Raises ValueError for more than the largest pass.
        """
        return self._overlap_pass(
            self._loaded(captured_layers), self._passes.batch_of(rows, seqs, max_seq_rows, blocks), captured_layers
        )

    def joined_pass(self, captured_layers: tuple[int, ...], shape: BatchShape) -> OverlapPass:
        """Return a pass whose first rows kernels fill, as above, and whose other rows are prompts'.

        Raises ValueError for more than the largest pass.
        """
        loaded = self._loaded(captured_layers, wants_few=self._end_before_last_layer(captured_layers))
        return self._overlap_pass(loaded, self._passes.joined_batch(shape), captured_layers)

    def _overlap_pass(self, loaded: DeviceProgram, batch: DeviceBatch, captured_layers: tuple[int, ...]) -> OverlapPass:
        arrays, width = batch.arrays, len(captured_layers) * self.config.hidden_size
        return OverlapPass(
            batch,
            lambda: self._passes.launch(loaded, arrays),
            self._passes.generation,
            self._passes.buffer(kernel.LOGITS, len(arrays.logit_rows), self.config.vocab_size),
            self._passes.buffer(kernel.CAPTURED, len(arrays.token_ids), width) if width else None,
        )
