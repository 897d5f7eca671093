"""The weights of one decoder, packed for the kernels that will read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from foretoken_kernels.cpu.linear import pack, pack_gate_up
from numpy.typing import NDArray

from foretoken.models.config import ModelConfig
from foretoken.models.weights import Checkpoint

# Called with (done, total, what); done == total once at the end.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Matrices are flat panels (see the kernels' linear), float32 or bfloat16 bits; vectors are float32.

    ``qkv_bias``, ``query_norm`` and ``key_norm`` are empty in models without.
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
    """``embedding`` is [vocab_size, hidden_size], or the head's panels where the two are tied."""

    bfloat16: bool
    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]

    @property
    def num_bytes(self) -> int:
        tensors = [self.head, self.final_norm, *(tensor for layer in self.layers for tensor in layer.tensors())]
        if self.embedding is not self.head:
            tensors.append(self.embedding)
        return sum(tensor.nbytes for tensor in tensors)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model holds, in Hugging Face's names."""
    size, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, size)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (size,)
        for name, out_features in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (out_features, size)
            if config.qkv_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (out_features,)
        if config.head_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (size, queries)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (size,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (middle, size)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (middle, size)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (size, middle)
    shapes["model.norm.weight"] = (size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, size)
    return shapes


def load_decoder_weights(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress
) -> DecoderWeights:
    """Read and pack all weights.

    ``dtype`` is that of the model as served. Matrices are held as bfloat16 if it is bfloat16, and also where the
    checkpoint stores all of them so: widened as they are read, they give what float32 copies would, from half
    the memory.
    """
    shapes = tensor_shapes(config)
    _check_names(config, checkpoint, shapes)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    bfloat16 = dtype == torch.bfloat16 or all(checkpoint.dtype(name) == torch.bfloat16 for name in matrices)
    reader = TensorReader(checkpoint, bfloat16)
    layers = []
    for index in range(config.num_layers):
        progress(index, config.num_layers + 1, "loading weights")
        layers.append(load_layer(config, reader, f"model.layers.{index}"))
    progress(config.num_layers, config.num_layers + 1, "loading weights")
    embedding, head = load_embedding_and_head(config, reader)
    weights = DecoderWeights(
        bfloat16=bfloat16,
        embedding=embedding,
        head=head,
        final_norm=reader.vector("model.norm.weight", config.hidden_size),
        layers=tuple(layers),
    )
    progress(config.num_layers + 1, config.num_layers + 1, "loading weights")
    return weights


def load_embedding_and_head(config: ModelConfig, reader: TensorReader) -> tuple[torch.Tensor, torch.Tensor]:
    """Both packed; where they are tied the same tensor twice."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = reader.matrix("model.embed_tokens.weight", shape)
    if config.tie_word_embeddings:
        head = packed(pack(embedding))
        return head, head
    return packed(embedding.reshape(-1)), packed(pack(reader.matrix("lm_head.weight", shape)))


# Tensors of a checkpoint that belong to draft heads of its own (foretoken.models.draft_config).
_DRAFT_PREFIXES = {"mimo": "model.mtp_layers.", "qwen3": "mtp."}


def _check_names(config: ModelConfig, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    """A tensor that the model has no place for is refused, but for two that old exporters leave behind and those of a
    draft head."""
    leftovers = {name for name in checkpoint.names if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        leftovers.add("lm_head.weight")
    if config.model_type in _DRAFT_PREFIXES:
        leftovers |= {name for name in checkpoint.names if name.startswith(_DRAFT_PREFIXES[config.model_type])}
    checkpoint.check_all_known(shapes.keys() | leftovers)


class TensorReader:
    """Tensors of a checkpoint in the types of the kernels: vectors as float32, matrices as that or as bfloat16.

    Args:
        stored: by name, how the tensor is called in the checkpoint; those without an entry are called as asked for.
    """

    def __init__(self, checkpoint: Checkpoint, bfloat16: bool, stored: Mapping[str, str] | None = None) -> None:
        self._checkpoint = checkpoint
        self._stored = stored or {}
        self._bfloat16 = bfloat16

    def matrix(self, name: str, shape: tuple[int, int]) -> NDArray[np.generic]:
        """[out_features, in_features], float32 or the bits of bfloat16."""
        tensor = self._checkpoint.read(self._stored.get(name, name), shape)
        if self._bfloat16:
            return tensor.to(torch.bfloat16).view(torch.uint16).numpy()
        return tensor.to(torch.float32).numpy()

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._checkpoint.read(self._stored.get(name, name), (size,)).to(torch.float32).contiguous()


def load_layer(
    config: ModelConfig,
    reader: TensorReader,
    prefix: str,
    *,
    qkv_features: int = 0,
    input_norm: str = "input_layernorm",
) -> LayerWeights:
    """One decoder layer.

    Args:
        qkv_features: what the attention's first matrix takes, if not ``hidden_size``.
        input_norm: name of the norm before the attention; empty if there is none.
    """
    attention, mlp, none = f"{prefix}.self_attn", f"{prefix}.mlp", torch.empty(0)
    size, middle, features = config.hidden_size, config.intermediate_size, qkv_features or config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {"q": queries, "k": keys, "v": keys}
    projections = [reader.matrix(f"{attention}.{name}_proj.weight", (out, features)) for name, out in widths.items()]
    biases = [reader.vector(f"{attention}.{name}_proj.bias", out) for name, out in widths.items() if config.qkv_bias]
    gate, up = (reader.matrix(f"{mlp}.{name}_proj.weight", (middle, size)) for name in ("gate", "up"))
    return LayerWeights(
        input_norm=reader.vector(f"{prefix}.{input_norm}.weight", size) if input_norm else none,
        qkv=packed(pack(np.concatenate(projections))),
        qkv_bias=torch.cat([none, *biases]),
        query_norm=reader.vector(f"{attention}.q_norm.weight", config.head_dim) if config.head_norm else none,
        key_norm=reader.vector(f"{attention}.k_norm.weight", config.head_dim) if config.head_norm else none,
        output=packed(pack(reader.matrix(f"{attention}.o_proj.weight", (size, queries)))),
        post_attention_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", size),
        gate_up=packed(pack_gate_up(gate, up)),
        down=packed(pack(reader.matrix(f"{mlp}.down_proj.weight", (size, middle)))),
    )


def packed(panels: NDArray[np.generic]) -> torch.Tensor:
    """A copy in memory of PyTorch's, which starts at a cache line: a vector load that straddles two costs double."""
    return torch.from_numpy(panels).clone()
