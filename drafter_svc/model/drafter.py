"""What all drafters with a model do alike once they are attached."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.trees.passes import DraftPasses
from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.resident import ResidentMemory, StreamOrder


class ModelDrafter:
    """The half of a ``foretoken.drafter.Drafter`` that ``attach`` of a subclass sets up with ``_begin``."""

    def __init__(self) -> None:
        self._passes: DraftPasses | None = None

    def _begin(self, passes: DraftPasses) -> None:
        """Go on with no sequence."""
        self._passes = passes

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Write the entries of the new tokens, as far as a request goes, then propose a tree for each row."""
        assert self._passes is not None, "not attached"
        return self._passes.draft(request)

    def set_resident(self, memory: ResidentMemory, order: StreamOrder) -> None:
        """As DraftsResident's. Raises PreconditionError for a drafter that its needs name no device of, or memory that
        is not of its attachment's sizes."""
        assert self._passes is not None, "not attached"
        self._passes.set_resident(memory, order)

    def release(self, slots: Sequence[int]) -> None:
        if self._passes is not None:
            self._passes.release(slots)

    def gauges(self) -> dict[str, float]:
        return {} if self._passes is None else self._passes.figures.gauges()
