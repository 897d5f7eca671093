"""What one row asks of drafters for the next step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.scheduling.sequence import Sequence


class DraftPlan(NamedTuple):
    """The row asks these drafters for drafts of ``reach`` (TreeBounds).

    Attributes:
        most: the most drafted tokens.
        awaited: whether the step waits for the answer.
        bounds: of the row's trees.
        rate: the speed over plain decode that the drafts promise if every row of the batch drafts
            like this one; 1 where plain decode is faster.
    """

    sequence: Sequence
    drafters: Items[DrafterHandle]
    reach: int
    most: int
    awaited: bool
    bounds: TreeBounds
    rate: float

    @property
    def is_probe(self) -> bool:
        """Return whether the drafts promise no gain: they show whether they would."""
        return self.rate <= 1.0

    @property
    def key(self) -> tuple[int, int]:
        return self.sequence.batch_slot, self.sequence.generation
