"""What decides which CUDA graphs a draft request needs: the first one of a kind waits until they are captured."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from foretoken.models.device_batch import bucket, seq_bucket
from verifier_svc.draft_row import Row


class RequestKind(NamedTuple):
    """Sizes as they are captured, so that there are few kinds.

    Attributes:
        rows: of the request.
        trees: rows that want more than their root.
        tokens, longest: new ones, of all rows and of one at most.
        depth, branches: of the largest tree.
        is_resident: whether the tokens were in device memory.
    """

    rows: int
    trees: int
    tokens: int
    longest: int
    depth: int
    branches: int
    is_resident: bool

    @staticmethod
    def of(rows: Items[Row], *, is_resident: bool) -> RequestKind:
        counts = [len(row.new_tokens) for row in rows]
        shapes = [row.shape for row in rows if row.shape.nodes > 1]
        return RequestKind(
            seq_bucket(len(rows)),
            bucket(len(shapes)),
            bucket(sum(counts)),
            seq_bucket(max(counts, default=0)),
            max((shape.depth for shape in shapes), default=0),
            max((seq_bucket(shape.branches) for shape in shapes), default=0),
            is_resident,
        )
