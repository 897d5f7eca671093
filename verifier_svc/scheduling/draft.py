"""Hold a draft tree with the drafter and the estimated chance of each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretoken.results import VerifiedTree
from foretoken.tree import DraftTree, depths


class DrafterShare(NamedTuple):
    """One drafter's share of a verified tree: how many nodes, and the depths of accepted ones."""

    # Index of the drafter + 1.
    drafter: int
    num_drafted: int
    accepted_depths: tuple[int, ...]


class Draft(NamedTuple):
    """One row's draft.

    Attributes:
        tree: the tree to verify.
        sources: the drafter's number (index + 1) for each node; 0 for the root.
        scores: the drafter's score for each node.
        chances: the estimated chance that the text runs through each node, so none is above its
            parent's; 1 for the root.
    """

    tree: DraftTree
    sources: list[int]
    scores: list[float]
    chances: list[float]

    def shares(self, matched: Sequence[int]) -> tuple[DrafterShare, ...]:
        """Return each drafter's share. ``matched``: the nodes of the walk, one for each level."""
        return tuple(
            DrafterShare(
                number,
                self.sources.count(number),
                tuple(depth for depth, node in enumerate(matched, start=1) if self.sources[node] == number),
            )
            for number in sorted(set(self.sources[1:]))
        )

    def along(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes of the path that a text of these tokens takes below the root."""
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(self.tree.parents.tolist(), self.tree.tokens.tolist(), strict=True)
            )
        }
        path: list[int] = []
        node: int | None = 0
        for token in tokens:
            node = children.get((node, token))
            if node is None:
                break
            path.append(node)
        return path

    def verified(self, accepted: Sequence[int]) -> VerifiedTree:
        """Return the tree as a client sees it after the step that accepted these nodes."""
        tree = self.tree
        return VerifiedTree(
            tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), tuple(self.sources), tuple(accepted)
        )

    def best(self, count: int) -> Draft:
        """Return a draft of the ``count`` most likely nodes, but at least the root."""
        num_nodes = self.tree.num_nodes
        if count >= num_nodes:
            return self
        chances = self.chances
        # A parent sorts before its child: its chance is no smaller, and the sort is stable.
        return self._of(sorted(sorted(range(num_nodes), key=lambda node: -chances[node])[:count]))

    def to_depth(self, most: int) -> Draft:
        """Return a draft of the nodes with at most ``most`` edges above them."""
        # A tree has no more levels than nodes below its root.
        if self.tree.num_nodes <= most + 1:
            return self
        levels = depths(self.tree.parents).tolist()
        if max(levels) <= most:
            return self
        return self._of([node for node, level in enumerate(levels) if level <= most])

    def _of(self, kept: list[int]) -> Draft:
        """Return a draft of these nodes, whose parents are among them, in order."""
        tokens, parents = self.tree.tokens.tolist(), self.tree.parents.tolist()
        places = {node: place for place, node in enumerate(kept)}
        tree = DraftTree(
            np.array([tokens[node] for node in kept], np.int32),
            np.array([-1, *(places[parents[node]] for node in kept[1:])], np.int32),
        )
        return Draft(
            tree,
            [self.sources[node] for node in kept],
            [self.scores[node] for node in kept],
            [self.chances[node] for node in kept],
        )


def merge(drafts: Sequence[Draft]) -> Draft:
    """Merge drafts with one root. A path of several drafters is kept once, with its best chance."""
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
