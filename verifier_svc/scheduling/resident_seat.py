"""A sequence's place in a run of steps that run ahead of the host (verifier_svc.overlap)."""

from __future__ import annotations

from typing import NamedTuple

from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.scheduling.sequence import Sequence

# Steps that are launched and not yet read: one runs, the next one waits for it.
MAX_IN_FLIGHT = 2


class Seat(NamedTuple):
    """Who sits down for a run.

    Attributes:
        sequence: in a decode step.
        width: nodes of its trees at most, the root counted.
        tree: for the first step; None: the root alone.
        number: of the drafter, which stands in the sources of what was drafted.
    """

    sequence: Sequence
    width: int
    tree: DraftTree | None
    number: int

    @property
    def is_left(self) -> bool:
        """Whether its sequence has ended, so that its blocks are others'."""
        return self.sequence.table is None


class SeatResult(NamedTuple):
    """What a step came to for one seat. ``num_nodes``: of the tree that was verified; 0: nobody sat there."""

    walk: WalkResult
    num_nodes: int
