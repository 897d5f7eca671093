"""The Llama architecture for training: float32 weights with Hugging Face names, causal attention.

No KV cache and no generation: a trained checkpoint is loaded by ``transformers`` or by the server
itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama model, named as in its ``config.json``."""

    vocab_size: int = 8_192
    hidden_size: int = 384
    intermediate_size: int = 1_024
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2_048

    def config(self) -> dict[str, object]:
        """Return the ``config.json`` of a checkpoint of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": INITIAL_STD,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(hidden.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * shape.head_dim
        key_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over ``hidden`` [batch, length, hidden_size].

        ``cos``, ``sin`` [length, head_dim].
        """
        heads = (*hidden.shape[:2], -1, self.head_dim)
        query = rotate(self.q_proj(hidden).view(heads).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(hidden).view(heads).transpose(1, 2), cos, sin)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        assert isinstance(self.cos, Tensor) and isinstance(self.sin, Tensor)
        hidden: Tensor = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        for layer in self.layers:
            hidden = layer(hidden, self.cos[:length], self.sin[:length])
        output: Tensor = self.norm(hidden)
        return output


class Llama(nn.Module):
    """A Llama language model whose head is its embedding. ``forward`` returns the mean loss."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaModel(shape)
        residual_std = INITIAL_STD / math.sqrt(2 * shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else INITIAL_STD)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, vocab_size] of the tokens after ids [batch, length]."""
        return functional.linear(self.model(tokens), self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of ``tokens[:, 1:]`` [batch, length]."""
        logits = self.logits(tokens[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def rotary_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [max_position_embeddings, head_dim]; both halves are equal."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(shape.max_position_embeddings, dtype=torch.float64)[:, None] / shape.rope_theta**exponents
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().float(), both.sin().float()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) by their positions.

    ``heads`` is [batch, num_heads, length, head_dim].
    """
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
