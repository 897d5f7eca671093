"""Trees with chances: how one is cut, and how several are merged."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.tree import DraftTree
from verifier_svc.scheduling.draft import Draft, merge

ROOT = 7


@st.composite
def drafts(draw: st.DrawFn, number: int = 1, max_nodes: int = 10) -> Draft:
    """Draw any tree, also with siblings of one token."""
    count = draw(st.integers(1, max_nodes))
    tokens = [ROOT, *draw(st.lists(st.integers(0, 3), min_size=count - 1, max_size=count - 1))]
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))]
    chances = [1.0]
    for parent in parents[1:]:
        chances.append(min(draw(st.floats(0, 1)), chances[parent]))
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))
    return Draft(tree, [0] + [number] * (count - 1), [0.0] * count, chances)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(draft.tree.parents.tolist()):
        before = found[parent] if parent >= 0 else ()
        found.append((*before, int(draft.tree.tokens[node])))
    return found


def is_sound(draft: Draft) -> bool:
    parents = draft.tree.parents.tolist()
    # A node's chance is never above its parent's.
    is_bounded = all(draft.chances[i] <= draft.chances[parents[i]] for i in range(1, len(parents)))
    is_valid = parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
    is_rooted = draft.tree.tokens[0] == ROOT and draft.sources[0] == 0 and draft.chances[0] == 1.0
    return is_valid and is_rooted and is_bounded


@given(drafts(), st.integers(0, 9))
def test_nodes_to_a_depth(draft: Draft, most: int) -> None:
    cut = draft.to_depth(most)
    assert is_sound(cut) and paths(cut) == [path for path in paths(draft) if len(path) - 1 <= most]


@given(drafts(), st.lists(st.integers(0, 3), max_size=5))
def test_the_path_that_a_text_takes(draft: Draft, tokens: list[int]) -> None:
    path, known = draft.along(tokens), paths(draft)
    assert [known[node] for node in path] == [(ROOT, *tokens[:level]) for level in range(1, len(path) + 1)]
    parents = draft.tree.parents.tolist()
    assert all(parents[node] == above for above, node in pairwise([0, *path]))
    last = path[-1] if path else 0
    after = [int(token) for token, parent in zip(draft.tree.tokens, parents, strict=True) if parent == last]
    assert len(path) == len(tokens) or tokens[len(path)] not in after


@given(drafts(), st.integers(1, 12))
def test_the_best_nodes_are_a_tree_of_the_likeliest(draft: Draft, count: int) -> None:
    best = draft.best(count)
    assert is_sound(best) and best.tree.num_nodes == min(count, draft.tree.num_nodes)
    wanted, left = paths(best), paths(draft)
    for path in wanted:
        assert path in left
        left.remove(path)


@given(drafts(number=1), drafts(number=2))
def test_merged_trees_have_each_path_once_with_its_best_chance(first: Draft, second: Draft) -> None:
    merged = merge([first, second])
    assert is_sound(merged)
    found = paths(merged)
    assert len(set(found)) == len(found) and set(found) == {*paths(first), *paths(second)}
    for node, path in enumerate(found[1:], start=1):
        proposed = [
            (draft.chances[i], draft.sources[i])
            for draft in (first, second)
            for i, other in enumerate(paths(draft))
            if other == path
        ]
        best = max(chance for chance, _ in proposed)
        assert merged.chances[node] == best and (best, merged.sources[node]) in proposed


def test_shares_name_each_drafter_and_the_depths_that_were_accepted() -> None:
    tree = DraftTree(np.array([ROOT, 1, 2, 3, 4], np.int32), np.array([-1, 0, 1, 0, 2], np.int32))
    draft = Draft(tree, [0, 2, 1, 2, 2], [0.0] * 5, [1.0] * 5)
    assert draft.shares([1, 2]) == ((1, 1, (2,)), (2, 3, (1,)))
    assert draft.shares([]) == ((1, 1, ()), (2, 3, ()))
