"""Tiny targets and draft heads fitted in seconds to a repeating text: drafts are often right.

Heads are fitted through the plain references of tests/references/heads.py, without foretoken's
code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tests.references.heads import Entries, ReferenceHead
from tests.support.grammars import ids_of

# Phrases around a digit that grows by one from phrase to phrase: n-grams guess it wrongly, and
# everything else rightly.
DIGITS = ids_of(*"0123456789")
PHRASES = [
    (ids_of("ab"), ids_of("cd", "x")),
    (ids_of("cd", "12"), ids_of("99", "ab")),
    (ids_of("a1"), ids_of("a", "b", "ab")),
]
TARGET_STEPS, HEAD_STEPS = 100, 40
LENGTH = 48


def text(seed: int, length: int, *, switch: float = 0.25, digit: int | None = None) -> list[int]:
    """Return phrases around ``digit`` and its successors.

    After each phrase another kind follows with the chance ``switch``.
    """
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    number = int(random.integers(10)) if digit is None else digit
    phrase = int(random.integers(len(PHRASES)))
    while len(tokens) < length:
        before, after = PHRASES[phrase]
        tokens += [*before, DIGITS[number % 10], *after]
        number += 1
        if random.random() < switch:
            phrase = int(random.integers(len(PHRASES)))
    return tokens[:length]


def fit_target(model: PreTrainedModel, folder: Path, *, steps: int = TARGET_STEPS, seed: int = 0) -> None:
    """Fit the target to ``text`` and store the weights in its folder, beside its other files."""
    torch.manual_seed(seed)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        ids = torch.tensor([text(1000 * seed + 8 * step + row, LENGTH) for row in range(8)])
        optimizer.zero_grad()
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
    model.eval()
    overwrite(folder, {name: parameter.detach() for name, parameter in model.named_parameters()})


def perturb(folder: Path, share: float) -> None:
    """Add noise to all matrices, by a share of their deviation."""
    torch.manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    noisy = {name: t + share * t.std() * torch.randn_like(t) for name, t in tensors.items() if t.dim() == 2}
    overwrite(folder, noisy)


def hidden_states_of(model: PreTrainedModel, ids: list[int], layers: Iterable[int]) -> torch.Tensor:
    """Return float64 [tokens, hidden_states]: the named layers' inputs.

    -1 is the last norm's output.
    """
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], 1).double()


def fit_head(
    reference: ReferenceHead, folder: Path, model: PreTrainedModel, layers: Iterable[int], *, num_depths: int = 1
) -> None:
    """Fit a head to the target's own next tokens, over the target's hidden states and its own."""
    mine = [n for n in load_file(folder / "model.safetensors") if not n.startswith(("model.embed", "model.layers.0."))]
    names = [n for n in mine if n in reference.tensors and _is_heads(n, folder == reference.target)]
    for name in names:
        reference.tensors[name].requires_grad_(True)
    optimizer = torch.optim.Adam([reference.tensors[name] for name in names], 3e-3)
    drafted = {int(token): index for index, token in enumerate(reference.target_ids)}
    for step in range(HEAD_STEPS):
        ids = text(77_000 + step, 32)
        hidden_states = hidden_states_of(model, ids, layers)
        optimizer.zero_grad()
        loss = torch.zeros(())
        wanted = torch.tensor([drafted.get(token, -100) for token in ids[2:]])
        for logits in _both_steps(reference, ids, hidden_states, num_depths):
            loss = loss + cross_entropy(logits, wanted[-len(logits) :])
        loss.backward()
        optimizer.step()
    overwrite(folder, {name: reference.tensors[name].detach().float() for name in names})


def _is_heads(name: str, is_mtp: bool) -> bool:
    if is_mtp:
        return name.startswith(("mtp.", "model.mtp_layers."))
    return not name.startswith(("embed_tokens", "d2t", "t2d"))


def _both_steps(
    reference: ReferenceHead, ids: list[int], hidden_states: torch.Tensor, num_depths: int
) -> Iterable[torch.Tensor]:
    """Return the logits after the target's hidden states, and after the head's own."""
    count = len(ids) - 2
    pairs = torch.tensor(ids[1:-1])
    positions = torch.arange(count)
    causal = torch.ones(count, count).tril().bool()
    first = Entries(pairs, list(hidden_states[:count]), [True] * count, positions, causal)
    logits, hidden = reference.run(first)
    yield logits
    own = list(hidden[:-1])
    if num_depths > 1:
        later = Entries(pairs[1:], own, [False] * len(own), positions[1:], causal[1:, 1:])
        yield reference.run(later, 1)[0]
        return
    # An entry with the head's own state sees itself and the target's entries before it.
    sees = torch.zeros(2 * count - 1, 2 * count - 1).bool()
    sees[:count, :count] = causal
    sees[count:, :count] = causal[:-1]
    sees[count:, count:] = torch.eye(count - 1).bool()
    both = Entries(
        torch.cat([pairs, pairs[1:]]),
        [*first.states, *own],
        [True] * count + [False] * len(own),
        torch.cat([positions, positions[1:]]),
        sees,
    )
    yield reference.run(both)[0][count:]


def overwrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {n: t.contiguous().clone() for n, t in tensors.items() if n in stored}, file)
