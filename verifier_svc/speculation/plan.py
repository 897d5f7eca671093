"""What one row does in the next step: whom it asks for a draft, and for how much."""

from __future__ import annotations

from typing import NamedTuple

from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.scheduling.sequence import Sequence


class DraftPlan(NamedTuple):
    """The row asks these drafters for drafts of ``reach`` (TreeBounds).

    Attributes:
        most: drafted tokens at most.
        awaited: whether the answer is waited for.
        rate: tokens a second that the drafts promise, over plain decode's, where every row of the batch drafts like it.
    """

    sequence: Sequence
    drafters: list[DrafterHandle]
    reach: int
    most: int
    awaited: bool
    rate: float

    @property
    def key(self) -> tuple[int, int]:
        return self.sequence.slot, self.sequence.generation
