"""Each step that cannot overlap with the host's work is counted under the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foretoken.drafting import TargetInfo
from foretoken.sampling import SpeculationOptions
from tests.support.engine_harness import TestSource, assert_bits
from tests.support.oracle_drafter import OracleDrafter
from tests.support.runs import BLOCK, NODES, VOCAB, Runs, choose, greedy, oracle_of, plain, with_grammar
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.drafters.request import NO_DRAFT
from verifier_svc.speculation import controllers

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


def test_a_lookup_drafter_beside_a_model() -> None:
    runs, _ = with_oracle(with_lookup=True)
    runs.harness.drain()
    assert runs.num_ahead > 5 and "several_drafters" not in counts(runs)


def test_several_drafters_with_a_model() -> None:
    request = greedy(1, 6, 30, speculation=MERGED)
    expected = plain([request])
    one, other = oracle_of([request], expected), oracle_of([request], expected)
    other.name = "other"
    runs = Runs([one, other])
    assert_bits(expected[0], runs.harness.run([request])[0])
    assert runs.num_ahead == 0 and set(counts(runs)) == {"several_drafters"}
    # A run is tried before each step, the first one included.
    assert counts(runs)["several_drafters"] == runs.num_ordinary


def test_a_lookup_drafter_alone() -> None:
    request = greedy(1, 6, 30, speculation=SpeculationOptions(drafter="lookup"))
    runs = Runs([TestSource("lookup", ScriptedDrafter({}), INFO)])  # type: ignore[list-item]
    runs.harness.run([request])
    assert runs.num_ahead > 5 and not counts(runs)


def test_a_grammar() -> None:
    runs = Runs()
    runs.harness.run([with_grammar(greedy(1, 6, 30))])
    assert runs.num_ordinary == 0 and not counts(runs)


@pytest.mark.parametrize("masks", [{"allowed_token_ids": tuple(range(20))}, {"bad_token_ids": ((1, 2), (3,))}])
def test_token_masks(masks: dict[str, Any]) -> None:
    request = greedy(1, 6, 30)
    request = replace(request, sampling=replace(request.sampling, **masks))
    (expected,) = plain([request])
    runs = Runs()
    (result,) = runs.harness.run([request])
    assert_bits(expected, result)
    assert runs.num_ordinary == 0 and not counts(runs)


def test_logprobs_of_a_prompt() -> None:
    """The host needs them once; logprobs of the output come with a step's results."""
    request = greedy(1, 30, 20)
    request = replace(request, sampling=replace(request.sampling, logprobs=2, prompt_logprobs=1))
    (expected,) = plain([request])
    runs = Runs(chunk_tokens=12)
    (result,) = runs.harness.run([request])
    assert_bits(expected, result)
    assert result.prompt_logprobs == expected.prompt_logprobs and len(result.prompt_logprobs) == 29
    assert counts(runs) == {"host_work": 3} and runs.num_ordinary == 3 and runs.num_ahead == 19


def test_draft_trees_for_a_client() -> None:
    """They come with the tokens that were accepted of them, and change no text."""
    request = greedy(1, 6, 30, speculation=MERGED)
    (expected,) = plain([request])
    runs = Runs([oracle_of([request], [expected])])
    (unasked,) = runs.harness.run([request])
    assert runs.num_ahead > 5 and not unasked.trees
    runs = Runs([oracle_of([request], [expected])])
    (result,) = runs.harness.run([replace(request, returns_trees=True)])
    assert_bits(expected, result)
    assert runs.num_ahead == 0 and set(counts(runs)) == {"host_work"}
    assert result.finished is not None
    stats = result.finished.speculation
    assert len(result.trees) == stats.num_spec_steps > 2
    assert sum(len(tree.token_ids) - 1 for tree, _ in result.trees) == stats.num_draft_tokens
    assert sum(len(tree.accepted) for tree, _ in result.trees) == stats.num_accepted_tokens > 5
    text = [*request.prompt, *result.token_ids]
    for tree, emitted in result.trees:
        assert tree.parents[0] == -1 and len(tree.parents) == len(tree.sources) == len(tree.token_ids)
        assert tuple(tree.token_ids[node] for node in tree.accepted) == emitted[: len(tree.accepted)]
        assert all(tree.parents[node] == above for above, node in zip((0, *tree.accepted), tree.accepted, strict=False))
        run = [tree.token_ids[0], *emitted]
        assert any(text[start : start + len(run)] == run for start in range(len(text)))


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


def test_a_lookup_drafter_of_one_that_joins_is_asked_within_the_run() -> None:
    """The sequences before it use another drafter."""
    first = greedy(1, 6, 90, speculation=SpeculationOptions(drafter="oracle"))
    second = greedy(2, 6, 60)
    oracle = oracle_of([first, second], plain([first, second]))
    lookup = ScriptedDrafter({})
    runs = Runs([oracle, TestSource("lookup", lookup, INFO)], on_launch=lambda number: come(number))  # type: ignore[list-item]

    def come(number: int) -> None:
        if number == 4 and len(runs.harness.results) == 1:
            runs.harness.submit(second)

    runs.harness.run([first])
    assert lookup.num_requests >= 2


def test_who_names_a_drafter_has_it_beside_one_whose_drafts_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody drafts in a run whose controller chose plain decode; another drafter ends it."""
    monkeypatch.setattr(controllers, "PLAIN_AFTER", 3)
    first = greedy(1, 6, 60, speculation=SpeculationOptions(drafter="oracle"))
    second = greedy(2, 6, 20, speculation=SpeculationOptions(drafter="lookup"))
    expected = plain([first, second])
    lookup = ScriptedDrafter({(tuple(second.prompt), 0): expected[1].token_ids})
    sources = [oracle_of([first, second], expected), TestSource("lookup", lookup, INFO)]
    runs = Runs(sources, on_launch=lambda number: come(number))  # type: ignore[arg-type]
    choose(runs, lambda step: NO_DRAFT)
    keys = [runs.harness.submit(first)]

    def come(number: int) -> None:
        if number == 10 and len(keys) == 1:
            keys.append(runs.harness.submit(second))

    runs.harness.drain()
    found = [runs.harness.results[key] for key in keys]
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert found[1].finished is not None and found[1].finished.speculation.num_accepted_tokens > 3
    assert runs.num_ahead > 20
