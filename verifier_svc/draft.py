"""A tree with what the policy knows of its nodes: which drafter proposed each, and what it said of its chances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretoken.drafting import Float32
from foretoken.tree import DraftTree, Int32
from verifier_svc.sequence import DrafterShare


class Draft(NamedTuple):
    """One row's draft.

    Attributes:
        tree: what is verified.
        sources: int32 [num_nodes]; index + 1 of the drafter that a node is from, 0 for the root.
        scores: float32 [num_nodes]; that drafter's own.
        chances: float64 [num_nodes]; estimated chance that the text runs through the node, 1 for the root.
    """

    tree: DraftTree
    sources: Int32
    scores: Float32
    chances: np.ndarray

    def shares(self, matched: Sequence[int]) -> tuple[DrafterShare, ...]:
        """Each drafter's part, where the walk went through the nodes ``matched``, one a level."""
        return tuple(
            DrafterShare(
                number,
                int((self.sources == number).sum()),
                tuple(depth for depth, node in enumerate(matched, start=1) if self.sources[node] == number),
            )
            for number in sorted(set(self.sources[1:].tolist()))
        )

    def best(self, count: int) -> Draft:
        """The ``count`` most likely nodes, ancestors of each included: the root and no more at least."""
        num_nodes = self.tree.num_nodes
        if count >= num_nodes:
            return self
        chances = _at_most_parents(self.chances, self.tree.parents)
        # A child is never before its parent: its chance is no larger, and of equal ones the lower index comes first.
        kept = np.sort(np.argsort(-chances, kind="stable")[:count])
        places = np.full(num_nodes, -1, np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)
        parents = self.tree.parents[kept].copy()
        parents[1:] = places[parents[1:]]
        return Draft(DraftTree(self.tree.tokens[kept], parents), self.sources[kept], self.scores[kept], chances[kept])


def merge(drafts: Sequence[Draft]) -> Draft:
    """The drafts of one root united: a path that several propose is one, with the best of its chances."""
    if len(drafts) == 1:
        return drafts[0]
    tokens = [int(drafts[0].tree.tokens[0])]
    parents, sources, scores, chances = [-1], [0], [0.0], [1.0]
    children: dict[tuple[int, int], int] = {}
    for draft in drafts:
        places = [0]
        for node in range(1, draft.tree.num_nodes):
            parent, token = places[draft.tree.parents[node]], int(draft.tree.tokens[node])
            place = children.get((parent, token))
            chance = float(draft.chances[node])
            if place is None:
                place = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                sources.append(int(draft.sources[node]))
                scores.append(float(draft.scores[node]))
                chances.append(chance)
            elif chance > chances[place]:
                sources[place], scores[place], chances[place] = (
                    int(draft.sources[node]),
                    float(draft.scores[node]),
                    chance,
                )
            places.append(place)
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))
    return Draft(tree, np.array(sources, np.int32), np.array(scores, np.float32), np.array(chances))


def _at_most_parents(chances: np.ndarray, parents: Int32) -> np.ndarray:
    """A node is on the path only if its parent is."""
    out = chances.copy()
    for node in range(1, len(out)):
        if out[node] > out[parents[node]]:
            out[node] = out[parents[node]]
    return out
