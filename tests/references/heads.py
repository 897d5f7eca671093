"""Draft heads in plain PyTorch, float64, dense attention: written from the formats' descriptions.

It shares no code with foretoken. A head runs over a list of entries at once: pairs of a token and
the hidden state before it, each with its position and the entries that it sees. A step of recurrent
drafting is one more run with more entries, so tests can compare a whole draft tree. Positions are
those of training: the pair of token i is at i - 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


@dataclass
class Entries:
    """The inputs that a head runs over.

    Attributes:
        tokens: int64 [n].
        states: one float64 vector for each entry: the target's, or the head's own for the parent.
        from_target: whether the state is the target's.
        positions: int64 [n]: the pair's, so one less than the token's.
        sees: bool [n, n]: row i is true for each entry that entry i attends to, itself included.
    """

    tokens: torch.Tensor
    states: list[torch.Tensor]
    from_target: list[bool]
    positions: torch.Tensor
    sees: torch.Tensor


def read_folder(folder: Path) -> tuple[dict[str, Any], Tensors]:
    tensors = {
        name: t if t.dtype in (torch.int64, torch.bool) else t.double()
        for name, t in load_file(folder / "model.safetensors").items()
    }
    return json.loads((folder / "config.json").read_text()), tensors


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Return x [n, heads, dim] with each (x[i], x[i + dim / 2]) rotated as a complex number."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** -(torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1)


@dataclass
class Layer:
    """One decoder layer's arithmetic over named tensors under a prefix."""

    tensors: Tensors
    prefix: str
    config: dict[str, Any]

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[f"{self.prefix}.{name}"]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.get(f"{name}.weight"), self.config["rms_norm_eps"])

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.get(f"self_attn.{name}_proj.weight").T
        bias = self.tensors.get(f"{self.prefix}.self_attn.{name}_proj.bias")
        return y if bias is None else y + bias

    def attention(self, x: torch.Tensor, entries: Entries) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        q, k, v = (self.project(name, x).unflatten(1, (-1, dim)) for name in "qkv")
        if f"{self.prefix}.self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        q, k = turned(q, entries.positions, theta), turned(k, entries.positions, theta)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        weights = scores.masked_fill(~entries.sees, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ self.get("self_attn.o_proj.weight").T

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.get(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
        return (torch.nn.functional.silu(gate) * up) @ self.get("mlp.down_proj.weight").T

    def run(self, attention_input: torch.Tensor, residual: torch.Tensor, entries: Entries) -> torch.Tensor:
        residual = residual + self.attention(attention_input, entries)
        return residual + self.mlp(self.norm("post_attention_layernorm", residual))


class ReferenceHead:
    """A head in ``folder`` beside the target in ``target``; for MTP the two are one.

    Attributes:
        target_ids: int64 [draft vocabulary]: the target's id of each draft id.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        self.config, self.tensors = read_folder(folder)
        self.target_config, target_tensors = read_folder(target)
        self.embedding = target_tensors["model.embed_tokens.weight"]
        self.head = target_tensors.get("lm_head.weight", self.embedding)
        self.target_ids = torch.arange(len(self.head))
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float64 logits [n, draft vocabulary], and hidden [n, hidden] for the next step."""
        raise NotImplementedError


class ReferenceEagle(ReferenceHead):
    """EAGLE and EAGLE-2: fc over embedding and state, one
    layer without first norm, target's head.
    """

    def prepare(self) -> None:
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in self.tensors.items()}

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat([self.embedding[entries.tokens], torch.stack(entries.states)], 1)
        hidden = joined @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", torch.zeros(()).double())
        for index in range(self.config.get("num_hidden_layers", 1)):
            layer = Layer(self.tensors, f"layers.{index}", self.config)
            hidden = layer.run(self.entering(layer, index, hidden), hidden, entries)
        return hidden @ self.head.T, hidden

    def entering(self, layer: Layer, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of a layer's attention: the first layer has no norm."""
        return hidden if index == 0 else layer.norm("input_layernorm", hidden)


class ReferenceEagle3(ReferenceHead):
    """EAGLE-3 in the names of either spelling and the config of either dialect."""

    def prepare(self) -> None:
        old = {
            "midlayer": "layers.0",
            "aux_norm_low": "fc_norm.0",
            "aux_norm_mid": "fc_norm.1",
            "aux_norm_high": "fc_norm.2",
        }
        renamed = {}
        for name, tensor in self.tensors.items():
            name = name.removeprefix("model.")
            for before, after in old.items():
                name = name.replace(before, after)
            renamed[name] = tensor
        self.tensors = renamed
        self.layer_config = self.config.get("transformer_layer_config", self.config)
        if self.config.get("target_hidden_size"):
            self.embedding = renamed["embed_tokens.weight"]
        if self.config.get("draft_vocab_size"):
            self.head = renamed["lm_head.weight"]
            self.target_ids = torch.arange(len(self.head))
            if "d2t" in renamed:
                self.target_ids = self.target_ids + renamed["d2t"]
        else:
            self.target_ids = torch.arange(len(self.head))

    def joined(self, state: torch.Tensor) -> torch.Tensor:
        eps, tensors = self.layer_config["rms_norm_eps"], self.tensors
        if "input_norm.weight" in tensors:
            state = rms(state, tensors["input_norm.weight"], eps)
        if "fc_norm.0.weight" in tensors:
            parts = state.chunk(3)
            state = torch.cat([rms(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)])
        return tensors["fc.weight"] @ state + tensors.get("fc.bias", torch.zeros(()).double())

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(entries.states, entries.from_target, strict=True)
        hidden = torch.stack([self.joined(state) if fresh else state for state, fresh in pairs])
        for index in range(self.layer_config.get("num_hidden_layers", 1)):
            layer = Layer(self.tensors, f"layers.{index}", self.layer_config)
            if index == 0:
                embedded = layer.norm("input_layernorm", self.embedding[entries.tokens])
                normed = layer.norm("hidden_norm", hidden)
                residual = normed if self.config.get("norm_before_residual") else hidden
                hidden = layer.run(torch.cat([embedded, normed], 1), residual, entries)
            else:
                name = "hidden_norm" if f"layers.{index}.hidden_norm.weight" in self.tensors else "input_layernorm"
                hidden = layer.run(layer.norm(name, hidden), hidden, entries)
        normed = rms(hidden, self.tensors["norm.weight"], self.layer_config["rms_norm_eps"])
        return normed @ self.head.T, normed if self.config.get("norm_output") else hidden


class ReferenceMimo(ReferenceHead):
    """MiMo's MTP layers: state first, first embedding zero, fed back after its own last norm."""

    def prepare(self) -> None:
        pass

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        layer = Layer(self.tensors, f"model.mtp_layers.{depth}", self.config)
        embedded = self.embedding[entries.tokens].clone()
        embedded[entries.positions == 0] = 0
        parts = [layer.norm("hidden_layernorm", torch.stack(entries.states)), layer.norm("token_layernorm", embedded)]
        hidden = torch.cat(parts, 1) @ layer.get("input_proj.weight").T
        hidden = layer.norm("final_layernorm", layer.run(layer.norm("input_layernorm", hidden), hidden, entries))
        return hidden @ self.head.T, hidden


class ReferenceQwen3Next(ReferenceHead):
    """Qwen3-Next's MTP layers: embedding first, shared norms and fc, fed back after last norm."""

    def prepare(self) -> None:
        pass

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        eps, tensors = self.config["rms_norm_eps"], self.tensors
        embedded = rms(self.embedding[entries.tokens], tensors["mtp.pre_fc_norm_embedding.weight"], eps)
        state = rms(torch.stack(entries.states), tensors["mtp.pre_fc_norm_hidden.weight"], eps)
        hidden = torch.cat([embedded, state], 1) @ tensors["mtp.fc.weight"].T
        layer = Layer(tensors, f"mtp.layers.{depth}", self.config)
        hidden = rms(layer.run(layer.norm("input_layernorm", hidden), hidden, entries), tensors["mtp.norm.weight"], eps)
        return hidden @ self.head.T, hidden
