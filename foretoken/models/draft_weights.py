"""Load the weights of a draft head. Embedding and output head are usually the target's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.backend import CPU, Backend
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import LayerWeights, TensorReader, load_layer
from foretoken.models.draft_config import HeadConfig, head_captured_layers
from foretoken.models.head_shapes import check_head_tensors, reads_embedding
from foretoken.models.target_weights import TargetWeights, load_target_weights
from foretoken.models.weight_layout import weight_layout
from foretoken.models.weights import Checkpoint

_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleWeights:
    """One module: the join of embedding and hidden state, the layers and the last norm.

    Absent tensors are empty.

    Attributes:
        joint: for EAGLE-3 from the target's hidden states to the head's size; for others from both
            inputs side by side.
        hidden_norms: one for each of the target's hidden states, or a single one over all of them.
    """

    joint: torch.Tensor
    joint_bias: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    hidden_norms: tuple[torch.Tensor, ...]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield value
        yield from self.hidden_norms
        for layer in self.layers:
            yield from layer.tensors()


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """A whole draft head.

    Attributes:
        embedding: of the target's ids; a table, or a matrix if ``embedding_is_packed``.
        head: output head, from the hidden size to draft_vocab_size.
        target_ids: int32 [draft_vocab_size]; the target's id of each of the head's ids; None: the
            same.
        num_bytes: size of the tensors that are not the target's.
    """

    modules: tuple[ModuleWeights, ...]
    embedding: torch.Tensor
    embedding_is_packed: bool
    head: torch.Tensor
    draft_vocab_size: int
    target_ids: NDArray[np.int32] | None
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HeadSource:
    """Where a draft head is read from, what it shares with its target, and where it will run.

    Attributes:
        path: the head's folder, which for MTP is the target's.
        weights: the target's embedding and output head; None: for MTP they are read from ``path``.
        dtype: of the cache, and of matrices as weight_layout says.
        token_map: int32; draft only these target ids (FR-Spec), for heads that use the target's
            output head.
    """

    path: Path
    target_config: ModelConfig
    weights: TargetWeights | None
    dtype: torch.dtype
    token_map: NDArray[np.int32] | None = None
    backend: Backend = CPU


def load_head_weights(source: HeadSource, config: HeadConfig) -> HeadWeights:
    """Read the weights of a draft head.

    Raises:
        CheckpointError: a tensor is missing, has another shape, is unknown, or holds NaN, infinity
            or a number too large for the served type.
        ConfigError: head and target do not fit, or there is a token map for a head with its own
            vocabulary.
    """
    path, token_map = source.path, source.token_map
    with Checkpoint(path) as checkpoint:
        loader = _HeadLoader(source, checkpoint, config)
        check_head_tensors(path, checkpoint.headers, config, source.target_config)
        modules = loader.modules()
        own = loader.own_vocabulary()
        own_tensors = [tensor for module in modules for tensor in module.tensors()]
        own_tensors += [tensor for tensor in (own.embedding, own.head) if tensor is not None]
        loader.check_finite(own_tensors)
    num_bytes = sum(tensor.nbytes for tensor in own_tensors)
    if own.head is not None and token_map is not None:
        raise ConfigError(f"{path}: a token map is for heads that use the target's output head; this has its own")
    embedding, is_packed = own.embedding, False
    head, vocab_size, ids = own.head, own.draft_vocab_size, own.target_ids
    if embedding is None or head is None:
        shared = _shared_weights(source, config)
        if embedding is None:
            embedding, is_packed = shared.embedding, shared.tied
        if head is None and token_map is not None:
            head, ids = head_rows(shared, token_map), token_map.astype(np.int32)
            vocab_size, num_bytes = len(ids), num_bytes + head.nbytes
        if head is None:
            head, vocab_size = shared.head, shared.vocab_size
    return HeadWeights(modules, embedding, is_packed, head, vocab_size, ids, num_bytes)


def head_rows(weights: TargetWeights, token_map: NDArray[np.int32]) -> torch.Tensor:
    """Return the output head's rows of these target ids (FR-Spec, arXiv 2502.14856).

    Raises:
        ConfigError: the map is empty, names an id twice, or names an unknown id.
    """
    ids = np.asarray(token_map, np.int64)
    if ids.ndim != 1 or not len(ids) or len(np.unique(ids)) != len(ids):
        raise ConfigError("a token map is a list of different token ids")
    if ids.min() < 0 or ids.max() >= weights.vocab_size:
        raise ConfigError(f"the token map names ids outside of the target's {weights.vocab_size}")
    return weights.layout.select_rows(weights.head, ids, weights.hidden_size)


@dataclass(frozen=True, slots=True, eq=False)
class _OwnVocabulary:
    """The head's own embedding and output head; None where the target's is used."""

    embedding: torch.Tensor | None
    head: torch.Tensor | None
    draft_vocab_size: int
    target_ids: NDArray[np.int32] | None


def _shared_weights(source: HeadSource, config: HeadConfig) -> TargetWeights:
    """Return the target's embedding and output head.

    They are given, or read from the head's own folder.
    """
    path, weights = source.path, source.weights
    if weights is None:
        if config.family != "mtp":
            raise ConfigError(f"{path}: this draft head needs the target's embedding or output head")
        weights = load_target_weights(path, source.target_config, source.dtype, source.backend)
    if weights.hidden_size != config.body.hidden_size or weights.vocab_size != source.target_config.vocab_size:
        raise ConfigError(
            f"{path}: the head's hidden size {config.body.hidden_size} does not match the target's embedding and "
            f"output head of size {weights.hidden_size}"
        )
    return weights


class _HeadLoader:
    """Reads the tensors of one head by their canonical names and remembers the names."""

    def __init__(self, source: HeadSource, checkpoint: Checkpoint, config: HeadConfig) -> None:
        self._path, self._checkpoint, self._config = source.path, checkpoint, config
        self._target = source.target_config
        self._num_states = len(head_captured_layers(config, self._target.num_layers))
        self._size = config.body.hidden_size
        matrices = [name for name in config.stored_names.values() if len(checkpoint.shape(name)) == 2]
        layout = weight_layout(source.backend, source.dtype, [checkpoint.dtype(name) for name in matrices])
        self._reader = TensorReader(checkpoint, layout, config.stored_names)

    def modules(self) -> tuple[ModuleWeights, ...]:
        layout = self._config.layout
        if layout == "eagle":
            return (self._eagle(),)
        if layout == "eagle3":
            return (self._eagle3(),)
        load = self._mimo if layout == "mimo" else self._qwen3_next
        return tuple(load(depth) for depth in range(self._config.num_depths))

    def check_finite(self, laid_out: list[torch.Tensor]) -> None:
        """Check the tensors read so far, as TensorReader does."""
        self._reader.check_finite(laid_out)

    def own_vocabulary(self) -> _OwnVocabulary:
        embedding = self._embedding()
        head, size, target_ids = self._output_head()
        is_tied = head is None and self._config.family == "eagle3" and self._config.body.tie_word_embeddings
        if is_tied and (embedding is not None or not self._target.tie_word_embeddings):
            raise ConfigError(f"{self._path}: a head with tie_word_embeddings needs a target that is tied, too")
        return _OwnVocabulary(embedding, head, size, target_ids)

    def _embedding(self) -> torch.Tensor | None:
        if not reads_embedding(self._config, self._target):
            return None
        table = self._reader.read("embed_tokens.weight", (self._target.vocab_size, self._size))
        return self._reader.layout.table(table)

    def _output_head(self) -> tuple[torch.Tensor | None, int, NDArray[np.int32] | None]:
        config, target = self._config, self._target.vocab_size
        size = config.draft_vocab_size
        if config.family != "eagle3" or size is None:
            return None, target, None
        if config.body.tie_word_embeddings and not self._has("lm_head.weight"):
            raise ConfigError(f"{self._path}: draft_vocab_size with tie_word_embeddings is not supported")
        head = self._reader.matrix("lm_head.weight", (size, self._size))
        if not self._has("d2t"):
            return head, size, None
        # The tensor holds offsets, not ids.
        ids = self._checkpoint.read_integers(config.stored_names["d2t"], size) + np.arange(size)
        if ids.min() < 0 or ids.max() >= target or len(np.unique(ids)) != size:
            raise CheckpointError(f"{self._path}: d2t does not lead to {size} different ids of the target's {target}")
        return head, size, ids.astype(np.int32)

    def _has(self, name: str) -> bool:
        return name in self._config.stored_names

    def _vector_if_there(self, name: str, size: int) -> torch.Tensor:
        return self._reader.vector(name, size) if self._has(name) else _NONE

    def _joint(self, name: str, width: int) -> torch.Tensor:
        return self._reader.matrix(name, (self._size, width))

    def _eagle(self) -> ModuleWeights:
        body = self._config.body
        layers = []
        for index in range(body.num_layers):
            has_norm = self._has(f"layers.{index}.input_layernorm.weight")
            norm = "input_layernorm" if has_norm else ""
            layers.append(load_layer(body, self._reader, f"layers.{index}", input_norm=norm))
        bias = self._vector_if_there("fc.bias", self._size)
        return ModuleWeights(self._joint("fc.weight", 2 * self._size), bias, _NONE, _NONE, (), tuple(layers), _NONE)

    def _eagle3(self) -> ModuleWeights:
        body, reader, size = self._config.body, self._reader, self._size
        width = self._config.target_hidden_size or self._target.hidden_size
        layers = [load_layer(body, reader, "layers.0", qkv_features=2 * size, input_norm="")]
        for index in range(1, body.num_layers):
            norm = "hidden_norm" if self._has(f"layers.{index}.hidden_norm.weight") else "input_layernorm"
            layers.append(load_layer(body, reader, f"layers.{index}", input_norm=norm))
        if self._has("input_norm.weight"):
            norms: tuple[torch.Tensor, ...] = (reader.vector("input_norm.weight", width * self._num_states),)
        elif self._has("fc_norm.0.weight"):
            norms = tuple(reader.vector(f"fc_norm.{i}.weight", width) for i in range(self._num_states))
        else:
            norms = ()
        return ModuleWeights(
            joint=self._joint("fc.weight", width * self._num_states),
            joint_bias=self._vector_if_there("fc.bias", size),
            embedding_norm=reader.vector("layers.0.input_layernorm.weight", size),
            hidden_norm=reader.vector("layers.0.hidden_norm.weight", size),
            hidden_norms=norms,
            layers=tuple(layers),
            final_norm=reader.vector("norm.weight", size),
        )

    def _mimo(self, depth: int) -> ModuleWeights:
        prefix, reader, size = f"model.mtp_layers.{depth}", self._reader, self._size
        return ModuleWeights(
            joint=self._joint(f"{prefix}.input_proj.weight", 2 * size),
            joint_bias=_NONE,
            embedding_norm=reader.vector(f"{prefix}.token_layernorm.weight", size),
            hidden_norm=reader.vector(f"{prefix}.hidden_layernorm.weight", size),
            hidden_norms=(),
            layers=(load_layer(self._config.body, reader, prefix),),
            final_norm=reader.vector(f"{prefix}.final_layernorm.weight", size),
        )

    def _qwen3_next(self, depth: int) -> ModuleWeights:
        reader, size = self._reader, self._size
        return ModuleWeights(
            joint=self._joint("mtp.fc.weight", 2 * size),
            joint_bias=_NONE,
            embedding_norm=reader.vector("mtp.pre_fc_norm_embedding.weight", size),
            hidden_norm=reader.vector("mtp.pre_fc_norm_hidden.weight", size),
            hidden_norms=(),
            layers=(load_layer(self._config.body, reader, f"mtp.layers.{depth}"),),
            final_norm=reader.vector("mtp.norm.weight", size),
        )
