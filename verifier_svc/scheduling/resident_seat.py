"""Hold a sequence's batch row (its seat) in a run of overlapped steps (verifier_svc.overlap)."""

from __future__ import annotations

from typing import NamedTuple

from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.scheduling.sequence import Sequence

# Most steps that are launched and not yet read: one runs, the next one waits for it.
MAX_IN_FLIGHT = 2


class Seat(NamedTuple):
    """One sequence's batch row for a whole run.

    Attributes:
        sequence: a sequence that decodes.
        width: most nodes of its trees, including the root.
        tree: the first step's tree. None: the root alone.
        number: the drafter's number, which marks drafted tokens in ``WalkResult.sources``.
    """

    sequence: Sequence
    width: int
    tree: DraftTree | None
    number: int

    @property
    def is_left(self) -> bool:
        """Return whether the sequence has ended and given up its blocks."""
        return self.sequence.table is None


class SeatResult(NamedTuple):
    """A step's result for one seat.

    ``num_nodes``: nodes of the verified tree, including the root; 0 if the seat was left.
    """

    walk: WalkResult
    num_nodes: int
