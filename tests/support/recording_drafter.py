"""A drafter that records another drafter's requests and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretoken.drafter import Drafter
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.target_weights import TargetWeights
from tests.references.eagle_tree import Shape


class Drawn(NamedTuple):
    """One row that wanted a draft. ``tokens``: its committed tokens, all of which were sent."""

    tokens: list[int]
    shape: Shape
    tree_tokens: list[int]
    tree_parents: list[int]
    scores: list[float]

    @property
    def is_drafted(self) -> bool:
        return len(self.tree_tokens) > 1


class RecordingDrafter:
    """A ``foretoken.drafter.Drafter`` around another.

    Attributes:
        drawn: rows that wanted a draft, in order, of sequences sent from the first token on.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._sent: dict[tuple[int, int], list[int]] = {}
        self.drawn: list[Drawn] = []

    @property
    def algorithm(self) -> str:
        return self._drafter.algorithm

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return self._drafter.needs(target)

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        self._sent.clear()
        self._drafter.attach(target, weights)

    def draft(self, request: DraftRequest) -> DraftBatch:
        batch = self._drafter.draft(request)
        for row in range(request.num_rows):
            key = (int(request.batch_slots[row]), int(request.generations[row]))
            sent = self._sent.setdefault(key, [])
            sent += request.new_tokens[request.new_token_starts[row] : request.new_token_starts[row + 1]].tolist()
            if request.max_nodes[row] > 1 and len(sent) == request.lengths[row]:
                tree = batch.tree(row)
                columns = (request.max_nodes, request.max_depths, request.max_branches)
                shape = Shape(*(int(column[row]) for column in columns))
                scores = np.asarray(batch.row_scores(row), np.float64).tolist()
                self.drawn.append(Drawn(list(sent), shape, tree.tokens.tolist(), tree.parents.tolist(), scores))
        return batch

    def release(self, batch_slots: Sequence[int]) -> None:
        self._drafter.release(batch_slots)

    def gauges(self) -> dict[str, float]:
        return self._drafter.gauges()
