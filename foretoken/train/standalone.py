"""Train a small Llama with the target's tokenizer on text and on the target's soft labels."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from foretoken.train.layers import head_config, initialise
from foretoken.train.options import TrainOptions
from foretoken.train.recipe import compiled, llama_fields, write_checkpoint
from foretoken.train.target import FrozenTarget

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja"),
)


class StandaloneRecipe:
    """The recipe of an ordinary causal language model whose embedding is also its head."""

    module: nn.Module

    def __init__(self, target: FrozenTarget, options: TrainOptions, device: torch.device) -> None:
        self.target = target
        self.rows = options.context_length
        self.num_depths = options.num_draft_steps
        self.window = self.rows + 1
        fields = llama_fields(target, options, options.hidden_size, options.num_layers)
        self.fields = fields | {"tie_word_embeddings": True}
        model: Any = LlamaForCausalLM(head_config(self.fields))
        initialise(model, residual_std=0.02 / (2 * options.num_layers) ** 0.5)
        self.module = model.to(device).train()
        self._distillation = options.distillation
        self._step = compiled(self._mixed_loss, options.compile is True)

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        """Return the cross entropy with the target's distribution and with the text.

        ``distillation`` is the share of the distribution.
        """
        probs = self.target.logits(self.target.run(tokens[:, :-1]).final)
        probs = probs.float().softmax(-1).to(probs.dtype)
        loss: Tensor = self._step(tokens[:, :-1], tokens[:, 1:], probs)
        return loss

    def _mixed_loss(self, tokens: Tensor, following: Tensor, label_probs: Tensor) -> Tensor:
        logits = self._logits(tokens).float()
        normaliser = logits.logsumexp(-1)
        of_text = normaliser - logits.gather(-1, following[..., None])[..., 0]
        of_target = normaliser - (logits * label_probs.float()).sum(-1)
        return (self._distillation * of_target + (1 - self._distillation) * of_text).mean()

    def _logits(self, tokens: Tensor) -> Tensor:
        model: Any = self.module
        logits: Tensor = model(tokens, use_cache=False).logits
        return logits

    def matches(self, tokens: Tensor) -> Tensor:
        """Return what ``Recipe.matches`` does.

        If all earlier steps matched, the model has drafted the text itself.
        """
        is_next = self._logits(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]
        return torch.stack([is_next[:, 1 + depth : 1 + depth + self.rows] for depth in range(self.num_depths)], dim=1)

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face checkpoint with the target's tokenizer files."""
        tensors = {name: value for name, value in self.module.state_dict().items() if name != "lm_head.weight"}
        write_checkpoint(folder, {"architectures": ["LlamaForCausalLM"], **self.fields}, tensors)
        for name in _TOKENIZER_FILES:
            if (self.target.path / name).is_file():
                shutil.copyfile(self.target.path / name, folder / name)
