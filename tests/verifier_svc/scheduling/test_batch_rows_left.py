"""Sequences end within a run of overlapped steps: who goes on, in which blocks, what is sent."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.drafting import DraftRequest
from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Request, Result
from tests.support.runs import BATCH_ROWS, BLOCK, Runs, greedy, oracle_of, plain
from verifier_svc.overlap import blocks as overlap_blocks


@pytest.mark.parametrize("drafts", [False, True])
def test_a_run_goes_on_without_those_that_end(drafts: bool) -> None:
    """It lasts until the last one ends, by length or by a stop token, which the host sees late."""
    requests = [greedy(i, 6, 8 * i + 9) for i in range(BATCH_ROWS - 1)]
    stopped = greedy(BATCH_ROWS - 1, 6, 60)
    text = plain([stopped])[0].token_ids
    stop = next(token for index, token in enumerate(text) if index > 20 and token not in text[:index])
    requests.append(Request(stopped.prompt, SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(stop,))))
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)] if drafts else [])
    results = runs.harness.run(requests)
    assert [facts(result) for result in results] == [facts(result) for result in expected]
    assert runs.steps[-1].num_runs == 1 and runs.num_ordinary == 0
    runs.harness.drain()


def facts(result: Result) -> tuple[Any, ...]:
    assert result.finished is not None
    return result.token_ids, result.finished.reason, result.finished.stop_token_id


@pytest.mark.parametrize("drafts", [False, True])
def test_blocks_of_one_that_ended_are_given_to_others_of_the_run(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has no other blocks; those left in the prefix cache serve the next request."""
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 0)
    short, long = greedy(1, 22, 10), greedy(2, 6, 70)
    expected = plain([short, long])
    again = Request([*short.prompt, *expected[0].token_ids, 5, 7], SamplingParams(temperature=0.0, max_tokens=12))
    expected += plain([again])
    tables: dict[int, set[int]] = {}

    def look(number: int) -> None:
        for sequence in runs.harness.scheduler.running:
            tables.setdefault(sequence.num_prompt_tokens, set()).update(sequence.block_ids)

    oracle = oracle_of([short, long, again], expected)
    # 76 tokens are 19 blocks; steps in flight may need two more.
    runs = Runs([oracle] if drafts else [], num_blocks=25, on_launch=look)
    results = runs.harness.run([short, long])
    assert [r.token_ids for r in results] == [r.token_ids for r in expected[:2]]
    assert runs.steps[-1].num_runs == 1 and runs.num_ordinary == 0
    shared = tables[22] & tables[6]
    assert len(shared) > 1
    assert runs.harness.run([again])[0].token_ids == expected[2].token_ids
    finished = runs.harness.results[list(runs.harness.results)[-1]].finished
    assert finished is not None and finished.num_cached_tokens >= BLOCK
    runs.harness.drain()


def test_a_drafter_must_forget_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets before the batch slot's next owner is sent.

    It learned everything within the run, so no row is empty.
    """
    requests = [greedy(1, 6, 8), greedy(2, 6, 40), greedy(3, 6, 20), greedy(4, 6, 20)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    forgotten_at = []
    learn = oracle._learn

    def look(number: int) -> None:
        forgotten_at.append(len(oracle.forgotten))

    def check(request: DraftRequest, row: int, key: tuple[int, int]) -> None:
        assert request.new_token_starts[row + 1] > request.new_token_starts[row]
        learn(request, row, key)

    monkeypatch.setattr(oracle, "_learn", check)

    runs = Runs([oracle], max_running=2, on_launch=look)
    runs.harness.run(requests[:2])
    assert runs.steps[1].num_runs == 1 and runs.num_ordinary == 0
    assert forgotten_at and not any(forgotten_at) and len(oracle.tokens) == 2
    owners = set(oracle.tokens)
    runs.harness.drain()
    results = runs.harness.run(requests[2:])
    assert [r.token_ids for r in results] == [r.token_ids for r in expected[2:]]
    assert set(oracle.forgotten) == owners and not owners & set(oracle.tokens)


def test_a_run_goes_on_with_fewer_rows_as_sequences_end() -> None:
    """A step has token rows for the batch rows that are taken; those in between stay empty."""
    requests = [greedy(i, 6, 8 * i + 9) for i in range(BATCH_ROWS)]
    expected = plain(requests)
    runs = Runs()
    (step,) = runs.steps
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert step.num_runs == 1 and runs.num_ordinary == 0
    # One in eight steps frees a batch row, one step after the sequence's last token.
    assert [step.num_running[8 * i + 10] for i in range(BATCH_ROWS - 1)] == list(range(BATCH_ROWS - 1, 0, -1))


def test_one_that_waits_takes_the_place_of_one_that_ends() -> None:
    """The run goes on; the third one runs beside the
    second, in the first one's batch row and batch slot.
    """
    requests = [greedy(1, 6, 10), greedy(2, 6, 60), greedy(3, 6, 40)]
    expected = plain(requests)
    runs = Runs(max_running=2)
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert runs.harness.engine.counters.num_steps == 60 and runs.steps[0].num_runs == 1
    assert runs.steps[0].num_running == [2] * 60 or runs.steps[0].num_running[11:50] == [2] * 39


def test_a_run_ends_with_the_last_one_that_is_drafted_for() -> None:
    requests = [greedy(1, 6, 12), greedy(2, 6, 60).plain()]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)])
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [step.num_runs for step in runs.steps] == [1, 1] and runs.num_ordinary == 0
    assert runs.steps[0].number > 40


def test_a_run_ends_as_the_batch_falls_below_the_limit_of_drafting() -> None:
    requests = [greedy(1, 6, 12), greedy(2, 6, 60), greedy(3, 6, 60)]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)], max_batch_size=2)
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [step.num_runs for step in runs.steps] == [1, 1]
    assert results[1].finished is not None and results[1].finished.speculation.num_accepted_tokens > 20
