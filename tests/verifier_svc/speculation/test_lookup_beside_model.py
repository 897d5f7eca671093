"""A look-up drafter beside a model is asked in small batches only: it must see each step's tokens."""

from __future__ import annotations

import pytest

from foretoken.drafting import TargetInfo
from tests.support.engine_harness import TestSource
from tests.support.runs import BLOCK, NODES, VOCAB, Runs, greedy, oracle_of, plain
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.speculation.overlap_policy import MOST_WITH_LOOKUP

INFO = TargetInfo("hash", VOCAB, 400, 8, NODES, 8, 2, BLOCK, 400, "")


@pytest.mark.parametrize("num_requests", [2, MOST_WITH_LOOKUP + 1])
def test_a_large_batch_does_not_wait_for_a_lookup_drafter(num_requests: int) -> None:
    requests = [greedy(i, 6, 150) for i in range(num_requests)]
    expected = plain(requests)
    outputs = {(tuple(r.prompt), 0): e.token_ids for r, e in zip(requests, expected, strict=True)}
    lookup = TestSource("lookup", ScriptedDrafter(outputs), INFO)
    runs = Runs([oracle_of(requests, expected), lookup])  # type: ignore[list-item]
    results = runs.harness.run(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    is_large = num_requests > MOST_WITH_LOOKUP
    blocked = runs.harness.engine.counters.overlap_blocked_steps
    assert bool(blocked) != is_large
    drafted = {drafter.name: drafter.counters.num_drafts for drafter in runs.harness.speculator.drafters}
    assert drafted["oracle"] > 0 and (drafted["lookup"] == 0) == is_large
