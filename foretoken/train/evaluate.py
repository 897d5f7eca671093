"""Measure held-out acceptance.

It is how far drafts agree with the target's greedy text after held-out prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.train.recipe import Recipe
from foretoken.train.target import FrozenTarget

# With fewer tokens a step than this, even a drafter that costs nothing gains less than 5%.
LEAST_TOKENS_PER_STEP = 1.05


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of one measurement over ``num_chains`` chains, one at each generated token.

    Attributes:
        per_step: probability that step d's best token is the target's, given that all steps before
            matched.
        tokens_per_step: 1 + the mean number of accepted tokens of a chain, as in greedy chain
            drafting.
    """

    per_step: tuple[float, ...]
    tokens_per_step: float
    num_chains: int

    @property
    def is_useless(self) -> bool:
        """Return whether so little is accepted that drafts are not worth their cost."""
        return self.tokens_per_step < LEAST_TOKENS_PER_STEP

    def __str__(self) -> str:
        steps = " ".join(f"{each:.3f}" for each in self.per_step)
        return f"held-out acceptance per step {steps}: {self.tokens_per_step:.2f} tokens a step"


def held_out_texts(target: FrozenTarget, tokens: Tensor, count: int, length: int, batch_size: int) -> Tensor:
    """Return prompts spread evenly over ``tokens``, int64 [count, length].

    Each has the target's greedy text.

    The second half of each row is generated. Raises ConfigError if the tokens are fewer than one
    prompt.
    """
    prompt = length // 2
    if len(tokens) < prompt:
        raise ConfigError(f"{len(tokens)} held-out tokens are fewer than one prompt of {prompt}")
    count = max(1, min(count, len(tokens) // prompt))
    starts = torch.linspace(0, len(tokens) - prompt, count).long().to(tokens.device)
    prompts = tokens[starts[:, None] + torch.arange(prompt, device=tokens.device)].long()
    return torch.cat([target.written_text(each, length - prompt) for each in torch.split(prompts, batch_size)])


@torch.no_grad()
def measure(recipe: Recipe, texts: Tensor, batch_size: int) -> Acceptance:
    """Measure acceptance on ``texts`` [count, length] of ``held_out_texts``.

    Chains draft generated tokens.
    """
    first_row = texts.shape[1] // 2 - 2
    accepted: list[Tensor] = []
    chains = 0
    for batch in torch.split(texts, batch_size):
        matches = recipe.matches(batch)[:, :, first_row:]
        accepted.append(matches.long().cumprod(1).sum((0, 2)))
        chains += matches.shape[0] * matches.shape[2]
    totals: list[int] = torch.stack(accepted).sum(0).tolist()
    tried = [chains, *totals[:-1]]
    per_step = tuple(good / max(1, total) for good, total in zip(totals, tried, strict=True))
    return Acceptance(per_step, 1 + sum(totals) / chains, chains)
