"""A tree with what the policy knows of its nodes: which drafter proposed each, and what it said of its chances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretoken.tree import DraftTree


class DrafterShare(NamedTuple):
    """One drafter's part of a verified tree: its nodes, and the depths of those on the walked path."""

    # Index of the drafter + 1.
    drafter: int
    num_drafted: int
    accepted_depths: tuple[int, ...]


class Draft(NamedTuple):
    """One row's draft.

    Attributes:
        tree: what is verified.
        sources: per node index + 1 of the drafter that it is from, 0 for the root.
        scores: per node that drafter's own.
        chances: per node the estimated chance that the text runs through it, 1 for the root.
    """

    tree: DraftTree
    sources: list[int]
    scores: list[float]
    chances: list[float]

    def shares(self, matched: Sequence[int]) -> tuple[DrafterShare, ...]:
        """Each drafter's part, where the walk went through the nodes ``matched``, one a level."""
        return tuple(
            DrafterShare(
                number,
                self.sources.count(number),
                tuple(depth for depth, node in enumerate(matched, start=1) if self.sources[node] == number),
            )
            for number in sorted(set(self.sources[1:]))
        )

    def path_chances(self) -> list[float]:
        """``chances``, none above its parent's: a node is on the path only if its parent is."""
        out = self.chances[:1]
        for chance, parent in zip(self.chances[1:], self.tree.parents[1:].tolist(), strict=True):
            out.append(min(chance, out[parent]))
        return out

    def best(self, count: int) -> Draft:
        """The ``count`` most likely nodes, ancestors of each included: the root and no more at least."""
        num_nodes = self.tree.num_nodes
        if count >= num_nodes:
            return self
        tokens, parents = self.tree.tokens.tolist(), self.tree.parents.tolist()
        chances = self.path_chances()
        # A child is never before its parent: its chance is no larger, and of equal ones the lower index comes first.
        kept = sorted(sorted(range(num_nodes), key=lambda node: -chances[node])[:count])
        places = {node: place for place, node in enumerate(kept)}
        tree = DraftTree(
            np.array([tokens[node] for node in kept], np.int32),
            np.array([-1, *(places[parents[node]] for node in kept[1:])], np.int32),
        )
        return Draft(
            tree,
            [self.sources[node] for node in kept],
            [self.scores[node] for node in kept],
            [chances[node] for node in kept],
        )


def merge(drafts: Sequence[Draft]) -> Draft:
    """The drafts of one root united: a path that several propose is one, with the best of its chances."""
    if len(drafts) == 1:
        return drafts[0]
    tokens = [int(drafts[0].tree.tokens[0])]
    parents, sources, scores, chances = [-1], [0], [0.0], [1.0]
    children: dict[tuple[int, int], int] = {}
    for draft in drafts:
        places = [0]
        ours, above = draft.tree.tokens.tolist(), draft.tree.parents.tolist()
        for node in range(1, len(ours)):
            parent, token = places[above[node]], ours[node]
            place = children.get((parent, token))
            chance = draft.chances[node]
            if place is None:
                place = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                sources.append(draft.sources[node])
                scores.append(draft.scores[node])
                chances.append(chance)
            elif chance > chances[place]:
                sources[place], scores[place], chances[place] = draft.sources[node], draft.scores[node], chance
            places.append(place)
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))
    return Draft(tree, sources, scores, chances)
