"""The decoder layer of a draft head, and the attention of chains of draft steps in training.

Row r of a window starts a chain whose root is token r + 1. At depth d the chain reads token r + 1 +
d and the hidden state of its own depth d - 1 (at depth 0: the target's hidden states of token r).
It attends to the depth-0 KV entries of all rows up to r, which a server would have made from the
target's hidden states, and to its own KV entries of depths 1 to d. So rows stay in place from depth
to depth; only tokens and positions move.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

# Far below any score: its exp is 0, and unlike minus infinity it gives no NaN gradient.
_MASKED = -1e9


class ChainCache(NamedTuple):
    """Keys and values of earlier depths: depth 0 of all rows, and later depths of each row itself.

    Attributes:
        prefix_key, prefix_value: [batch, num_kv_heads, rows, head_dim].
        own_key, own_value: [batch, num_kv_heads, num_depths - 1, rows, head_dim], index d - 1 for
            depth d.
    """

    prefix_key: Tensor
    prefix_value: Tensor
    own_key: Tensor
    own_value: Tensor


class ChainAttention(nn.Module):
    """Grouped-query attention whose inputs have ``input_size`` elements."""

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim: int = config.head_dim
        self.num_kv_heads: int = config.num_key_value_heads
        self.num_groups: int = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self, rows: Tensor, cos: Tensor, sin: Tensor, cache: ChainCache | None, is_current: Tensor
    ) -> tuple[Tensor, ChainCache]:
        """Attend with ``rows`` [batch, rows, input_size].

        ``is_current`` bool [num_depths - 1] marks a depth above 0.
        """
        shape = (*rows.shape[:2], -1, self.head_dim)
        query = self.q_proj(rows).view(shape).transpose(1, 2)
        key = self.k_proj(rows).view(shape).transpose(1, 2)
        value = self.v_proj(rows).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        query, key = query.to(value.dtype), key.to(value.dtype)
        here = is_current[:, None, None]
        before = (key.new_zeros(()),) * 2 if cache is None else (cache.own_key, cache.own_value)
        own_key, own_value = (
            torch.where(here, now[:, :, None], then) for now, then in zip((key, value), before, strict=True)
        )
        if cache is None:
            cache = ChainCache(key, value, own_key, own_value)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            cache = cache._replace(own_key=own_key, own_value=own_value)
            mixed = self._attend_along_chains(query, cache, is_current)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output, cache

    def _attend_along_chains(self, query: Tensor, cache: ChainCache, is_current: Tensor) -> Tensor:
        """Attend to the prefix's keys and each row's own, in one softmax.

        The result is [batch, num_heads, rows, head_dim].
        """
        rows = query.shape[2]
        shape = (query.shape[0], self.num_kv_heads, self.num_groups, rows)
        grouped = query.reshape(*shape, self.head_dim) * self.head_dim**-0.5
        prefix = (grouped.flatten(2, 3) @ cache.prefix_key.mT).view(*shape, rows).float()
        later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        prefix = prefix.masked_fill(later, _MASKED)
        # [.., groups, depths, rows]
        own = (grouped[:, :, :, None].float() * cache.own_key[:, :, None].float()).sum(-1)
        unmade = ~(is_current.flip(0).cumsum(0).flip(0) > 0)
        own = own.masked_fill(unmade[:, None], _MASKED)
        total = torch.logaddexp(prefix.logsumexp(-1), own.logsumexp(-2))
        prefix_share = torch.exp(prefix - total[..., None]).to(query.dtype)
        own_share = torch.exp(own - total[..., None, :])
        mixed = (prefix_share.flatten(2, 3) @ cache.prefix_value).view(*shape, self.head_dim).float()
        mixed = mixed + (own_share[..., None] * cache.own_value[:, :, None].float()).sum(-3)
        output: Tensor = mixed.to(query.dtype).flatten(1, 2)
        return output


class ChainLayer(nn.Module):
    """One decoder layer.

    ``wide``: EAGLE-3's layer, which reads the norms of embedding and hidden state side by side;
    otherwise EAGLE-2's, which reads its input as it is.
    """

    def __init__(self, config: LlamaConfig, *, wide: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.wide = wide
        self.self_attn = ChainAttention(config, 2 * size if wide else size)
        self.mlp: nn.Module = LlamaMLP(config)  # type: ignore[no-untyped-call]
        if wide:
            self.input_layernorm = LlamaRMSNorm(size, eps)
            self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)

    def forward(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, cache: ChainCache | None, is_current: Tensor
    ) -> tuple[Tensor, ChainCache]:
        """Return the layer's output before the norm.

        ``hidden`` is [batch, rows, hidden_size], ``embeds`` read if wide.
        """
        rows = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1) if self.wide else hidden
        mixed, cache = self.self_attn(rows, cos, sin, cache, is_current)
        hidden = hidden + mixed
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output, cache


def initialise(module: nn.Module, residual_std: float = 0.01) -> None:
    """Draw normal weights, smaller ones for matrices that write to the residual stream."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)


def head_config(fields: dict[str, Any]) -> LlamaConfig:
    """Return the transformers config of a head's config.json, for the layers above."""
    scaling = fields["rope_scaling"] or {"rope_type": "default"}
    rope = {"rope_theta": fields["rope_theta"], **scaling}
    kept = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    config: LlamaConfig = LlamaConfig.from_dict(kept | {"rope_parameters": rope})
    return config
