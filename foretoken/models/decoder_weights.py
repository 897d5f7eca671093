"""Load the weights of one decoder, laid out for the kernels that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from foretoken.errors import CheckpointError
from foretoken.models.backend import CPU, Backend
from foretoken.models.config import ModelConfig
from foretoken.models.tensor_shapes import check_decoder, tensor_shapes
from foretoken.models.weight_layout import WeightLayout, are_finite, weight_layout
from foretoken.models.weights import Checkpoint

# Called with (done, total, what); the last call has done == total.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one decoder layer.

    Matrices have the layout of foretoken.models.weight_layout; vectors are float32. ``qkv_bias``,
    ``query_norm`` and ``key_norm`` are empty in models without them.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    output: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        for field in fields(self):
            yield getattr(self, field.name)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """The weights of a decoder.

    ``embedding`` is a table, or the head itself if the two are tied.
    """

    layout: WeightLayout
    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.head, self.final_norm)
        if self.embedding is not self.head:
            yield self.embedding
        for layer in self.layers:
            yield from layer.tensors()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def load_decoder_weights(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress, backend: Backend = CPU
) -> DecoderWeights:
    """Read all weights. ``dtype``: element type that the model is served with; see weight_layout.

    Raises:
        CheckpointError: as Checkpoint, or a tensor holds NaN or infinity, or a number too large for
            ``dtype``.
    """
    shapes = tensor_shapes(config)
    check_decoder(checkpoint.path, checkpoint.headers, config)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    layout = weight_layout(backend, dtype, [checkpoint.dtype(name) for name in matrices])
    reader = TensorReader(checkpoint, layout)
    layers = []
    for index in range(config.num_layers):
        progress(index, config.num_layers + 1, "loading weights")
        layers.append(load_layer(config, reader, f"model.layers.{index}"))
    progress(config.num_layers, config.num_layers + 1, "loading weights")
    embedding, head = load_embedding_and_head(config, reader)
    weights = DecoderWeights(
        layout=layout,
        embedding=embedding,
        head=head,
        final_norm=reader.vector("model.norm.weight", config.hidden_size),
        layers=tuple(layers),
    )
    reader.check_finite(weights.tensors())
    progress(config.num_layers + 1, config.num_layers + 1, "loading weights")
    return weights


def load_embedding_and_head(config: ModelConfig, reader: TensorReader) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embedding and head; the same tensor twice if they are tied."""
    shape, layout = (config.vocab_size, config.hidden_size), reader.layout
    embedding = reader.read("model.embed_tokens.weight", shape)
    if config.tie_word_embeddings:
        head = layout.matrix(embedding)
        return head, head
    return layout.table(embedding), layout.matrix(reader.read("lm_head.weight", shape))


class TensorReader:
    """Reads tensors of a checkpoint, as stored or laid out for the kernels.

    Args:
        stored: names in the checkpoint by requested name, where the two differ.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, stored: Mapping[str, str] | None = None) -> None:
        self._checkpoint = checkpoint
        self._stored = stored or {}
        self.layout = layout
        self.names_read: set[str] = set()

    def check_finite(self, laid_out: Iterable[torch.Tensor]) -> None:
        """Raise CheckpointError if a laid-out tensor holds NaN or infinity.

        Name the tensor that was read, and say if it is finite but too large for the served type.
        """
        if are_finite(laid_out):
            return
        names = sorted(self._stored.get(name, name) for name in self.names_read)
        served = str(self.layout.dtype).removeprefix("torch.")
        for name in names:
            tensor, file = self._checkpoint.read(name, self._checkpoint.shape(name)), self._checkpoint.file_of(name)
            if not tensor.isfinite().all():
                raise CheckpointError(f"{file}: tensor {name} holds NaN or infinity")
            # Vectors are served as float32.
            if tensor.ndim > 1 and not tensor.to(self.layout.dtype).isfinite().all():
                largest = float(tensor.abs().max())
                raise CheckpointError(
                    f"{file}: tensor {name} holds {largest:g}, which is too large for {served}; choose another --dtype"
                )
        raise CheckpointError(f"{self._checkpoint.path}: the tensors were finite, but not when they were laid out")

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor as it is stored."""
        self.names_read.add(name)
        return self._checkpoint.read(self._stored.get(name, name), shape)

    def matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self.layout.matrix(self.read(name, shape))

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.layout.vector(self.read(name, (size,)))


def load_layer(
    config: ModelConfig,
    reader: TensorReader,
    prefix: str,
    *,
    qkv_features: int = 0,
    input_norm: str = "input_layernorm",
) -> LayerWeights:
    """Read one decoder layer.

    Args:
        qkv_features: input size of the attention's first matrix, if it is not ``hidden_size``.
        input_norm: name of the norm before the attention; empty if there is none.
    """
    attention, mlp, none = f"{prefix}.self_attn", f"{prefix}.mlp", torch.empty(0)
    size, middle, features = config.hidden_size, config.intermediate_size, qkv_features or config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {"q": queries, "k": keys, "v": keys}
    projections = [reader.read(f"{attention}.{name}_proj.weight", (out, features)) for name, out in widths.items()]
    biases = [reader.vector(f"{attention}.{name}_proj.bias", out) for name, out in widths.items() if config.qkv_bias]
    gate, up = (reader.read(f"{mlp}.{name}_proj.weight", (middle, size)) for name in ("gate", "up"))
    return LayerWeights(
        input_norm=reader.vector(f"{prefix}.{input_norm}.weight", size) if input_norm else none,
        qkv=reader.layout.matrix(*projections),
        qkv_bias=torch.cat(biases) if biases else none,
        query_norm=reader.vector(f"{attention}.q_norm.weight", config.head_dim) if config.head_norm else none,
        key_norm=reader.vector(f"{attention}.k_norm.weight", config.head_dim) if config.head_norm else none,
        output=reader.matrix(f"{attention}.o_proj.weight", (size, queries)),
        post_attention_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", size),
        gate_up=reader.layout.gate_up(gate, up),
        down=reader.matrix(f"{mlp}.down_proj.weight", (size, middle)),
    )
