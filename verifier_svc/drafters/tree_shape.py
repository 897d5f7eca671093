"""Which shapes trees may have: what the flags say, and what follows from it for one row."""

from __future__ import annotations

from dataclasses import dataclass

from verifier_svc.drafters.request import Shape

# Where the flags are silent: levels of a tree at most, and children of a node.
DEFAULT_STEPS = 5
DEFAULT_BRANCHES = 4


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of all trees.

    A row's *reach* is one number from 1 up, by which the policy chooses: drafted tokens of a drafter that has no
    model, levels of the tree of one that has.

    Attributes:
        max_nodes: of one tree, the root counted.
        num_steps: levels; 0: as many as pay, up to DEFAULT_STEPS.
        branches: children of one node.
    """

    max_nodes: int
    num_steps: int = 0
    branches: int = DEFAULT_BRANCHES

    @property
    def is_fixed(self) -> bool:
        """Whether trees are drafted and verified as the flags say, whatever a smaller one, or none, would save."""
        return self.num_steps > 0

    @property
    def max_depth(self) -> int:
        """Levels of a tree at most, of drafters that have a model."""
        return min(self.num_steps or DEFAULT_STEPS, self.max_nodes - 1)

    def most_reach(self, has_model: bool) -> int:
        """Beyond which no more tokens can be accepted."""
        return self.max_depth if has_model else self.max_nodes - 1

    def of_row(self, has_model: bool, reach: int, most: int) -> Shape:
        """The shape of one row's tree with at most ``most`` drafted tokens."""
        if not has_model:
            return Shape(1 + min(reach, most), min(reach, most), self.max_nodes)
        depth = self.max_depth if self.is_fixed else min(reach, self.max_depth)
        nodes = self.max_nodes if self.is_fixed else min(self.max_nodes, 1 + depth * min(self.branches, 2))
        return Shape(min(nodes, 1 + most), min(depth, most), self.branches)
