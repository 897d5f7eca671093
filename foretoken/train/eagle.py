"""EAGLE-3 and EAGLE-2 heads: modules, losses, files.

The head's row of token i reads the token's embedding and the target's hidden states of token i - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from foretoken.errors import ConfigError
from foretoken.train.data import most_frequent
from foretoken.train.layers import ChainCache, ChainLayer, head_config, initialise
from foretoken.train.options import TrainOptions
from foretoken.train.recipe import compiled, llama_fields, write_checkpoint
from foretoken.train.target import FrozenTarget

# From EAGLE (arXiv 2401.15077) and its released code: uniform noise on the hidden states, weight of
# the classes.
_NOISE_WIDTH = 0.2
_NOISE_LENGTH = 512
_CLASS_WEIGHT = 0.1
_MIN_LAYERS = 4


def captured_layers(num_layers: int, asked: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the target layers whose inputs an EAGLE-3 head reads: as asked, or the usual ones.

    Raises ConfigError if the target has no such layer, or too few layers for the usual ones. Layer
    0 is not allowed: a head's config.json names outputs of layers, and its input is none.
    """
    if asked is not None:
        if not all(1 <= layer < num_layers for layer in asked):
            raise ConfigError(f"--feature-layers: expected 1 to {num_layers - 1}, got {' '.join(map(str, asked))}")
        return asked
    if num_layers < _MIN_LAYERS:
        raise ConfigError(f"eagle3 needs a target of at least {_MIN_LAYERS} layers, this one has {num_layers}")
    return (2, num_layers // 2, num_layers - 3)


class Eagle3Head(nn.Module):
    """The EAGLE-3 head (arXiv 2503.01840).

    It reduces three hidden states to one width and has one wide layer, its own norm and a head over
    the draft vocabulary.
    """

    def __init__(
        self, fields: dict[str, Any], hidden_width: int, draft_vocab_size: int, target_head: Tensor | None
    ) -> None:
        """``target_head``: the target's output head, used as it is; None: train an own one."""
        super().__init__()
        config = head_config(fields)
        self.fc = nn.Linear(hidden_width, config.hidden_size, bias=False)
        self.midlayer = ChainLayer(config, wide=True)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False) if target_head is None else None
        self.target_head = None if target_head is None else nn.Buffer(target_head, persistent=False)
        initialise(self)

    def enter(self, embeds: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Return the layer's hidden input.

        It is the target's hidden states reduced to one width, or the head's own.
        """
        return self.fc(hidden) if depth == 0 else hidden

    @property
    def layer(self) -> ChainLayer:
        return self.midlayer

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden_size] to [..., draft_vocab_size]."""
        normed = self.norm(hidden)
        if self.lm_head is not None:
            return self.lm_head(normed)  # type: ignore[no-any-return]
        assert self.target_head is not None
        return nn.functional.linear(normed.to(self.target_head.dtype), self.target_head)


class Eagle2Head(nn.Module):
    """One layer over ``fc(cat[embedding, hidden])`` that predicts the next hidden state.

    The output head is the target's.
    """

    def __init__(self, fields: dict[str, Any], target_head: Tensor) -> None:
        super().__init__()
        config = head_config(fields)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=True)
        self.layers = nn.ModuleList([ChainLayer(config, wide=False)])
        self.target_head = nn.Buffer(target_head, persistent=False)
        initialise(self)
        nn.init.zeros_(self.fc.bias)

    def enter(self, embeds: Tensor, hidden: Tensor, depth: int) -> Tensor:
        return self.fc(torch.cat([embeds, hidden.to(embeds.dtype)], dim=-1))  # type: ignore[no-any-return]

    @property
    def layer(self) -> ChainLayer:
        layer = self.layers[0]
        assert isinstance(layer, ChainLayer)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden_size] to [..., vocab_size]."""
        return nn.functional.linear(hidden.to(self.target_head.dtype), self.target_head)


class EagleRecipe:
    """The common part of both recipes.

    It has rotary tables, and chains of draft steps over all rows of a window at once.
    """

    module: Eagle3Head | Eagle2Head

    def __init__(self, target: FrozenTarget, options: TrainOptions, device: torch.device) -> None:
        self.target = target
        self.rows = options.context_length
        self.num_depths = options.num_draft_steps
        self.window = self.rows + self.num_depths
        self.fields = llama_fields(target, options, target.config.hidden_size, 1)
        rotary = LlamaRotaryEmbedding(head_config(self.fields)).to(device)
        positions = torch.arange(self.window, device=device)[None]
        self._cos, self._sin = rotary(torch.zeros(1, device=device), positions)
        self._current = torch.eye(self.num_depths, dtype=torch.bool, device=device)[:, 1:]

    def _layer_step(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, cache: ChainCache | None, is_current: Tensor
    ) -> tuple[Tensor, ChainCache]:
        hidden = self.module.enter(embeds, hidden, 0 if cache is None else 1)
        output: tuple[Tensor, ChainCache] = self.module.layer(embeds, hidden, cos, sin, cache, is_current)
        return output

    def depths(self, tokens: Tensor, hidden_states: Tensor) -> Iterator[Tensor]:
        """Yield the hidden states [batch, rows, hidden_size] of each depth.

        Each depth reads the output of the last.

        ``tokens`` int64 [batch, at least rows + num_depths], ``hidden_states`` [batch, rows,
        hidden_width].
        """
        embeds = nn.functional.embedding(tokens, self.target.embedding_weight)
        hidden, cache = hidden_states, None
        for depth in range(self.num_depths):
            at = slice(depth + 1, depth + 1 + self.rows)
            hidden, cache = self._layer_step(
                embeds[:, at], hidden, self._cos[:, at], self._sin[:, at], cache, self._current[depth]
            )
            yield hidden

    def _hidden_states(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def _target_ids(self, drafted: Tensor) -> Tensor:
        return drafted

    def matches(self, tokens: Tensor) -> Tensor:
        """Return what ``Recipe.matches`` does, over the rows of a training window."""
        found: list[Tensor] = []
        for depth, hidden in enumerate(self.depths(tokens, self._hidden_states(tokens[:, : self.rows]))):
            drafted = self._target_ids(self.module.logits(hidden).argmax(-1))
            found.append(drafted == tokens[:, depth + 2 : depth + 2 + self.rows])
        return torch.stack(found, dim=1)


class Eagle3Recipe(EagleRecipe):
    """Training-time test: every depth learns from the output of the depth before.

    It learns the target's distribution.
    """

    module: Eagle3Head

    def __init__(self, target: FrozenTarget, options: TrainOptions, device: torch.device, tokens: Tensor) -> None:
        super().__init__(target, options, device)
        vocab_size = target.config.vocab_size
        if options.draft_vocab_size > vocab_size:
            raise ConfigError(f"--draft-vocab-size {options.draft_vocab_size}: the target has {vocab_size} tokens")
        own_size = options.draft_vocab_size
        # They are ascending, so a full vocabulary is every id in order.
        self.draft_ids = most_frequent(tokens, own_size or vocab_size, vocab_size).to(device)
        self.is_draftable = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_draftable[self.draft_ids] = True
        self._layers = captured_layers(target.config.num_hidden_layers, options.feature_layers)
        self._has_layer_ids = options.feature_layers is not None
        self._decay = options.step_decay
        hidden_width = len(self._layers) * target.config.hidden_size
        shared_head = None if own_size else target.head_weight
        self.module = Eagle3Head(self.fields, hidden_width, own_size, shared_head).to(device)
        with torch.no_grad():
            if self.module.lm_head is not None:
                self.module.lm_head.weight.copy_(target.head_weight[self.draft_ids])
            self.module.norm.weight.copy_(target.model.model.norm.weight)
        self._step = compiled(self._depth_loss, options.compile is True)

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        """Return the cross entropy with the target's distribution.

        The distribution is renormalised over the draft vocabulary.

        As in the released code, positions whose most likely token is not in the draft vocabulary do
        not count.
        """
        output = self.target.run(tokens, self._layers)
        label_probs, is_counted = self._labels(output.final)
        embeds = nn.functional.embedding(tokens, self.target.embedding_weight)
        hidden = output.hidden_states[:, : self.rows]
        cache: tuple[Tensor, ...] = ()
        total = torch.zeros((), device=tokens.device)
        for depth in range(self.num_depths):
            at = slice(depth + 1, depth + 1 + self.rows)
            hidden, cache, part = self._step(
                embeds[:, at],
                hidden,
                self._cos[:, at],
                self._sin[:, at],
                cache,
                self._current[depth],
                label_probs[:, at],
                is_counted[:, at],
            )
            total = total + self._decay**depth * part
        return total / sum(self._decay**depth for depth in range(self.num_depths))

    def _depth_loss(
        self,
        embeds: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        before: tuple[Tensor, ...],
        is_current: Tensor,
        label_probs: Tensor,
        is_counted: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        # Caches enter and leave compiled code as plain tuples: torch 2.11 returns named tuples
        # without their items.
        cache = ChainCache(*before) if before else None
        hidden, cache = self._layer_step(embeds, hidden, cos, sin, cache, is_current)
        logits = self.module.logits(hidden).float()
        # The label probabilities of a position sum to one.
        loss = logits.logsumexp(-1) - (logits * label_probs.float()).sum(-1)
        return hidden, tuple(cache), (loss * is_counted).sum() / is_counted.sum().clamp(min=1)

    @torch.no_grad()
    def _labels(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities [batch, window, draft_vocab] in the target's type.

        Also return whether the target's argmax is draftable.
        """
        logits = self.target.logits(final)
        probs = logits[..., self.draft_ids].float().softmax(-1).to(logits.dtype)
        return probs, self.is_draftable[logits.argmax(-1)].float()

    @torch.no_grad()
    def _hidden_states(self, tokens: Tensor) -> Tensor:
        return self.target.run(tokens, self._layers).hidden_states

    def _target_ids(self, drafted: Tensor) -> Tensor:
        return self.draft_ids[drafted]

    def save(self, folder: Path) -> None:
        """Write the head with SafeAILab's names.

        Layer ids name outputs there, so they are one less; without ids the usual layers are meant.
        A head without its own draft vocabulary uses the target's output head, which is not stored.
        """
        size = len(self.draft_ids)
        tensors = dict(self.module.state_dict())
        config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **self.fields, "draft_vocab_size": None}
        if self.module.lm_head is not None:
            config["draft_vocab_size"] = size
            offsets = self.draft_ids - torch.arange(size, device=self.draft_ids.device)
            tensors |= {"d2t": offsets, "t2d": self.is_draftable}
        if self._has_layer_ids:
            ids = [layer - 1 for layer in self._layers]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        write_checkpoint(folder, config | {"tie_word_embeddings": False}, tensors)


class Eagle2Recipe(EagleRecipe):
    """EAGLE's recipe: regression of the next hidden state from noisy true states.

    The loss on the classes has a small weight.
    """

    module: Eagle2Head

    def __init__(self, target: FrozenTarget, options: TrainOptions, device: torch.device) -> None:
        super().__init__(target, options, device)
        self.module = Eagle2Head(self.fields, target.head_weight).to(device)
        self._seed = options.seed
        self._step = compiled(self._first_depth_loss, options.compile is True)

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        """Return smooth L1 to the target's hidden state plus 0.1 times the cross entropy.

        The cross entropy is with the target's distribution.
        """
        tokens = tokens[:, : self.rows + 1]
        final = self.target.run(tokens).final
        label_probs = self.target.logits(final[:, 1:]).float().softmax(-1).to(final.dtype)
        embeds = nn.functional.embedding(tokens[:, 1:], self.target.embedding_weight)
        generator = torch.Generator(tokens.device).manual_seed((self._seed << 32) + step)
        noise = torch.rand(final[:, :-1].shape, generator=generator, device=tokens.device) - 0.5
        noisy = final[:, :-1] + (noise * (_NOISE_WIDTH * _NOISE_LENGTH / self.rows)).to(final.dtype)
        loss: Tensor = self._step(embeds, noisy, final[:, 1:], label_probs)
        return loss

    def _first_depth_loss(self, embeds: Tensor, noisy: Tensor, final: Tensor, label_probs: Tensor) -> Tensor:
        at = slice(1, 1 + self.rows)
        predicted, _ = self._layer_step(embeds, noisy, self._cos[:, at], self._sin[:, at], None, self._current[0])
        logits = self.module.logits(predicted).float()
        classes = (logits.logsumexp(-1) - (logits * label_probs.float()).sum(-1)).mean()
        return nn.functional.smooth_l1_loss(predicted.float(), final.float()) + _CLASS_WEIGHT * classes

    @torch.no_grad()
    def _hidden_states(self, tokens: Tensor) -> Tensor:
        return self.target.run(tokens).final

    def save(self, folder: Path) -> None:
        """Write the head with SafeAILab's names.

        Embedding and output head are the target's and not stored.
        """
        write_checkpoint(
            folder, {"architectures": ["LlamaForCausalLMEagle"], **self.fields}, dict(self.module.state_dict())
        )
