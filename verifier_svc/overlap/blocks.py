"""Reserve blocks for overlapped steps: as many as steps in flight and the next one may need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.lookups import Lookups
from verifier_svc.speculation.overlap_drafting import OverlapDrafting

if TYPE_CHECKING:
    from verifier_svc.overlap.step import OverlappedStep

# Tokens to reserve blocks for in advance, so that block tables change rarely.
_TOKENS_AHEAD = 64


class OverlapBlocks:
    """The reserved blocks of one run. Only the engine thread uses it."""

    def __init__(self, step: OverlappedStep, drafting: OverlapDrafting, scheduler: Scheduler, lookups: Lookups) -> None:
        self._step, self._drafting = step, drafting
        self._scheduler, self._lookups = scheduler, lookups
        # The trees' shape for which blocks were reserved.
        self._shape = drafting.shape

    def reserve(self) -> bool:
        """Reserve blocks for one more step of each batch row, whatever steps in flight emit.

        Returns False if there are too few.
        """
        shape = self._drafting.shape
        is_same, self._shape = shape == self._shape, shape
        for row in self._step.batch_rows.rows:
            if row is None or (is_same and len(row.sequence.tokens) <= row.enough_until):
                continue
            if not self.reserve_for(row.sequence):
                return False
            row.enough_until = self._enough_until(row.sequence)
        return True

    def reserve_for(self, sequence: Sequence) -> bool:
        """Reserve blocks for one more step of a sequence. Return False if there are too few."""
        # One KV slot more: a drafter stores the next root's KV entry before the target does.
        width = self._most_nodes(sequence)
        most = sequence.max_len + width + 1
        in_flight = len(self._step.in_flight) * self._most_tokens(sequence)
        least = min(len(sequence.tokens) + in_flight + width + 1, most)
        if self._scheduler.has_reserved(sequence, least):
            return True
        return self._scheduler.reserve_ahead(sequence, least, min(least + _TOKENS_AHEAD, most))

    def _enough_until(self, sequence: Sequence) -> int:
        """Return up to how many tokens a sequence needs no more blocks, whatever is in flight."""
        width = self._most_nodes(sequence)
        if self._scheduler.has_reserved(sequence, sequence.max_len + width + 1):
            return sequence.max_len
        num_kv_slots = len(sequence.block_ids) * self._scheduler.blocks.block_size
        return num_kv_slots - MAX_IN_FLIGHT * self._most_tokens(sequence) - width - 1

    def _most_nodes(self, sequence: Sequence) -> int:
        """Return the most nodes of a sequence's next tree, whoever drafts it."""
        return max(self._drafting.shape_of(sequence).nodes, self._lookups.most_nodes(sequence))

    def _most_tokens(self, sequence: Sequence) -> int:
        """Return the most tokens that a step of this run commits for a sequence."""
        has_drafts = self._drafting.drafter is not None or self._lookups.most_nodes(sequence) > 1
        return self._step.max_tokens if has_drafts else 1
