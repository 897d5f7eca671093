"""Each step that cannot overlap with the host's work is counted under the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.drafting import TargetInfo
from foretoken.sampling import SpeculationOptions
from tests.support.engine_harness import TestSource
from tests.support.oracle_drafter import OracleDrafter
from tests.support.runs import BLOCK, NODES, VOCAB, Runs, greedy, oracle_of, plain
from tests.support.scripted_drafter import ScriptedDrafter

INFO = TargetInfo("hash", VOCAB, 400, 8, NODES, 8, 2, BLOCK, 400, "")
MERGED = SpeculationOptions(drafter="merge")


def counts(runs: Runs) -> dict[str, int]:
    return runs.harness.engine.counters.overlap_blocked_steps


def with_oracle(with_lookup: bool = False) -> tuple[Runs, OracleDrafter]:
    request = greedy(1, 6, 30, speculation=MERGED)
    oracle = oracle_of([request], plain([request]))
    others = [TestSource("lookup", ScriptedDrafter({}), INFO)] if with_lookup else []
    runs = Runs([oracle, *others])  # type: ignore[list-item]
    runs.harness.submit(request)
    return runs, oracle


def test_steps_that_overlap_are_not_counted() -> None:
    runs, _ = with_oracle()
    runs.harness.drain()
    assert runs.num_ahead > 5
    # A run ends with the last sequence.
    assert counts(runs) == {}


def test_several_drafters() -> None:
    runs, _ = with_oracle(with_lookup=True)
    runs.harness.drain()
    assert runs.num_ahead == 0 and set(counts(runs)) == {"several_drafters"}
    assert counts(runs)["several_drafters"] == runs.num_ordinary - 1, "after the last step nothing runs"


def test_a_lookup_drafter_alone() -> None:
    request = greedy(1, 6, 30, speculation=SpeculationOptions(drafter="lookup"))
    runs = Runs([TestSource("lookup", ScriptedDrafter({}), INFO)])  # type: ignore[list-item]
    runs.harness.run([request])
    assert runs.num_ahead == 0 and set(counts(runs)) == {"lookup_drafter"}


def test_what_the_host_must_see_between_two_steps() -> None:
    request = greedy(1, 6, 30)
    request = replace(request, sampling=replace(request.sampling, logprobs=1))
    runs = Runs()
    runs.harness.run([request])
    assert runs.num_ahead == 0 and set(counts(runs)) == {"not_steady"}


@pytest.mark.parametrize("reason", ["unanswered", "catching_up", "no_wait_budget"])
def test_a_drafter_that_is_not_ready(reason: str) -> None:
    runs, oracle = with_oracle()
    handle = runs.harness.speculator.drafters[0]
    assert handle.attachment is not None
    match reason:
        case "unanswered":
            oracle.is_idle = False
        case "catching_up":
            oracle.is_idle = False
            handle.attachment.leave_alone()
        case "no_wait_budget":
            handle.record.budget.spend(0.0, 1e9)
    for _ in range(3):
        runs.harness.step()
    assert runs.num_ahead == 0 and counts(runs) == {reason: 3}
    oracle.is_idle = True
    handle.record.budget.give_back(1e9)
    runs.harness.drain()
    assert runs.num_ahead > 5
