"""Notice that a drafter's drafts are no longer accepted, or never were.

A draft counts as a hit if at least one of its tokens was accepted. Unlike accepted tokens per
drafted token, the share of hits hardly depends on the shapes that the controller or the gate
chooses.
"""

from __future__ import annotations

import logging
from typing import Protocol

from foretoken.drafting import DrafterNeeds

logger = logging.getLogger(__name__)

# Drafts that are judged together.
WINDOW_DRAFTS = 200
# A smaller share of hits is as good as none: even a free drafter gains 5% at most.
MIN_SHARE = 0.05
# Of the usual share: less is low, and so much ends it.
LOW_FACTOR, RECOVERED_FACTOR = 0.5, 0.75
# Windows after which the usual share is known, and those that it is a mean of.
NUM_USUAL_WINDOWS, MEMORY_WINDOWS = 5, 20

_CAUSE_OF_HEAD = "the head was trained for another target, another fine-tune of it or another chat template"
_CAUSE_OF_MODEL = "the draft model is of another family, or follows another chat template"
_CAUSE_OF_LOOKUP = "the text hardly repeats what was written before"
_CAUSE_OF_CHANGE = "requests have changed: other texts, another language or template"
_CAUSE_OF_SAMPLING = "a high temperature"


class WatchedDrafter(Protocol):
    """What a warning says of a drafter."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> DrafterNeeds: ...


class AcceptanceWatch:
    """Log one line when the share of hits of a drafter becomes low, and one when it recovers.

    Used by the engine thread; any thread may read its public attributes.
    """

    def __init__(self, drafter: WatchedDrafter) -> None:
        self._drafter = drafter
        self.is_low = False
        # In the window so far.
        self.num_drafts = self._num_hits = 0
        # Mean share of hits in windows that were not low, and how many it stands for.
        self._usual_share, self._num_usual = 0.0, 0

    def observe(self, num_accepted: int, num_drafts: int = 1) -> None:
        """Count verified drafts, each with ``num_accepted`` accepted tokens."""
        self.num_drafts += num_drafts
        if num_accepted:
            self._num_hits += num_drafts
        if self.num_drafts >= WINDOW_DRAFTS:
            self._end_window()

    def _end_window(self) -> None:
        num_drafts, num_hits = self.num_drafts, self._num_hits
        self.num_drafts = self._num_hits = 0
        share = num_hits / num_drafts
        usual = self._usual_share if self._num_usual >= NUM_USUAL_WINDOWS else 0.0
        if self.is_low:
            if share < max(2 * MIN_SHARE, RECOVERED_FACTOR * usual):
                return
            self.is_low = False
            logger.warning(
                "drafter %s: drafts are accepted again: %d of the last %d hit",
                *(self._drafter.name, num_hits, num_drafts),
            )
        elif share < max(MIN_SHARE, LOW_FACTOR * usual):
            self.is_low = True
            logger.warning(
                "drafter %s: speculation hardly works: %d of its last %d drafts hit%s; likely causes: %s",
                *(self._drafter.name, num_hits, num_drafts, f", usually {usual:.0%}" if usual else ""),
                self._causes(has_worked=usual > 0.0),
            )
            return
        self._num_usual = min(self._num_usual + 1, MEMORY_WINDOWS)
        self._usual_share += (share - self._usual_share) / self._num_usual

    def _causes(self, *, has_worked: bool) -> str:
        needs = self._drafter.needs
        kind = _CAUSE_OF_HEAD if needs.captured_layers else _CAUSE_OF_MODEL if needs.blocks else _CAUSE_OF_LOOKUP
        return "; ".join((_CAUSE_OF_CHANGE, kind) if has_worked else (kind,)) + f"; {_CAUSE_OF_SAMPLING}"
