"""A drafter that the project does not know: this file, and one row in the table of algorithms.

The row is in toy_foretoken.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from foretoken.config import Settings
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.target_weights import TargetWeights

if TYPE_CHECKING:
    # It imports this file for the flags.
    from drafter_svc.config import DrafterSettings


class ToySettings(Settings):
    """The toy's own flags."""

    reach: int = Field(default=8, ge=1, le=4096, description="Tokens that are searched for the last one.")


class ToyDrafter:
    """Drafts what followed the last token when it last came, within ``reach`` tokens."""

    algorithm = "TOY"

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._texts: dict[int, tuple[int, list[int]]] = {}

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        self._texts.clear()

    def draft(self, request: DraftRequest) -> DraftBatch:
        chains = [self._chain(request, row) for row in range(request.num_rows)]
        return DraftBatch(
            request.epoch,
            request.step_id,
            np.cumsum([0, *map(len, chains)]).astype(np.int32),
            np.array([token for chain in chains for token in chain], np.int32),
            np.array([node - 1 for chain in chains for node in range(len(chain))], np.int32),
            np.zeros(sum(map(len, chains)), np.float32),
        )

    def release(self, batch_slots: Sequence[int]) -> None:
        for batch_slot in batch_slots:
            self._texts.pop(int(batch_slot), None)

    def gauges(self) -> dict[str, float]:
        return {"toy_reach": float(self._reach)}

    def _chain(self, request: DraftRequest, row: int) -> list[int]:
        """Return the row's tree: its root, and the drafted tokens in a chain."""
        batch_slot, generation = int(request.batch_slots[row]), int(request.generations[row])
        known, text = self._texts.get(batch_slot, (generation, []))
        new = request.new_tokens[request.new_token_starts[row] : request.new_token_starts[row + 1]].tolist()
        text = (text if known == generation else []) + new
        self._texts[batch_slot] = generation, text
        if not text:
            return [0]
        root, most = text[-1], min(int(request.max_nodes[row]), int(request.max_depths[row]) + 1)
        for place in range(len(text) - 2, max(len(text) - 2 - self._reach, -1), -1):
            if text[place] == root:
                return text[place : place + max(most, 1)]
        return [root]


def make_drafter(settings: DrafterSettings) -> ToyDrafter:
    return ToyDrafter(settings.options["toy"].reach)
