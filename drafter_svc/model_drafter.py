"""What all drafters with a model do alike once they are attached."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.draft_passes import DraftPasses
from drafter_svc.draft_rows import DraftRows
from foretoken.drafting import DraftBatch, DraftRequest


class ModelDrafter:
    """The half of a ``foretoken.drafting.Drafter`` that ``attach`` of a subclass sets up with ``_begin``."""

    def __init__(self) -> None:
        self._rows: DraftRows | None = None
        self._passes: DraftPasses | None = None

    def _begin(self, rows: DraftRows, passes: DraftPasses) -> None:
        """Go on with no sequence: ``passes`` keeps its entries in ``rows``."""
        self._rows, self._passes = rows, passes

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Write the entries of the new tokens, as far as a request goes, then propose a tree for each row."""
        assert self._passes is not None, "not attached"
        return self._passes.draft(request)

    def release(self, slots: Sequence[int]) -> None:
        if self._rows is not None:
            for slot in slots:
                self._rows.release(slot)

    def gauges(self) -> dict[str, float]:
        return {} if self._passes is None else self._passes.figures.gauges()
