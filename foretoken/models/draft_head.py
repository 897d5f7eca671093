"""Draft heads that go on from a target's hidden states: EAGLE, EAGLE-2, EAGLE-3 and MTP.

All are one or more decoder layers over the embedding of a token and the hidden state of the position before it. The
entry of token i, its embedding beside the state of position i - 1, is stored in slot i and turned by position i, so
slot 0 stays empty; rotary embedding counts distances alone, so this is what heads trained with the pair at position
i - 1 compute.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.draft_levels import LevelPass
from foretoken_kernels.cpu.linear import ADD
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.backend import CPU, Backend
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.device_sizes import PassSizes
from foretoken.models.draft_config import HeadConfig, head_config, head_features
from foretoken.models.draft_weights import HeadWeights, ModuleWeights, load_head_weights
from foretoken.models.executor import make_executor
from foretoken.models.forward_pass import ForwardPass
from foretoken.models.program import Attention, LayerShape, Program, Span
from foretoken.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from foretoken.models.device_batch import DeviceArrays
    from foretoken.models.device_pass import DevicePass

_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "MTP"}
# MiMo is trained with zeros for the embedding in the pair of the target's first position, whose slot is 1.
_ZEROED_POSITION = 1


class HeadOutput(NamedTuple):
    """Both valid until the head's next call.

    Attributes:
        logits: float32 [len(batch.logit_rows), draft_vocab_size].
        hidden: float32 [rows, hidden_size]: what the next recurrent step is fed.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class DraftHead:
    """One draft head with its cache and buffers. Not for two threads at once.

    Attributes:
        features: hidden states of the target that it is fed, as DrafterNeeds.features.
        num_depths: 1: one module, applied recurrently; more: module d drafts depth d.
        feature_width: ``len(features)`` times the target's hidden size.
        target_ids: int32 [draft_vocab_size]: the target's id of each draft id; None: the same ids.
        num_bytes: of weights that are not the target's.
    """

    def __init__(
        self,
        config: HeadConfig,
        target_config: ModelConfig,
        weights: HeadWeights,
        cache: KVCache,
        num_positions: int,
        num_threads: int,
        sizes: PassSizes | None = None,
    ) -> None:
        self.config = config
        self.family: Literal["eagle", "eagle3", "mtp"] = config.family
        self.algorithm = _ALGORITHMS[config.family]
        self.features = head_features(config, target_config.num_layers)
        self.num_depths = config.num_depths
        self.hidden_size = config.body.hidden_size
        self.feature_width = len(self.features) * target_config.hidden_size
        self.draft_vocab_size = weights.draft_vocab_size
        self.target_ids = weights.target_ids
        self.num_bytes = weights.num_bytes
        self.cache = cache
        self._weights = weights
        self._target_width = target_config.hidden_size
        self._executor = make_executor(
            config.body, cache, target_config.vocab_size, num_positions, num_threads, sizes=sizes
        )
        self._num_layers = sum(len(module.layers) for module in weights.modules)
        self._programs: dict[tuple[int, bool], Any] = {}
        self._entries: Any = None

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], *, from_target: bool, depth: int = 0
    ) -> HeadOutput:
        """One pass. Writes keys and values of module ``depth`` at ``batch.slot_mapping``.

        Args:
            batch: ``token_ids`` are the target's.
            hidden: float32 [rows, feature_width] of the target, or [rows, hidden_size] that an earlier call returned.
            from_target: which of the two.

        Raises:
            ValueError: an index of the batch is out of range, ``hidden`` is not as said, or there is no such module;
                nothing was written.
        """
        if not 0 <= depth < self.num_depths:
            raise ValueError(f"there is no module {depth} in a head of {self.num_depths}")
        self._check_hidden(batch, hidden, self.feature_width if from_target else self.hidden_size)
        self._executor.run(self._loaded(depth, from_target=from_target), batch, hidden)
        return HeadOutput(
            self._executor.buffer(kernel.LOGITS, len(batch.logit_rows), self.draft_vocab_size),
            self._executor.buffer(self._output.buffer, batch.num_rows, self.hidden_size),
        )

    def tune(self, path: Path | None) -> None:
        """On a GPU: time its matmuls and take the fastest from now on; ``path`` keeps the choices."""
        for depth in range(self.num_depths):
            self._loaded(depth, from_target=True)
            self._loaded(depth, from_target=False)
        cast("DevicePass", self._executor).tune(path)

    def launch(self, arrays: DeviceArrays, hidden: torch.Tensor, sources: torch.Tensor, *, depth: int) -> HeadOutput:
        """A recurrent pass over arrays that are on the GPU; nothing waits for it, and it may be captured in a graph.

        Args:
            arrays: logits of all rows are wanted.
            hidden: [any, hidden_size], on the GPU: may be what the last pass returned.
            sources: int32 [rows]: row of ``hidden`` that each row is fed.
        """
        rows = len(arrays.token_ids)
        executor = cast("DevicePass", self._executor)
        executor.gather_given(hidden, sources)
        executor.launch(self._loaded(depth, from_target=False), arrays)
        return HeadOutput(
            self._executor.buffer(kernel.LOGITS, rows, self.draft_vocab_size),
            self._executor.buffer(self._output.buffer, rows, self.hidden_size),
        )

    def extend(self, arrays: DeviceArrays, features: torch.Tensor) -> HeadOutput:
        """The first module's pass over new tokens, as ``forward`` from the target, of arrays that are on the GPU.

        Nothing waits for it, and it may be captured in a graph.

        Args:
            features: bfloat16 or float32 [rows, feature_width], on the GPU.
        """
        executor = cast("DevicePass", self._executor)
        loaded = self._loaded(0, from_target=True)
        executor.gather_given(features)
        executor.launch(loaded, arrays)
        return HeadOutput(
            self._executor.buffer(kernel.LOGITS, len(arrays.logit_rows), self.draft_vocab_size),
            self._executor.buffer(self._output.buffer, len(arrays.token_ids), self.hidden_size),
        )

    @property
    def write_entries(self) -> Callable[[ForwardBatch, NDArray[np.float32]], None] | None:
        """Writes keys and values alone, for rows of which nothing else is wanted: half the work of ``forward``.

        Takes a batch without logit rows and float32 [rows, feature_width] of the target; raises ValueError as
        ``forward``. None for a head of several layers, whose entries depend on what it computes of earlier ones.
        """
        return self._write_entries if self._num_layers == 1 else None

    def _write_entries(self, batch: ForwardBatch, features: NDArray[np.float32]) -> None:
        self._check_hidden(batch, features, self.feature_width)
        if self._entries is None:
            program, module = Program(), self._weights.modules[0]
            self._join(program, module, from_target=True)
            self._layers(program, module, 0, only_entries=True)
            self._entries = self._executor.load(program)
        self._executor.run(self._entries, batch, features)

    def _check_hidden(self, batch: ForwardBatch, hidden: NDArray[np.float32], width: int) -> None:
        if hidden.shape != (batch.num_rows, width) or hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
            raise ValueError(f"hidden must be contiguous float32 [{batch.num_rows}, {width}], not {hidden.shape}")

    def level_pass(self, num_rows: int, longest: int) -> LevelPass:
        """The passes over beams, of at most ``num_rows`` rows that attend to at most ``longest`` positions each."""
        programs = [self._loaded(depth, from_target=False) for depth in range(self.num_depths)]
        assert isinstance(self._executor, ForwardPass), "levels are compiled into one call on a CPU alone"
        return self._executor.level_pass(programs, num_rows, longest, self._output.buffer, self.hidden_size)

    def _loaded(self, depth: int, *, from_target: bool) -> Any:
        key = (depth, from_target)
        if key not in self._programs:
            self._programs[key] = self._executor.load(self._program(depth, from_target))
        return self._programs[key]

    @property
    def _output(self) -> Span:
        """Where the state that goes back into the head lies."""
        is_normed = self.family == "mtp" or self.config.norm_output
        return Span(kernel.OUTPUT if is_normed else kernel.HIDDEN, self.hidden_size)

    def _program(self, depth: int, from_target: bool) -> Program:
        program, module = Program(), self._weights.modules[depth]
        self._join(program, module, from_target=from_target)
        self._layers(program, module, depth * len(module.layers))
        self._finish(program, module)
        return program

    def _join(self, program: Program, module: ModuleWeights, *, from_target: bool) -> None:
        """Token and hidden state become what the first layer takes."""
        if self.family == "eagle":
            self._join_eagle(program, module)
        elif self.family == "eagle3":
            self._join_eagle3(program, module, from_target)
        else:
            self._join_mtp(program, module)

    def _embed(self, program: Program, out: Span) -> None:
        zeroed = _ZEROED_POSITION if self.config.layout == "mimo" else -1
        program.embed(self._weights.embedding, self._weights.embedding_is_packed, out, zeroed)

    def _joint(self, program: Program, module: ModuleWeights, x: Span) -> None:
        """HIDDEN becomes the joint matrix times ``x``, plus its bias if it has one."""
        hidden = Span(kernel.HIDDEN, self.hidden_size)
        if module.joint_bias.numel():
            program.fill(module.joint_bias, hidden)
            program.linear(x, module.joint, hidden, ADD)
        else:
            program.linear(x, module.joint, hidden)

    def _join_eagle(self, program: Program, module: ModuleWeights) -> None:
        size = self.hidden_size
        self._embed(program, Span(kernel.EMBEDDED, size, 0, 2 * size))
        program.copy(Span(kernel.GIVEN, size), Span(kernel.EMBEDDED, size, size, 2 * size))
        self._joint(program, module, Span(kernel.EMBEDDED, 2 * size))

    def _join_eagle3(self, program: Program, module: ModuleWeights, from_target: bool) -> None:
        """NORMED becomes the normed embedding beside the normed hidden state, whose residual is in HIDDEN."""
        size, hidden = self.hidden_size, Span(kernel.HIDDEN, self.hidden_size)
        embedded = Span(kernel.EMBEDDED, size)
        self._embed(program, embedded)
        program.norm(embedded, module.embedding_norm, Span(kernel.NORMED, size, 0, 2 * size))
        if from_target:
            self._normed_features(program, module)
            self._joint(program, module, Span(kernel.EMBEDDED, self.feature_width))
        else:
            program.copy(Span(kernel.GIVEN, size), hidden)
        normed_hidden = Span(kernel.NORMED, size, size, 2 * size)
        program.norm(hidden, module.hidden_norm, normed_hidden)
        if self.config.norm_before_residual:
            program.copy(normed_hidden, hidden)

    def _normed_features(self, program: Program, module: ModuleWeights) -> None:
        """The target's features to EMBEDDED, through their norms if there are any."""
        total = self.feature_width
        norms = module.feature_norms
        if not norms:
            program.copy(Span(kernel.GIVEN, total), Span(kernel.EMBEDDED, total))
        width = total // max(len(norms), 1)
        for i, norm in enumerate(norms):
            given = Span(kernel.GIVEN, width, i * width, total)
            program.norm(given, norm, Span(kernel.EMBEDDED, width, i * width, total))

    def _join_mtp(self, program: Program, module: ModuleWeights) -> None:
        size, embedded = self.hidden_size, Span(kernel.EMBEDDED, self.hidden_size)
        first, second = Span(kernel.NORMED, size, 0, 2 * size), Span(kernel.NORMED, size, size, 2 * size)
        token, state = (second, first) if self.config.layout == "mimo" else (first, second)
        self._embed(program, embedded)
        program.norm(embedded, module.embedding_norm, token)
        program.norm(Span(kernel.GIVEN, size), module.hidden_norm, state)
        self._joint(program, module, Span(kernel.NORMED, 2 * size))

    def _layers(self, program: Program, module: ModuleWeights, first_plane: int, *, only_entries: bool = False) -> None:
        body, size = self.config.body, self.hidden_size
        hidden, normed = Span(kernel.HIDDEN, size), Span(kernel.NORMED, size)
        for index, layer in enumerate(module.layers):
            is_joined = index == 0 and self.family == "eagle3"
            if layer.input_norm.numel():
                program.norm(hidden, layer.input_norm, normed)
            elif not is_joined:
                program.copy(hidden, normed)
            features = 2 * size if is_joined else size
            shape = LayerShape(size, body.intermediate_size, body.num_heads, body.num_kv_heads, body.head_dim, features)
            add = program.entries if only_entries else program.layer
            add(shape, Attention(first_plane + index, layer))

    def _finish(self, program: Program, module: ModuleWeights) -> None:
        hidden, normed = Span(kernel.HIDDEN, self.hidden_size), Span(kernel.NORMED, self.hidden_size)
        if self._output.buffer == kernel.OUTPUT:
            program.norm(hidden, module.final_norm, self._output)
            program.copy(self._output, normed, kernel.GATHERED)
        elif module.final_norm.numel():
            program.norm(hidden, module.final_norm, normed, kernel.GATHERED)
        else:
            program.copy(hidden, normed, kernel.GATHERED)
        program.logits(self._weights.head, self.hidden_size, self.draft_vocab_size)


def load_draft_head(
    path: Path,
    *,
    target_config: ModelConfig,
    weights: TargetWeights | None,
    num_blocks: int,
    block_size: int,
    num_positions: int,
    num_threads: int = 1,
    token_map: NDArray[np.int32] | None = None,
    dtype: torch.dtype,
    backend: Backend = CPU,
    sizes: PassSizes | None = None,
) -> DraftHead:
    """The draft head in the folder ``path``, which for MTP is the target's.

    Args:
        weights: the target's embedding and output head; None reads them from ``path`` for MTP.
        num_blocks, block_size: of the cache that the head keeps for itself.
        num_positions: rotary positions that may occur.
        token_map: int32: draft only these target ids (FR-Spec); for heads that use the target's output head.
        dtype: of the cache; matrices are bfloat16 if it is, or if all of them are stored so.
        backend, sizes: where it runs, and the largest passes there if that is a GPU.

    Raises:
        CheckpointError, ConfigError: the head cannot be loaded, or does not fit the target; by name.
    """
    config = head_config(path)
    num_features = len(head_features(config, target_config.num_layers))
    loaded = load_head_weights(path, config, target_config, weights, num_features, token_map, dtype, backend)
    body = config.body
    cache = KVCache(body.num_layers, num_blocks, block_size, body.num_kv_heads, body.head_dim, dtype, backend.device)
    return DraftHead(config, target_config, loaded, cache, num_positions, num_threads, sizes)
