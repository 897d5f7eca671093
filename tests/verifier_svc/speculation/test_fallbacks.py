"""Each decode step without a draft says why, in the
request's figures and in the engine's counters.
"""

from __future__ import annotations

from pathlib import Path

from foretoken.drafting import TargetInfo
from foretoken.results import FallbackReason, SpeculationStats
from foretoken.sampling import SpeculationOptions
from tests.support.engine_harness import TestSource
from tests.support.runs import BLOCK, NODES, VOCAB, Runs, choose, greedy, oracle_of, plain
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.drafters.request import NO_DRAFT

INFO = TargetInfo("hash", VOCAB, 400, 8, NODES, 8, 2, BLOCK, 400, "")


def stats_of(runs: Runs, *requests: object) -> SpeculationStats:
    """Return the figures of all these requests, after the
    engine's counters were held against them.
    """
    results = runs.harness.run(list(requests))  # type: ignore[arg-type]
    stats = SpeculationStats.sum([result.finished.speculation for result in results if result.finished])
    counted = {reason.value: count for reason, count in runs.harness.engine.counters.fallback_steps.items()}
    assert counted == dict(stats.fallback_reasons)
    assert sum(stats.fallback_reasons.values()) == stats.fallback_steps
    assert stats.num_decode_steps == stats.num_spec_steps + stats.fallback_steps
    return stats


def test_the_last_token_needs_no_draft() -> None:
    request = greedy(1, 30, 40)
    runs = Runs([oracle_of([request], plain([request]))])
    assert stats_of(runs, request).fallback_reasons == {"last_token": 1}


def test_a_request_that_wants_no_drafts_has_no_reasons() -> None:
    request = greedy(1, 6, 30, speculation=SpeculationOptions(enabled=False))
    runs = Runs([oracle_of([request], plain([request]))])
    assert runs.harness.run([request])[0].finished is not None
    assert runs.harness.engine.counters.fallback_steps == {}


def test_a_large_batch() -> None:
    requests = [greedy(number, 6, 20) for number in range(1, 5)]
    runs = Runs([oracle_of(requests, plain(requests))], max_batch_size=2)
    assert stats_of(runs, *requests).fallback_reasons["batch_limit"] > 40


def test_a_drafter_that_is_not_attached() -> None:
    request = greedy(1, 6, 30)
    oracle = oracle_of([request], plain([request]))
    runs = Runs([oracle])
    runs.harness.speculator.drafters[0].detach()
    assert set(stats_of(runs, request).fallback_reasons) == {"no_drafter"}


def test_drafts_that_do_not_pay() -> None:
    request = greedy(1, 6, 60)
    runs = Runs([oracle_of([request], plain([request]))])
    choose(runs, lambda number: NO_DRAFT)
    reasons = stats_of(runs, request).fallback_reasons
    assert reasons["drafts_do_not_pay"] > 50 and set(reasons) <= {"drafts_do_not_pay", "last_token"}


def test_a_lookup_drafter_that_finds_nothing() -> None:
    request = greedy(1, 6, 60)
    runs = Runs([TestSource("lookup", ScriptedDrafter({}), INFO)])  # type: ignore[list-item]
    reasons = stats_of(runs, request).fallback_reasons
    assert reasons["nothing_found"] > 40
    assert set(reasons) <= {"nothing_found", "first_step", "last_token"}


def test_trees_that_do_not_come() -> None:
    request = greedy(1, 6, 40)
    oracle = oracle_of([request], plain([request]), spoil=lambda number: number % 3 == 2)
    runs = Runs([oracle], timeout_s=0.05)
    assert stats_of(runs, request).fallback_reasons["no_draft_in_time"] > 0


def test_every_reason_has_a_line_in_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    assert [reason for reason in FallbackReason if f"`{reason.value}`" not in text] == []
