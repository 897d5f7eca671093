"""EAGLE-2's draft tree in plain PyTorch (arXiv 2406.16858, 4.1 and 4.2), without cache or batching.

It shares no code with foretoken. A node's value is the product of the draft probabilities along its
path. Expansion: the newest level's ``branches`` nodes of the highest value each get their
``branches`` most likely children. Reranking: the ``num_nodes - 1`` nodes of the highest value stay;
equal values prefer the earlier, shallower node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from tests.references.heads import Entries, ReferenceHead


class Shape(NamedTuple):
    """The number of nodes with the root, of levels below it, and of a node's children."""

    nodes: int
    steps: int
    branches: int


@dataclass
class Node:
    token: int
    parent: int
    depth: int
    # Log of the product of draft probabilities along the path.
    value: float
    # Indices of the ancestors, the node's own last.
    path: list[int] = field(default_factory=list)


class Tree(NamedTuple):
    """Node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    values: list[float]


# Log probabilities [nodes, draft vocabulary] after the given nodes, all of one depth; no nodes
# stand for the root.
Expand = Callable[[list[Node], list[Node]], torch.Tensor]


def grow(root: int, shape: Shape, target_ids: torch.Tensor, expand: Expand) -> Tree:
    """Grow a tree; ``expand`` gets all nodes, and the nodes whose children are wanted."""
    nodes: list[Node] = []

    def add_children(parent: int, log_probs: torch.Tensor) -> None:
        depth = 1 if parent < 0 else nodes[parent].depth + 1
        before = Node(root, -1, 0, 0.0) if parent < 0 else nodes[parent]
        best = log_probs.sort(descending=True, stable=True)
        for value, index in zip(best.values[: shape.branches], best.indices[: shape.branches], strict=True):
            token = int(target_ids[index])
            nodes.append(Node(token, parent, depth, before.value + float(value), [*before.path, len(nodes)]))

    add_children(-1, expand(nodes, [])[0])
    level = list(range(len(nodes)))
    for _ in range(1, shape.steps):
        beams = sorted(level, key=lambda i: (-nodes[i].value, i))[: shape.branches]
        log_probs = expand(nodes, [nodes[i] for i in beams])
        first = len(nodes)
        for beam, row in zip(beams, log_probs, strict=True):
            add_children(beam, row)
        level = list(range(first, len(nodes)))
    kept = sorted(sorted(range(len(nodes)), key=lambda i: (-nodes[i].value, i))[: shape.nodes - 1])
    places = {-1: 0} | {index: place + 1 for place, index in enumerate(kept)}
    return Tree(
        [root, *(nodes[i].token for i in kept)],
        [-1, *(places[nodes[i].parent] for i in kept)],
        [0.0, *(nodes[i].value for i in kept)],
    )


def head_tree(
    head: ReferenceHead,
    tokens: list[int],
    hidden_states: torch.Tensor,
    shape: Shape,
    *,
    num_depths: int = 1,
    first: int = 1,
) -> Tree:
    """Return a head's tree after ``tokens``.

    Args:
        hidden_states: float64 [tokens, width]: the target's; token i is paired with that of i - 1.
        num_depths: modules; module d gets module d - 1's output of one token earlier, and the last
            one goes on alone.
        first: the first token whose pair the head sees; 1 unless it joined late.
    """
    count = len(tokens) - first
    ids = torch.tensor(tokens)
    # Each module's entries, and the state that each node's children get.
    base: list[Entries] = []
    states = list(hidden_states[first - 1 : len(tokens) - 1])
    root_state = torch.empty(0)
    root_logits = torch.empty(0)
    for module in range(num_depths):
        places = torch.arange(first + module, len(tokens))
        size = count - module
        sees = torch.ones(size, size).tril().bool()
        entries = Entries(ids[places], states, [module == 0] * size, places - 1, sees)
        base.append(entries)
        logits, hidden = head.run(entries, module)
        if module == 0:
            root_logits, root_state = logits[-1], hidden[-1]
        states = list(hidden[:-1])
    given: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def expand(nodes: list[Node], wanted: list[Node]) -> torch.Tensor:
        if not wanted:
            return root_logits.log_softmax(-1)[None]
        module = min(wanted[0].depth, num_depths - 1)
        known = base[module]
        # All ancestors that are entries of this module, each once, then the nodes themselves.
        members = sorted({i for node in wanted for i in node.path if min(nodes[i].depth, num_depths - 1) == module})
        for i in members:
            given[i] = root_state if nodes[i].parent < 0 else made[nodes[i].parent]
        size, total = len(known.tokens), len(known.tokens) + len(members)
        sees = torch.zeros(total, total).bool()
        sees[:size, :size] = known.sees
        for row, i in enumerate(members):
            sees[size + row, :size] = True
            for column, other in enumerate(members):
                sees[size + row, size + column] = other in nodes[i].path
        entries = Entries(
            torch.cat([known.tokens, torch.tensor([nodes[i].token for i in members])]),
            [*known.states, *(given[i] for i in members)],
            [*known.from_target, *[False] * len(members)],
            torch.cat([known.positions, torch.tensor([len(tokens) - 2 + nodes[i].depth for i in members])]),
            sees,
        )
        logits, hidden = head.run(entries, module)
        rows = {i: size + row for row, i in enumerate(members)}
        for i, row in rows.items():
            made[i] = hidden[row]
        return torch.stack([logits[rows[node.path[-1]]].log_softmax(-1) for node in wanted])

    with torch.no_grad():
        return grow(tokens[-1], shape, head.target_ids, expand)


def model_tree(model: PreTrainedModel, tokens: list[int], shape: Shape) -> Tree:
    """Return the tree of a draft model that gets only tokens."""

    def expand(nodes: list[Node], wanted: list[Node]) -> torch.Tensor:
        paths: Iterable[list[int]] = [[nodes[i].token for i in node.path] for node in wanted] or [[]]
        ids = torch.tensor([[*tokens, *path] for path in paths])
        return model(ids).logits[:, -1].double().log_softmax(-1)

    with torch.no_grad():
        return grow(tokens[-1], shape, torch.arange(model.config.vocab_size), expand)
