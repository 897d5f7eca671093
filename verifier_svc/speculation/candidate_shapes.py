"""The shapes among which the controller chooses."""

from __future__ import annotations

from foretoken.drafting import TreeLimits
from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds

# Nodes of the trees, smallest first; bounds add a tree of their own size.
# Children of one node by the nodes.
TREE_NODES = (8, 16, 32)
BRANCHES = 2, 4, 8
# Levels of a small tree at most: with more of them it would be a chain.
SMALL_DEPTH = 5
# Most rows of a batch whose trees are larger than small. Up to there a row of the target's pass
# costs next to nothing on an H200. 16 trees of 32 nodes (512 rows) made 0.7 times the tokens of
# chains, and probes are dear too.
MOST_LARGE_TREE_ROWS = 256
# Rows of a sequence, on average, where a batch shares them; how many more one sequence may
# have; and the smallest such batch: in fewer sequences there is little to choose from, and
# a row costs next to nothing.
BUDGETS = range(2, 7)
MOST_OVER_BUDGET = 2
SHARED_FROM = 8


def chain(depth: int) -> Shape:
    """Return a chain of ``depth`` drafted tokens."""
    return Shape(depth + 1, depth, 1)


def is_chain(shape: Shape) -> bool:
    """Return whether every row of a batch verifies a chain of this length."""
    return shape.branches == 1 and shape.depth > 0 and shape.nodes > 1 and not shape.budget


def is_large_tree(shape: Shape) -> bool:
    """Return whether only small batches draft in this shape, where there is a choice."""
    return shape.branches > 1 and shape.nodes > TREE_NODES[0]


def suits(shape: Shape, batch: int) -> bool:
    """Return whether a batch of this size may draft in this shape, where there is a choice."""
    if shape.budget:
        return batch >= SHARED_FROM
    return not is_large_tree(shape) or batch * shape.nodes <= MOST_LARGE_TREE_ROWS


def candidate_shapes(bounds: TreeBounds) -> tuple[Shape, ...]:
    """Return no draft, the chains, and a few trees; of fixed bounds the one shape that they allow.

    Some chains come with a budget of fewer rows than they have nodes, too.
    """
    depth = bounds.max_depth
    if depth < 1:
        return (NO_DRAFT,)
    if bounds.is_fixed:
        return (bounds.of_row(True, depth, bounds.max_nodes - 1),)
    trees = []
    for nodes in sorted({*TREE_NODES, bounds.max_nodes}):
        levels = depth if nodes > TREE_NODES[0] else min(depth, SMALL_DEPTH)
        # A tree of no more nodes than its path is a chain.
        if bounds.branches > 1 and levels + 1 < nodes <= bounds.max_nodes:
            trees.append(Shape(nodes, levels, min(_branches(nodes), bounds.branches)))
    lengths = {budget: budget + MOST_OVER_BUDGET - 1 for budget in BUDGETS}
    shared = [chain(length)._replace(budget=budget) for budget, length in lengths.items() if length <= depth]
    return NO_DRAFT, *(chain(length) for length in range(1, depth + 1)), *shared, *trees


def usual_trees(bounds: TreeBounds) -> tuple[TreeLimits, ...]:
    """Return the trees for which a drafter may prepare: each candidate's, if it has one."""
    limits = (TreeLimits(shape.depth, shape.branches) for shape in candidate_shapes(bounds) if shape.nodes > 1)
    return tuple(dict.fromkeys(limits))


def _branches(nodes: int) -> int:
    """Return how many children a node of a tree of so many nodes may have."""
    return next((branches for most, branches in zip(TREE_NODES, BRANCHES, strict=True) if nodes <= most), BRANCHES[-1])
