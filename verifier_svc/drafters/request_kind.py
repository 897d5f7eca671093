"""What decides which CUDA graphs a draft request needs: the first one of a kind waits until they are captured."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from foretoken.models.device_batch import bucket, seq_bucket
from foretoken.sampling import SamplingParams
from verifier_svc.drafters.request import Row


class RequestKind(NamedTuple):
    """Sizes as they are captured, so that there are few kinds.

    Attributes:
        rows: of the request.
        trees: rows that want more than their root.
        tokens, longest: new ones, of all rows and of one at most.
        depth, branches: of the largest tree.
        is_filtered: whether a tree's candidates are cut by top-k, top-p or min-p.
        is_resident: whether the tokens were in device memory.
    """

    rows: int
    trees: int
    tokens: int
    longest: int
    depth: int
    branches: int
    is_filtered: bool
    is_resident: bool

    @staticmethod
    def of(rows: Items[Row], *, is_resident: bool) -> RequestKind:
        # In device memory each row has room for the most of a step.
        counts = [] if is_resident else [len(row.new_tokens) for row in rows]
        shapes = [row.shape for row in rows if row.shape.nodes > 1]
        return RequestKind(
            seq_bucket(len(rows)),
            bucket(len(shapes)),
            bucket(sum(counts)),
            seq_bucket(max(counts, default=0)),
            max((shape.depth for shape in shapes), default=0),
            max((seq_bucket(shape.branches) for shape in shapes), default=0),
            any(_is_filtered(row.sequence.sampling) for row in rows if row.shape.nodes > 1),
            is_resident,
        )


def _is_filtered(sampling: SamplingParams) -> bool:
    has_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return has_cut and sampling.temperature > 0
