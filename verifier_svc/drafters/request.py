"""One row of a draft request: which tree is wanted for a sequence, and what its drafter has not been told yet."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from foretoken.drafting import ROW_DTYPE, DraftRequest, starts_of
from foretoken.sampling import MIN_TEMPERATURE
from verifier_svc.scheduling.hidden_states import FeatureRows, joined
from verifier_svc.scheduling.sequence import Sequence

_NO_HIDDEN = np.zeros((0, 0), np.float32)


class Shape(NamedTuple):
    """Of a tree: nodes at most with the root, edges from the root, children of one node."""

    nodes: int
    depth: int
    branches: int


NO_DRAFT = Shape(1, 1, 1)


class Row(NamedTuple):
    """One row of a request with all that it says: its sequence may have ended or moved when the reply comes."""

    sequence: Sequence
    slot: int
    generation: int
    length: int
    new_tokens: list[int]
    hidden: list[FeatureRows]
    block_ids: list[int]
    prediction: tuple[int, ...]
    shape: Shape
    # Whether the answer is worth waiting for.
    awaited: bool

    @property
    def root(self) -> int:
        return self.new_tokens[-1]

    @property
    def has_ended(self) -> bool:
        """Whether its sequence has given its slot back."""
        return (self.sequence.slot, self.sequence.generation) != (self.slot, self.generation)


def request_of(epoch: int, step_id: int, rows: Items[Row]) -> DraftRequest:
    """The request with these rows."""
    hidden = [part.values() for row in rows for part in row.hidden]
    return DraftRequest(
        epoch,
        step_id,
        rows=np.array([_record(row) for row in rows], ROW_DTYPE),
        starts=starts_of(
            [len(row.new_tokens) for row in rows],
            [sum(map(len, row.hidden)) for row in rows],
            [len(row.block_ids) for row in rows],
            [len(row.prediction) for row in rows],
        ),
        new_tokens=np.array([token for row in rows for token in row.new_tokens], np.int32),
        hidden=joined(hidden) if hidden else _NO_HIDDEN,
        block_ids=np.array([block for row in rows for block in row.block_ids], np.int32),
        prediction=np.array([token for row in rows for token in row.prediction], np.int32),
    )


def _record(row: Row) -> tuple[float, ...]:
    """What ROW_DTYPE holds, in its order."""
    sequence, shape = row.sequence, row.shape
    params = sequence.sampling
    return (
        sequence.salt_digest,
        params.seed % 2**64,
        row.slot,
        row.generation,
        row.length,
        sequence.num_prompt_tokens,
        shape.nodes,
        shape.depth,
        shape.branches,
        sequence.choice_index,
        max(params.top_k, 0),
        params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
        params.top_p,
        params.min_p,
    )
