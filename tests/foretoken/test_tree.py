"""Draft trees on literal tensors: depths and ancestor masks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.tree import DraftTree, ancestor_mask, depths

#         0
#       / | \
#      1  2  3
#     /|     |
#    4 5     6
#      |
#      7
PARENTS = np.array([-1, 0, 0, 0, 1, 1, 3, 5], np.int32)


def test_depths():
    assert depths(PARENTS).tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert depths(np.array([-1], np.int32)).tolist() == [0]


def test_a_node_sees_itself_and_its_ancestors_and_no_sibling():
    assert [f"{row[0]:08b}" for row in ancestor_mask(PARENTS).tolist()] == [
        "00000001",
        "00000011",
        "00000101",
        "00001001",
        "00010011",
        "00100011",
        "01001001",
        "10100011",
    ]


def test_masks_of_more_than_64_nodes_take_more_words():
    chain = DraftTree.chain(list(range(130)))
    mask = ancestor_mask(chain.parents)
    full = 2**64 - 1
    assert mask.shape == (130, 3)
    assert mask[0].tolist() == [1, 0, 0]
    assert mask[63].tolist() == [full, 0, 0]
    assert mask[64].tolist() == [full, 1, 0]
    assert mask[129].tolist() == [full, full, 3]


def test_roots_and_chains():
    root = DraftTree.root_only(7)
    assert (root.tokens.tolist(), root.parents.tolist()) == ([7], [-1])
    assert (root.num_nodes, root.num_speculative_tokens) == (1, 0)
    chain = DraftTree.chain([7, 8, 9])
    assert (chain.tokens.tolist(), chain.parents.tolist()) == ([7, 8, 9], [-1, 0, 1])
    assert (chain.num_nodes, chain.num_speculative_tokens) == (3, 2)


@given(st.lists(st.integers(0, 10**6), min_size=0, max_size=150))
def test_masks_hold_exactly_the_path_to_the_root(draws):
    parents = np.array([-1, *(draw % (i + 1) for i, draw in enumerate(draws))], np.int32)
    mask, depth = ancestor_mask(parents), depths(parents)
    for node in range(len(parents)):
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = int(parents[at])
        bits = sum(int(word) << (64 * i) for i, word in enumerate(mask[node]))
        assert bits == sum(1 << i for i in path)
        assert depth[node] == len(path) - 1
