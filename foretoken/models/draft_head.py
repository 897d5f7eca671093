"""Draft heads that continue from a target's hidden states: EAGLE, EAGLE-2, EAGLE-3 and MTP.

A head is one or more decoder layers. A row is fed the embedding of token i and the hidden state of
position i - 1. Its KV entry is stored in KV slot i and rotated by position i, so KV slot 0 stays
empty. Heads are trained with the pair at position i - 1, which gives the same result: rotary
embedding only counts distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.draft_levels import LevelPass
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.draft_config import HeadConfig, head_captured_layers, head_config
from foretoken.models.draft_weights import HeadSource, HeadWeights, load_head_weights
from foretoken.models.executor import Executor, Loaded
from foretoken.models.forward_pass import ForwardPass, LoadedProgram
from foretoken.models.head_programs import HeadPrograms


class HeadOutput(NamedTuple):
    """The result of one pass; both tensors are valid until the head's next call.

    Attributes:
        logits: float32 [len(batch.logit_rows), draft_vocab_size].
        hidden: float32 [rows, hidden_size]; what the next recurrent pass is fed.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHead:
    """A draft head in memory, with its own KV cache, before an executor runs it."""

    config: HeadConfig
    target_config: ModelConfig
    weights: HeadWeights
    cache: KVCache


def load_head(source: HeadSource, num_blocks: int, block_size: int) -> LoadedHead:
    """Load the weights of a draft head and make its KV cache of ``num_blocks`` blocks.

    Raises:
        CheckpointError, ConfigError: the head cannot be loaded or does not fit the target; names
            the cause.
    """
    config = head_config(source.path)
    body = config.body
    weights = load_head_weights(source, config)
    shape = (body.num_layers, num_blocks, block_size, body.num_kv_heads, body.head_dim)
    return LoadedHead(config, source.target_config, weights, KVCache(*shape, source.dtype, source.backend.device))


class DraftHead(Generic[Loaded]):
    """One draft head and the executor that runs it. Only one thread at a time may use it.

    Attributes:
        captured_layers: the target's hidden states that it is fed, as in
            DrafterNeeds.captured_layers.
        num_depths: 1: one module, applied recurrently; more: module d drafts depth d.
        hidden_width: ``len(captured_layers)`` times the target's hidden size.
        target_ids: int32 [draft_vocab_size]; the target's id of each draft id; None: the ids are
            the same.
        num_bytes: size of the weights that are not the target's.
    """

    def __init__(self, head: LoadedHead, executor: Executor[Loaded]) -> None:
        config, weights = head.config, head.weights
        self.config = config
        self.family: Literal["eagle", "eagle3", "mtp"] = config.family
        self.captured_layers = head_captured_layers(config, head.target_config.num_layers)
        self.num_depths = config.num_depths
        self.hidden_size = config.body.hidden_size
        self.hidden_width = len(self.captured_layers) * head.target_config.hidden_size
        self.draft_vocab_size = weights.draft_vocab_size
        self.target_ids = weights.target_ids
        self.num_bytes = weights.num_bytes
        self.cache = head.cache
        self._executor = executor
        self._num_layers = sum(len(module.layers) for module in weights.modules)
        self._programs = HeadPrograms(config, weights, self.hidden_width)
        self._loaded: dict[tuple[int, bool], Loaded] = {}
        self._kv_only: Loaded | None = None

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], *, from_target: bool, depth: int = 0
    ) -> HeadOutput:
        """Run one pass. It writes keys and values of module ``depth`` at ``batch.kv_slots``.

        Args:
            batch: ``token_ids`` are the target's.
            hidden: float32 [rows, hidden_width] of the target, or [rows, hidden_size] of an
                earlier call.
            from_target: whether ``hidden`` is the target's.

        Raises:
            ValueError: an index of the batch is out of range, ``hidden`` has another shape or type,
                or there is no such module; nothing was written.
        """
        if not 0 <= depth < self.num_depths:
            raise ValueError(f"there is no module {depth} in a head of {self.num_depths}")
        self._check_hidden(batch, hidden, self.hidden_width if from_target else self.hidden_size)
        self._executor.run(self._program(depth, from_target=from_target), batch, hidden)
        return self._output(len(batch.logit_rows), batch.num_rows)

    @property
    def write_kv_entries(self) -> Callable[[ForwardBatch, NDArray[np.float32]], None] | None:
        """A pass that only writes KV entries, at half the work of ``forward``.

        It takes a batch without logit rows and float32 [rows, hidden_width] of the target, and
        raises ValueError as ``forward`` does. None for a head of several layers, whose deeper
        KV entries depend on the layers before.
        """
        return self._write_kv_entries if self._num_layers == 1 else None

    def _write_kv_entries(self, batch: ForwardBatch, hidden: NDArray[np.float32]) -> None:
        self._check_hidden(batch, hidden, self.hidden_width)
        self._executor.run(self._kv_only_program(), batch, hidden)

    def _kv_only_program(self) -> Loaded:
        if self._kv_only is None:
            self._kv_only = self._executor.load(self._programs.kv_only())
        return self._kv_only

    def _check_hidden(self, batch: ForwardBatch, hidden: NDArray[np.float32], width: int) -> None:
        if hidden.shape != (batch.num_rows, width) or hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
            raise ValueError(f"hidden must be contiguous float32 [{batch.num_rows}, {width}], not {hidden.shape}")

    def _program(self, depth: int, *, from_target: bool) -> Loaded:
        key = (depth, from_target)
        if key not in self._loaded:
            self._loaded[key] = self._executor.load(self._programs.whole(depth, from_target=from_target))
        return self._loaded[key]

    def _output(self, wanted: int, rows: int) -> HeadOutput:
        """Return the result of a pass over ``rows`` rows, ``wanted`` of them with logits."""
        return HeadOutput(
            self._executor.buffer(kernel.LOGITS, wanted, self.draft_vocab_size),
            self._executor.buffer(self._programs.output.buffer, rows, self.hidden_size),
        )


class HostDraftHead(DraftHead[LoadedProgram]):
    """A draft head on the CPU."""

    def __init__(self, head: LoadedHead, num_positions: int, num_threads: int = 1) -> None:
        """``num_positions``: rotary positions that may occur."""
        vocab_size = head.target_config.vocab_size
        self._passes = ForwardPass(head.config.body, head.cache, vocab_size, num_positions, num_threads)
        super().__init__(head, self._passes)

    def level_pass(self, num_rows: int, longest: int) -> LevelPass:
        """Return the passes that grow the levels of draft trees.

        Args:
            num_rows: rows of one pass at most.
            longest: positions that one row attends to at most.
        """
        programs = [self._program(depth, from_target=False) for depth in range(self.num_depths)]
        output = self._programs.output.buffer
        return self._passes.level_pass(programs, num_rows, longest, output, self.hidden_size)
