"""The rows of a step by batch rows, with trees from the host and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from verifier_svc.overlap.batch_rows import OverlapBatchRows
from verifier_svc.scheduling.batch_row import BatchRow
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence


def found(num_nodes: int) -> Draft:
    """Return a chain from the host."""
    return Draft(DraftTree.chain([0] * num_nodes), [0] * num_nodes, [0.5] * num_nodes, [0.5] * num_nodes)


@pytest.mark.parametrize(
    ("budget", "nodes", "rows"), [(0, {}, 10), (0, {0: 3, 1: 7}, 13), (2, {}, 5), (2, {0: 3, 2: 6}, 13)]
)
def test_rows_are_counted_as_a_step_divides_them(budget: int, nodes: dict[int, int], rows: int) -> None:
    """Batch rows with a tree from the host share no rows, be it smaller than the drafter's."""
    batch_rows = OverlapBatchRows(4, torch.device("cpu"))
    for index, width in enumerate((5, 4, 1)):
        sequence = cast(Sequence, SimpleNamespace(sampling=SamplingParams(), block_ids=[index]))
        batch_rows.join(index, BatchRow(sequence, width, 1, is_new=False))
    batch_rows.share_rows(budget)
    drafts = {index: found(num_nodes) for index, num_nodes in nodes.items()}
    assert batch_rows.needs(drafts).num_rows == rows
    taken = [batch_row for batch_row in batch_rows.rows if batch_row is not None]
    added = [taken[index].num_added_rows(draft, budget) for index, draft in drafts.items()]
    assert sum(batch_row.num_rows(budget) for batch_row in taken) + sum(added) == rows
