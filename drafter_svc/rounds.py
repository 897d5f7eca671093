"""Count what a drafter does for each sequence, for spans.

A request has hundreds of rounds, so each sequence has one span, and a round has none.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from foretoken.drafting import DraftRequest


class SequenceRounds(NamedTuple):
    """What a drafter did for one sequence while that had its batch slot.

    Attributes:
        began_ns, ended_ns: begin of the first request and end of the last, as time.time_ns().
        num_rounds: requests that wanted a tree for it.
        num_tokens: tokens that the requests carried of it.
        busy_s: seconds of work on requests that had a row of it, whatever other rows they had.
    """

    began_ns: int
    ended_ns: int
    num_rounds: int
    num_tokens: int
    busy_s: float


_COUNTS = np.dtype(
    [
        ("generation", np.int64),
        ("began_ns", np.int64),
        ("ended_ns", np.int64),
        ("num_rounds", np.int64),
        ("num_tokens", np.int64),
        ("busy_s", np.float64),
    ]
)
# No sequence has it.
_NONE = -1


class RoundCounts:
    """The counts of one attachment, by batch slot. Only the drafter's thread uses it."""

    def __init__(self, max_batch_slots: int) -> None:
        self._counts = np.zeros(max_batch_slots, _COUNTS)
        self._counts["generation"] = _NONE
        # Sequences that lost their batch slot and are not taken yet, oldest first; at
        # most as many as there are batch slots.
        self._former: OrderedDict[tuple[int, int], SequenceRounds] = OrderedDict()

    def count(self, request: DraftRequest, began_ns: int, ended_ns: int) -> None:
        """Count a request that was answered. Times are as of time.time_ns()."""
        rows = np.flatnonzero(request.batch_slots >= 0)
        # A batch slot's ended sequence may have a row before the row of its new one.
        _, first = np.unique(request.batch_slots[rows], return_index=True)
        self._add(request, rows[np.sort(first)], began_ns, ended_ns)
        if len(first) < len(rows):
            self._add(request, np.delete(rows, first), began_ns, ended_ns)

    def take(self, batch_slot: int, generation: int) -> SequenceRounds | None:
        """Return a sequence's counts and forget them; None if there are none."""
        if batch_slot < len(self._counts) and self._counts[batch_slot]["generation"] == generation:
            found = self._rounds(batch_slot)
            self._counts[batch_slot]["generation"] = _NONE
            return found
        return self._former.pop((batch_slot, generation), None)

    def _add(self, request: DraftRequest, rows: np.ndarray, began_ns: int, ended_ns: int) -> None:
        batch_slots, generations = request.batch_slots[rows], request.generations[rows]
        counts = self._counts
        for batch_slot, generation in zip(batch_slots.tolist(), generations.tolist(), strict=True):
            if counts[batch_slot]["generation"] != generation:
                self._retire(batch_slot)
                counts[batch_slot] = (generation, began_ns, ended_ns, 0, 0, 0.0)
        counts["ended_ns"][batch_slots] = ended_ns
        counts["num_rounds"][batch_slots] += request.max_nodes[rows] > 1
        counts["num_tokens"][batch_slots] += np.diff(request.new_token_starts)[rows]
        counts["busy_s"][batch_slots] += (ended_ns - began_ns) / 1e9

    def _retire(self, batch_slot: int) -> None:
        generation = int(self._counts[batch_slot]["generation"])
        if generation != _NONE:
            self._former[batch_slot, generation] = self._rounds(batch_slot)
            if len(self._former) > len(self._counts):
                self._former.popitem(last=False)

    def _rounds(self, batch_slot: int) -> SequenceRounds:
        return SequenceRounds(*self._counts[batch_slot].item()[1:])
