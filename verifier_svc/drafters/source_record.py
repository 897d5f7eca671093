"""What foretoken has learned of one source of drafts, whichever attachment it learned it from."""

from __future__ import annotations

from verifier_svc.drafters.acceptance_estimates import AcceptanceEstimates, AcceptanceRate
from verifier_svc.drafters.acceptance_watch import AcceptanceWatch
from verifier_svc.drafters.source import DraftSource
from verifier_svc.drafters.waits import DraftTimes, WaitBudget


class SourceRecord:
    """Figures of one source.

    They survive when it attaches again, and not when another source replaces it.

    Args:
        timeout_s: the longest wait for a draft.
        num_attaches_before, num_rejected_before: what earlier sources of the same name counted.
    """

    def __init__(
        self, source: DraftSource, timeout_s: float, *, num_attaches_before: int = 0, num_rejected_before: int = 0
    ) -> None:
        self.source = source
        self.estimates = AcceptanceEstimates()
        self.acceptance = AcceptanceRate()
        self.watch = AcceptanceWatch(source)
        self.times = DraftTimes()
        self.budget = WaitBudget(timeout_s)
        self._timeout_s = timeout_s
        self._num_attaches_before = num_attaches_before
        self._num_rejected_before = num_rejected_before

    @property
    def num_attaches(self) -> int:
        """Attachments of this source and of those before it."""
        return self._num_attaches_before + self.source.num_attaches

    @property
    def num_rejected(self) -> int:
        """Drafts that this source and those before it judged to be of no use."""
        return self._num_rejected_before + self.source.num_rejected

    def replaced_by(self, source: DraftSource) -> SourceRecord:
        """Return the record of the next source: its counts go on, the rest begins anew."""
        return SourceRecord(
            source,
            self._timeout_s,
            num_attaches_before=self.num_attaches,
            num_rejected_before=self.num_rejected,
        )
