"""The decoder of Llama, Mistral, Qwen2, Qwen3 and MiMo over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.draft_levels import NO_OUTPUT, LevelPass

from foretoken.drafting import FINAL_NORM
from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import DecoderWeights
from foretoken.models.device_sizes import PassSizes
from foretoken.models.executor import make_executor
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.forward_pass import ForwardPass
from foretoken.models.program import Attention, LayerShape, Program, Span

if TYPE_CHECKING:
    from foretoken.models.device_batch import DeviceArrays, DeviceBatch
    from foretoken.models.device_pass import DevicePass


class ResidentPass(NamedTuple):
    """A pass over a batch that kernels fill.

    Attributes:
        batch: what they are to fill; ``clear`` it first.
        launch: its kernels, for a graph of whoever asks.
        generation: of the buffers; a graph is of no use behind another one.
        logits: float32 [rows, vocab_size], behind a launch.
        features: [rows, captured * hidden_size], behind a launch; None without any.
    """

    batch: DeviceBatch
    launch: Callable[[], None]
    generation: int
    logits: torch.Tensor
    features: torch.Tensor | None


class Llama:
    """One decoder with its buffers. Not for two threads at once.

    Args:
        num_positions: rotary positions that may occur; at least the context length.
        num_threads, wide_threads: as ForwardPass.
        sizes: of passes on a GPU, where weights and cache then are; None: on the CPU.
        strict: on a GPU, whether a row is to have the same bits in any batch, as it has on a CPU.
        flashinfer: on a GPU, as DevicePass.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        cache: KVCache,
        num_positions: int,
        num_threads: int,
        wide_threads: int = 0,
        sizes: PassSizes | None = None,
        strict: bool = False,
        flashinfer: FlashInferAttention | None = None,
    ) -> None:
        self.config = config
        self._weights = weights
        self._executor = make_executor(
            config, cache, config.vocab_size, num_positions, num_threads, wide_threads, sizes, strict, flashinfer
        )
        self._programs: dict[tuple[int, ...], Any] = {}
        # Rows and width of the last pass's features.
        self._captured = (0, 0)

    @property
    def features(self) -> torch.Tensor:
        """[rows, len(features) * hidden_size]: what the last pass was asked for; valid until the next call.

        float32 on a CPU, as the cache on a GPU.
        """
        if 0 in self._captured:
            return torch.empty(self._captured)
        return self._executor.buffer(kernel.FEATURES, *self._captured)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, features: tuple[int, ...] = ()) -> torch.Tensor:
        """float32 [len(logit_rows), vocab_size]; valid until the next call.

        Writes every row's keys and values to its slot first, so a tree's nodes see each other in the same pass.

        Args:
            features: hidden states to keep of all rows, side by side in this order: the state that enters layer l, the
                state that leaves the last layer (l = the number of layers), or FINAL_NORM.

        Raises:
            ValueError: an index of the batch is out of range, or there is no such hidden state; nothing was written.
        """
        self._executor.run(self._loaded(features), batch)
        self._captured = (batch.num_rows, len(features) * self.config.hidden_size)
        return self._executor.buffer(kernel.LOGITS, len(batch.logit_rows), self.config.vocab_size)

    def tune(self, path: Path | None) -> None:
        """On a GPU: time its matmuls and take the fastest from now on; ``path`` keeps the choices."""
        self._loaded(())
        cast("DevicePass", self._executor).tune(path)

    def launch(self, arrays: DeviceArrays) -> torch.Tensor:
        """As ``forward``, over arrays that are on the GPU; nothing waits for it, and it may be captured in a graph."""
        cast("DevicePass", self._executor).launch(self._loaded(()), arrays)
        return self._executor.buffer(kernel.LOGITS, len(arrays.logit_rows), self.config.vocab_size)

    def resident_pass(
        self, features: tuple[int, ...], rows: int, seqs: int, max_seq_rows: int, blocks: int
    ) -> ResidentPass:
        """On a GPU: passes over batches of these sizes, which kernels fill on the device. ``features``: as ``forward``.

        Raises ValueError for more than the largest pass.
        """
        executor = cast("DevicePass", self._executor)
        loaded = self._loaded(features)
        batch = executor.batch_of(rows, seqs, max_seq_rows, blocks)
        num_rows, width = len(batch.arrays.token_ids), len(features) * self.config.hidden_size
        return ResidentPass(
            batch,
            lambda: executor.launch(loaded, batch.arrays),
            executor.generation,
            executor.buffer(kernel.LOGITS, num_rows, self.config.vocab_size),
            executor.buffer(kernel.FEATURES, num_rows, width) if width else None,
        )

    def level_pass(self, num_rows: int, longest: int) -> LevelPass:
        """Passes over a draft tree's beams, of at most ``num_rows`` rows that attend to ``longest`` positions each."""
        assert isinstance(self._executor, ForwardPass), "levels are compiled into one call on a CPU alone"
        return self._executor.level_pass([self._loaded(())], num_rows, longest, NO_OUTPUT, 0)

    def _loaded(self, features: tuple[int, ...]) -> Any:
        if features not in self._programs:
            self._programs[features] = self._executor.load(self._program(features))
        return self._programs[features]

    def _program(self, features: tuple[int, ...]) -> Program:
        config, weights = self.config, self._weights
        for feature in features:
            if feature != FINAL_NORM and not 0 <= feature <= config.num_layers:
                raise ValueError(f"there is no hidden state {feature} in a model of {config.num_layers} layers")
        size = config.hidden_size
        program, hidden, normed = Program(), Span(kernel.HIDDEN, size), Span(kernel.NORMED, size)
        kept = {
            feature: [Span(kernel.FEATURES, size, i * size, len(features) * size) for i in _places(feature, features)]
            for feature in features
        }
        program.embed(weights.embedding, config.tie_word_embeddings, hidden)
        shape = LayerShape(size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, size)
        for index, layer in enumerate(weights.layers):
            for span in kept.get(index, ()):
                program.copy(hidden, span)
            program.norm(hidden, layer.input_norm, normed)
            program.layer(shape, Attention(index, layer))
        for span in kept.get(config.num_layers, ()):
            program.copy(hidden, span)
        for span in kept.get(FINAL_NORM, ()):
            program.norm(hidden, weights.final_norm, span)
        program.norm(hidden, weights.final_norm, normed, kernel.GATHERED)
        program.logits(weights.head, size, config.vocab_size)
        return program


def _places(feature: int, features: tuple[int, ...]) -> list[int]:
    return [i for i, other in enumerate(features) if other == feature]
