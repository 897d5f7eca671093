"""Draft trees: tokens and parents; everything else follows from them.

Node 0 is the root, the last committed token. ``parents[0] == -1`` and ``parents[i] < i``, so
ancestors come before descendants.

              0            tokens  [t0, t1, t2, t3, t4]
            /   \\          parents [-1,  0,  0,  1,  3]
           1     2         depths  [ 0,  1,  1,  2,  3]
           |
           3               a chain is a tree with one child a node
           |
           4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
MASK_WORD_BITS = 64


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """One sequence's draft. ``num_nodes`` includes the root.

    Attributes:
        tokens: int32 [num_nodes]; ``tokens[0]`` is the last committed token.
        parents: int32 [num_nodes]; ``parents[0] == -1``, ``parents[i] < i``.
    """

    tokens: Int32
    parents: Int32

    @staticmethod
    def root_only(token: int) -> DraftTree:
        """Return the tree that plain decode verifies."""
        return DraftTree(np.array([token], np.int32), np.array([-1], np.int32))

    @staticmethod
    def chain(tokens: list[int]) -> DraftTree:
        """Return a chain; ``tokens[0]`` is the root."""
        return DraftTree(np.array(tokens, np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int32))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_speculative_tokens(self) -> int:
        return len(self.tokens) - 1


def depths(parents: Int32) -> Int32:
    """Return each node's number of edges from the root, int32 [num_nodes]."""
    out = [0]
    for parent in parents.tolist()[1:]:
        out.append(out[parent] + 1)
    return np.array(out, np.int32)


def ancestor_mask(parents: Int32) -> NDArray[np.uint64]:
    """Return the ancestor masks, uint64 [num_nodes, words].

    Bit i of a row is set if node i is the row's node or its ancestor.
    """
    rows = [1]
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        rows.append(rows[parent] | 1 << node)
    word, words = (1 << MASK_WORD_BITS) - 1, range(-(-len(rows) // MASK_WORD_BITS))
    return np.array([[row >> MASK_WORD_BITS * index & word for index in words] for row in rows], np.uint64)
