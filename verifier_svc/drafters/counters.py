"""Count a drafter's drafted and accepted tokens. The engine thread writes; any may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class DrafterCounters:
    """Counts of one drafter's trees and waits."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    # Requests that a step waited for, and the seconds of those waits.
    num_awaited: int = 0
    wait_seconds: float = 0.0

    def add(self, num_drafted: int, accepted_depths: Sequence[int], num_rows: int = 1) -> None:
        """Add a verified tree of each of ``num_rows`` rows.

        Args:
            num_drafted: nodes of this drafter.
            accepted_depths: the depths of the accepted ones.
        """
        self.num_drafts += num_rows
        self.num_draft_tokens += num_drafted * num_rows
        self.num_accepted_tokens += len(accepted_depths) * num_rows
        missing = max(accepted_depths, default=0) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(missing, 0))
        for depth in accepted_depths:
            self.accepted_per_position[depth - 1] += num_rows
