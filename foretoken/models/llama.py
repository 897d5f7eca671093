"""The decoder of Llama, Mistral, Qwen2, Qwen3 and MiMo over a paged KV cache."""

from __future__ import annotations

from typing import Generic

import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.draft_levels import NO_OUTPUT, LevelPass

from foretoken.drafting import FINAL_NORM
from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import DecoderWeights
from foretoken.models.executor import Executor, Loaded
from foretoken.models.forward_pass import ForwardPass, LoadedProgram
from foretoken.models.program import Attention, Columns, LayerShape, Program

# A pass that wants the logits of every second row or fewer leaves out what the last
# layer computes of the others.
_FEW = 2


class Llama(Generic[Loaded]):
    """One decoder and the executor that runs it. Only one thread at a time may use it."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, executor: Executor[Loaded]) -> None:
        self.config = config
        self._weights = weights
        self._executor = executor
        # By the hidden states to keep, and whether few rows' logits are wanted.
        self._programs: dict[tuple[tuple[int, ...], bool], Loaded] = {}
        # Rows and width of the hidden states that the last pass kept.
        self._captured = (0, 0)

    @property
    def hidden_states(self) -> torch.Tensor:
        """The hidden states that the last pass kept, [rows, len(captured_layers) * hidden_size].

        They are valid until the next call.

        They are float32 on a CPU and have the cache's type on a GPU.
        """
        if 0 in self._captured:
            return torch.empty(self._captured)
        return self._executor.buffer(kernel.CAPTURED, *self._captured)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
        """Run one pass and return the logits, float32 [len(logit_rows), vocab_size].

        They are valid until the next call.

        Keys and values of all rows are written before any row attends, so the nodes of a tree see
        each other in the same pass.

        Args:
            captured_layers: hidden states to keep for all rows, side by side in this order. Number
                l is the state that enters layer l, the number of layers is the state that leaves
                the last layer; or FINAL_NORM.

        Raises:
            ValueError: an index of the batch is out of range, or there is no such hidden state;
                nothing was written.
        """
        wants_few = _FEW * len(batch.logit_rows) <= batch.num_rows and self._end_before_last_layer(captured_layers)
        self._executor.run(self._loaded(captured_layers, wants_few=wants_few), batch)
        self._captured = (batch.num_rows, len(captured_layers) * self.config.hidden_size)
        return self._executor.buffer(kernel.LOGITS, len(batch.logit_rows), self.config.vocab_size)

    def _end_before_last_layer(self, captured_layers: tuple[int, ...]) -> bool:
        """Return whether no hidden state is kept that the last layer computes."""
        return all(number != FINAL_NORM and number < self.config.num_layers for number in captured_layers)

    def _loaded(self, captured_layers: tuple[int, ...], *, wants_few: bool = False) -> Loaded:
        key = captured_layers, wants_few
        if key not in self._programs:
            self._programs[key] = self._executor.load(self._program(captured_layers, wants_few=wants_few))
        return self._programs[key]

    def _program(self, captured_layers: tuple[int, ...], *, wants_few: bool) -> Program:
        """Return the program that keeps these hidden states.

        ``wants_few``: the last layer computes what follows its KV entries only for rows whose
        logits are wanted. That is a copy more for each of them.
        """
        config, weights = self.config, self._weights
        for number in captured_layers:
            if number != FINAL_NORM and not 0 <= number <= config.num_layers:
                raise ValueError(f"there is no hidden state {number} in a model of {config.num_layers} layers")
        size = config.hidden_size
        program, hidden, normed = Program(), Columns(kernel.HIDDEN, size), Columns(kernel.NORMED, size)
        kept: dict[int, list[Columns]] = {}
        for i, number in enumerate(captured_layers):
            kept.setdefault(number, []).append(Columns(kernel.CAPTURED, size, i * size, len(captured_layers) * size))
        program.embed(weights.embedding, config.tie_word_embeddings, hidden)
        shape = LayerShape(size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, size)
        last = config.num_layers - 1
        for index, layer in enumerate(weights.layers):
            for columns in kept.get(index, ()):
                program.copy(hidden, columns)
            program.norm(hidden, layer.input_norm, normed)
            add = program.last_layer if wants_few and index == last else program.layer
            add(shape, Attention(index, layer))
        for columns in kept.get(config.num_layers, ()):
            program.copy(hidden, columns)
        for columns in kept.get(FINAL_NORM, ()):
            program.norm(hidden, weights.final_norm, columns)
        if wants_few:
            program.norm(Columns(kernel.OUTPUT, size), weights.final_norm, normed, kernel.WANTED)
        else:
            program.norm(hidden, weights.final_norm, normed, kernel.GATHERED)
        program.logits(weights.head, size, config.vocab_size)
        return program


class HostLlama(Llama[LoadedProgram]):
    """A decoder on the CPU.

    Args:
        num_positions: rotary positions that may occur; at least the context length.
        num_threads, wide_threads: as for ForwardPass.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        cache: KVCache,
        num_positions: int,
        num_threads: int,
        wide_threads: int = 0,
    ) -> None:
        self._passes = ForwardPass(config, cache, config.vocab_size, num_positions, num_threads, wide_threads)
        super().__init__(config, weights, self._passes)

    def level_pass(self, num_rows: int, longest: int) -> LevelPass:
        """Return the passes that grow the levels of draft trees.

        Args:
            num_rows: rows of one pass at most.
            longest: positions that one row attends to at most.
        """
        return self._passes.level_pass([self._loaded(())], num_rows, longest, NO_OUTPUT, 0)
