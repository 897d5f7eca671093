"""The part that all drafters with a model share: what they do once they are attached."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.trees.passes import DraftPasses
from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.overlap_memory import OverlapMemory, StreamOrder


class ModelDrafter:
    """Base of a ``foretoken.drafter.Drafter``. A subclass's ``attach`` calls ``_begin``."""

    def __init__(self) -> None:
        self._passes: DraftPasses | None = None

    def _begin(self, passes: DraftPasses) -> None:
        """Use these passes from now on; they know no sequence yet."""
        self._passes = passes

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Write KV entries of the new tokens, within a budget, and propose a tree for each row."""
        assert self._passes is not None, "not attached"
        return self._passes.draft(request)

    def set_overlap_memory(self, memory: OverlapMemory, order: StreamOrder) -> None:
        """Draft from this memory on request, as DraftsOverlapped says.

        Raises PreconditionError for a drafter on the CPU, or memory of other sizes than the
        target's.
        """
        assert self._passes is not None, "not attached"
        self._passes.set_overlap_memory(memory, order)

    @property
    def is_prepared(self) -> bool:
        """Return whether ``prepare`` has nothing left to do."""
        return self._passes is None or self._passes.is_prepared

    def prepare(self) -> bool:
        """Prepare as DraftsOverlapped says."""
        return self._passes is not None and self._passes.prepare()

    def release(self, batch_slots: Sequence[int]) -> None:
        if self._passes is not None:
            self._passes.release(batch_slots)

    def gauges(self) -> dict[str, float]:
        return {} if self._passes is None else self._passes.figures.gauges()
