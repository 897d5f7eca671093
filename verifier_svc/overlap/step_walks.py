"""Count the walks of an overlapped step, and teach the drafter's figures by them."""

from __future__ import annotations

from dataclasses import dataclass

from verifier_svc.drafters.request import Shape
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.speculation.overlap_drafting import OverlapDrafting


@dataclass(slots=True)
class _EqualWalks:
    """The rows of one step with trees of one size and as many matched nodes, and their share."""

    shares: tuple[DrafterShare]
    num_rows: int = 0


class StepWalks:
    """The walks of the step that is being read. Only the engine thread uses it."""

    def __init__(self, drafting: OverlapDrafting) -> None:
        self._drafting = drafting
        # By nodes of the tree and matched ones.
        self._walks: dict[tuple[int, int], _EqualWalks] = {}

    def observe(self, num_nodes: int, num_matched: int, *, got_no_row: bool) -> tuple[DrafterShare, ...]:
        """Count one walk of a sequence that is drafted for; return the drafter's share.

        ``got_no_row``: whether the sequence's draft was there, but the batch's rows went to others.
        """
        if num_nodes <= 1 and not got_no_row:
            return ()
        walks = self._walks.get((num_nodes, num_matched))
        if walks is None:
            share = DrafterShare(self._drafting.drafter_number, num_nodes - 1, tuple(range(1, num_matched + 1)))
            walks = self._walks[num_nodes, num_matched] = _EqualWalks((share,))
        walks.num_rows += 1
        return walks.shares if num_nodes > 1 else ()

    def learn(self, shape: Shape) -> None:
        """Learn from the walks of one step, which were counted. ``shape``: of its trees."""
        drafter, controller = self._drafting.drafter, self._drafting.controller
        if drafter is None:
            return
        for (num_nodes, num_matched), walks in self._walks.items():
            (share,), num_rows = walks.shares, walks.num_rows
            depth = min(shape.depth, num_nodes - 1)
            if depth > 0:
                drafter.counters.add(share.num_drafted, share.accepted_depths, num_rows)
                drafter.record.acceptance.observe(num_matched, depth, num_rows)
                drafter.record.watch.observe(num_matched, num_rows)
            if controller is not None:
                levels = shape.depth if shape.budget else depth
                controller.observe_walk(shape, num_matched, levels, num_rows)
        self._walks = {}
