"""Sequences join a run of overlapped steps and leave it; their prompts are computed within it.

The target costs nothing, and results are read a step late. The drafter checks what it is sent.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.errors import UnavailableError
from foretoken.results import FallbackReason
from tests.support.engine_harness import Request
from tests.support.runs import (
    BATCH_ROWS,
    BLOCK,
    NODES,
    Course,
    Runs,
    choose,
    greedy,
    oracle_of,
    plain,
    prompt,
    with_prompt_logprobs,
)
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.overlap import blocks as overlap_blocks
from verifier_svc.overlap.launch_time import LaunchTime
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT
from verifier_svc.speculation import controllers
from verifier_svc.speculation.candidate_shapes import chain
from verifier_svc.speculation.controller import Controller


def alike(lengths: list[int], shared: int, max_tokens: int) -> list[Request]:
    """Return requests whose prompts have these lengths and the same first ``shared`` tokens."""
    first = prompt(99, shared)
    return [
        replace(greedy(i, 6, max_tokens), prompt=[*first, *prompt(i, length - shared)])
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_joins_a_run_that_goes_on(drafts: bool) -> None:
    """No step is an ordinary one, the first included; each prompt is computed at once."""
    course = Course([greedy(1, 9, 40), greedy(2, 12, 20)], {1: 4}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.step.prefills == [8, 11]
    # It waits for one turn of the loop, and joins the step that follows.
    assert course.step.num_running[:6] == [1, 1, 1, 1, 2, 2]
    for index in range(2):
        assert course.num_accepted(index) > 5 or not drafts
    # The drafter is sent each sequence's batch row once.
    assert course.oracle.num_begins == (2 if drafts else 0)


def test_who_comes_while_a_step_runs_joins_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is not launched at once, so the prompt is computed before it."""
    monkeypatch.setattr(LaunchTime, "wait_s", lambda self, step_s: 3600.0)

    def is_stuck(number: int, num_releases: int) -> bool:
        if number != 5 or course.has_come(1):
            return False
        # The drafter got its request before, so it has its time, too.
        assert course.oracle.numbers[-1] == 5
        course.submit(1)
        return True

    course = Course([greedy(1, 6, 40), greedy(2, 9, 20)], {1: lambda: False}, is_stuck=is_stuck)
    course.run()
    assert course.step.num_running[:7] == [1] * 5 + [2] * 2
    assert course.step.most_in_flight == MAX_IN_FLIGHT and course.num_runs == 1


def test_a_burst_waits_for_a_shape_that_suits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two sequences may draft in large trees, which were chosen before the burst came."""
    monkeypatch.setattr(LaunchTime, "wait_s", lambda self, step_s: 3600.0)
    monkeypatch.setattr(controllers, "suits", lambda shape, batch: shape.branches == 1 or batch <= 2)

    def is_stuck(number: int, num_releases: int) -> bool:
        if number != 5 or course.has_come(1):
            return False
        for index in range(1, 4):
            course.submit(index)
        return True

    requests = [greedy(1, 6, 40), *(greedy(index, 9, 20) for index in range(2, 5))]
    course = Course(requests, dict.fromkeys(range(1, 4), lambda: False), is_stuck=is_stuck)
    large = Shape(NODES, 3, 2)
    choose(course.runs, lambda number: chain(3) if course.has_come(1) else large)
    course.run()
    assert course.step.num_running[:8] == [1] * 5 + [2, 4, 4] and course.num_runs == 1


def test_the_next_trees_are_chosen_for_a_burst_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The burst is in the inbox when the last step is read, so the next shape suits it at once."""
    monkeypatch.setattr(controllers, "suits", lambda shape, batch: shape.branches == 1 or batch <= 2)
    requests = [greedy(1, 6, 40), *(greedy(index, 9, 20) for index in range(2, 5))]
    course = Course(requests, dict.fromkeys(range(1, 4), 5))
    large = Shape(NODES, 3, 2)
    choose(course.runs, lambda number: chain(3) if course.has_come(1) else large)
    course.run()
    assert course.step.num_running[:7] == [1] * 5 + [4, 4] and course.num_runs == 1


def test_a_run_that_ends_after_its_request_for_trees_launches_their_step() -> None:
    """The drafter may still draft then. It has finished when it answers a run's last request."""
    launched: dict[int, list[int]] = {}

    def look(number: int) -> None:
        launched.setdefault(course.num_runs, []).append(number)

    requests = [greedy(1, 6, 40), with_prompt_logprobs(greedy(2, 9, 20))]
    course = Course(requests, {1: 6}, look=look)
    course.run()
    assert course.num_runs == 2 and course.runs.num_ordinary > 0
    assert course.oracle.ends[0] == launched[1][-1]


def test_several_prompts_are_one_pass() -> None:
    requests = [greedy(i, 5 + i, 20) for i in range(6)]
    course = Course(requests, dict.fromkeys(range(1, 6), 3))
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [4, sum(4 + i for i in range(1, 6))]
    assert course.oracle.num_prompt_rows == 6
    # The first token alone has no hidden state before it.
    assert set(course.oracle.num_without_hidden.values()) == {1}


def test_a_long_prompt_comes_in_chunks_while_others_draft() -> None:
    """Each chunk is sent with the hidden states of its pass; it joins after the last one."""
    course = Course([greedy(1, 6, 60), greedy(2, 50, 20)], {1: 3}, prompt_rows=8)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [5, *[8] * 6, 1]
    counts = course.step.num_running
    assert counts[3:9] == [1] * 6 and counts[9] == 2
    assert set(course.oracle.num_without_hidden.values()) == {1}
    assert course.num_accepted(0) > 20 and course.num_accepted(1) > 5


def test_a_short_prompt_shares_the_pass_of_a_long_one() -> None:
    """The oldest prompts come first; what a chunk has left goes to the next."""
    course = Course([greedy(1, 4, 40), greedy(2, 14, 20), greedy(3, 5, 20)], {1: 2, 2: 2}, prompt_rows=8)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [3, 8, 8, 1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_cached_prefix_is_not_computed_again(drafts: bool) -> None:
    """Its last position runs again, for the hidden state that a drafter needs."""
    course = Course(alike([22, 25], 20, 30), {1: 4}, drafts=drafts)
    course.run()
    finished = course.result(1).finished
    assert finished is not None and finished.num_cached_tokens == 20
    assert course.num_runs == 1 and course.step.prefills == [21, 25 - 1 - 20 + drafts]
    if drafts:
        assert sorted(course.oracle.num_without_hidden.values()) == [1, 20]
        assert course.num_accepted(1) > 5


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_that_is_cached_but_for_its_last_token_joins_at_once(drafts: bool) -> None:
    requests = [greedy(1, 4 * BLOCK + 1, 30)] * 2
    course = Course(requests, {1: 4}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == ([16, 1] if drafts else [16])
    assert course.result(1).finished.num_cached_tokens == 16  # type: ignore[union-attr]
    assert course.num_accepted(1) > 5 or not drafts


def test_a_cached_prompt_waits_for_room_in_the_chunk() -> None:
    """A long prompt takes the whole pass. Nobody joins before the drafter was sent its prompt."""
    requests = [greedy(1, 4 * BLOCK + 1, 40), greedy(2, 40, 20), greedy(1, 4 * BLOCK + 1, 30)]
    course = Course(requests, {1: 4, 2: 4}, prompt_rows=8)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [8, 8, *[8] * 5]
    assert all(course.num_accepted(index) > 5 for index in range(3))


def test_cached_prompts_that_fill_a_request_come_one_after_the_other() -> None:
    """A request holds one long prefix beside a chunk. All sequences are drafted for."""
    requests = [greedy(1, 6, 60), *alike([44 + i for i in range(BATCH_ROWS - 1)], 40, 40)]
    course = Course(requests, {1: 3, **dict.fromkeys(range(2, BATCH_ROWS), 8)}, prompt_rows=48)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.step.num_running[7:12] == [2, 4, 6, 7, 8]
    assert all(course.num_accepted(index) > 10 for index in range(BATCH_ROWS))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("limit", [0, 2])
def test_choices_of_a_request(drafts: bool, limit: int) -> None:
    """The first computes the prompt for all. A limit counts those that wait for it."""
    requests = [greedy(1, 4 * BLOCK + 1, 20, choice_index=i) for i in range(4)]
    course = Course(requests, drafts=drafts, max_batch_size=limit)
    for index in range(4):
        course.submit(index, "one")
    course.run()
    assert course.runs.num_ordinary == 0
    assert course.runs.steps[0].prefills + course.runs.steps[-1].prefills
    for index in range(1, 4):
        assert course.result(index).finished.num_cached_tokens == 16  # type: ignore[union-attr]


def test_a_batch_slot_goes_to_another_in_a_run_that_the_drafter_takes_no_part_in() -> None:
    """What is left to send of the old owner must not follow the new one's prompt."""
    requests = [
        greedy(1, 6, 24),
        greedy(2, 6, 90),
        greedy(3, 6, 30),
        greedy(4, 6, 60),
        with_prompt_logprobs(greedy(5, 150, 4)),
    ]
    # The first is drafted for, and ends beside two others: that is above the limit.
    comes = {1: 2, 2: 2, 3: lambda: course.has_ended(0), 4: lambda: course.num_output(3) > 20}
    course = Course(requests, comes, max_running=3, max_batch_size=2)
    course.run()
    assert course.num_accepted(0) > 0 and course.num_accepted(3) > 10 and course.oracle.ways.count("host") > 1


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_that_end_with_their_first_token(drafts: bool) -> None:
    """By length, or by a stop token; a step is in flight by then in which they have no rows."""
    text = plain([greedy(3, 6, 1)])[0].token_ids
    stopped = greedy(3, 6, 20)
    stopped = replace(stopped, sampling=replace(stopped.sampling, stop_token_ids=(text[0],)))
    requests = [greedy(1, 6, 30), greedy(2, 9, 1), stopped, greedy(4, 1, 1), greedy(5, 1, 9)]
    course = Course(requests, {1: 3, 2: 3, 3: 6, 4: 6}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert [len(course.result(index).token_ids) for index in (1, 3)] == [1, 1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_resumed_request_goes_on_within_a_run(drafts: bool) -> None:
    """Its earlier output is a part of its prompt, and is not emitted again."""
    whole = greedy(2, 9, 30)
    output = plain([whole])[0].token_ids[:11]
    course = Course([greedy(1, 6, 50), replace(whole, output=output, attempt=1)], {1: 4}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.step.prefills == [5, 9 + 11 - 1]
    assert course.result(1).token_ids[11:] == plain([whole])[0].token_ids[11:]
    assert course.num_accepted(1) > 5 or not drafts


@pytest.mark.parametrize("drafts", [False, True])
def test_one_that_was_preempted_is_computed_again_within_a_run(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run out in a run, an ordinary step preempts the youngest, and the next run has it."""
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 0)
    requests = [greedy(i, 18, 60) for i in range(3)]
    course = Course(requests, drafts=drafts, num_blocks=44)
    course.run()
    assert course.harness.scheduler.num_preemptions > 0
    counters = course.harness.engine.counters
    assert counters.overlap_blocked_steps["no_free_blocks"] > 0
    assert counters.num_overlapped_steps >= 0.8 * counters.num_steps
    if drafts:
        assert all(course.num_accepted(index) > 10 for index in range(3))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize("end", ["abort", "close", "deadline"])
def test_a_sequence_is_ended_from_outside(end: str, state: str, drafts: bool) -> None:
    """The run goes on, and another takes its batch slot at once."""
    long = state == "prefilling"
    requests = [greedy(1, 6, 80), greedy(2, 60 if long else 6, 70), greedy(3, 6, 30), greedy(4, 7, 30)]
    is_after = {
        "waiting": lambda: course.sequence(2) is not None and course.sequence(2).batch_slot < 0,
        "prefilling": lambda: course.sequence(1) is not None and 8 < course.sequence(1).num_computed < 40,
        "decoding": lambda: course.num_output(1) > 5,
    }[state]
    ended = 2 if state == "waiting" else 1
    done: list[bool] = []

    def look(number: int) -> None:
        if done or not is_after():
            return
        done.append(True)
        if end == "abort":
            course.abort(ended)
        elif end == "close":
            course.close(ended)
        else:
            sequence = course.sequence(ended)
            assert sequence is not None
            sequence.deadline = 0.0
            course.errors.add(ended)

    course = Course(
        requests,
        {1: 3, 2: 4, 3: 5},
        drafts=drafts,
        look=look,
        prompt_rows=8,
        max_running=2,
        closes=[ended] if end == "close" else (),
    )
    course.run()
    assert done and course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.num_accepted(0) > 10 or not drafts


@pytest.mark.parametrize("drafts", [False, True])
def test_a_draining_engine_finishes_what_runs(drafts: bool) -> None:
    course = Course([greedy(1, 6, 60), greedy(2, 30, 20), greedy(3, 6, 9)], {1: 3, 2: 6}, drafts=drafts, prompt_rows=8)
    course.errors.add(2)
    course.look = lambda number: course.harness.engine.drain() if number == 5 else None
    course.run()
    assert course.num_runs == 1 and course.result(2).error.code == UnavailableError("").code  # type: ignore[union-attr]


@pytest.mark.parametrize("drafts", [False, True])
def test_an_engine_stops_within_a_run(drafts: bool) -> None:
    """Steps in flight are read, and what they committed is published.

    Nothing else is launched.
    """
    course = Course([greedy(1, 6, 90), greedy(2, 60, 90)], {1: 3}, drafts=drafts, prompt_rows=8)
    engine, stopped_at = course.harness.engine, 7

    def look(number: int) -> None:
        if number == stopped_at:
            engine.is_stopping = True

    course.look = look
    course.submit(0)
    course.harness.step()
    assert course.num_runs == 1 and course.step.number == stopped_at and len(course.step.in_flight) == 0
    (text,) = plain([greedy(1, 6, 90)])
    found = course.result(0).token_ids
    assert found == text.token_ids[: len(found)] and len(found) >= stopped_at
    assert len(course.sequence(0).tokens) == 6 + len(found)  # type: ignore[union-attr]


@pytest.mark.parametrize("drafts", [False, True])
def test_one_that_needs_the_host_ends_the_run_for_all(drafts: bool) -> None:
    """The others go on beside it, and in runs again after it. One is in its prompt meanwhile."""
    requests = [greedy(1, 6, 90), greedy(2, 70, 40), with_prompt_logprobs(greedy(3, 40, 12))]
    course = Course(requests, {1: 3, 2: 6}, drafts=drafts, prompt_rows=8)
    course.run()
    assert course.num_runs == 2 and course.runs.num_ordinary >= 5
    blocked = course.harness.engine.counters.overlap_blocked_steps
    assert blocked["host_work"] == course.runs.num_ordinary
    assert course.num_accepted(0) > 20 or not drafts


def test_a_drafter_comes_while_sequences_decode_and_prompts_are_computed() -> None:
    """It is sent all of them; those for which a request has no room follow with the next."""
    requests = [*(greedy(i, 20, 60) for i in range(5)), greedy(6, 60, 40)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected, prompt_rows=24)
    oracle.close()

    def look(number: int) -> None:
        if number == 4 and oracle.is_closed and not oracle.numbers:
            oracle.is_closed = False
            oracle.attach_anew()

    runs = Runs([oracle], on_launch=look, chunk_tokens=24)
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [step.num_runs for step in runs.steps] == [1, 1] and runs.num_ordinary == 0
    for result in results:
        assert result.finished is not None and result.finished.speculation.num_accepted_tokens > 10


@pytest.mark.parametrize("what", ["dies", "attaches anew", "is late", "is detached"])
@pytest.mark.parametrize("at", range(3, 14))
def test_a_drafter_goes_while_prompts_are_in_flight(what: str, at: int) -> None:
    """The prompt goes on from where it is, and is sent again where somebody is there to draft."""
    requests = [greedy(1, 6, 60), greedy(2, 50, 40), greedy(3, 9, 40)]
    gone_at: list[int] = []
    is_late: list[int] = []

    def look(number: int) -> None:
        oracle = course.oracle
        if number != at or gone_at:
            return
        gone_at.append(number)
        match what:
            case "dies":
                oracle.close()
            case "attaches anew":
                oracle.attach_anew()
            case "is late":
                is_late.append(number)
            case "is detached":
                course.harness.speculator.remove_source("oracle")

    def is_stuck(number: int, num_releases: int) -> bool:
        gone = course.oracle.is_closed and num_releases == 0 and number == at
        return gone or (is_late == [number] and num_releases < 2)

    course = Course(
        requests,
        {1: 2, 2: 7},
        look=look,
        prompt_rows=8,
        is_stuck=is_stuck,
        timeout_s=0.0 if what == "is late" else 600.0,
    )
    course.run()
    assert course.runs.num_ordinary <= 3
    match what:
        case "dies" | "is detached":
            assert course.num_accepted(0) <= 3 * at
        case "attaches anew":
            assert course.oracle.num_attaches == 2 and not course.oracle.failures
            assert all(course.num_accepted(index) > 10 for index in range(3))
        case "is late":
            assert [reason[:15] for reason in course.oracle.failures] == ["no draft within"]
            assert all(course.num_accepted(index) > 10 for index in range(3))


def test_a_batch_above_the_limit_is_plain_while_it_lasts() -> None:
    """It grows above the limit and falls below it again, with prompts in flight."""
    requests = [greedy(1, 6, 90), greedy(2, 6, 90), greedy(3, 40, 10), greedy(4, 9, 30)]
    course = Course(requests, {2: 6, 3: lambda: course.has_ended(2)}, max_batch_size=2, prompt_rows=8)
    course.run()
    # The drafter is back for the steps before the fourth one comes.
    assert course.runs.num_ordinary == 0 and [step.num_runs for step in course.runs.steps] == [2, 3]
    assert course.num_accepted(0) > 20 and course.num_accepted(2) == course.num_accepted(3) == 0


@pytest.mark.parametrize("plain_after", [4, 64])
def test_the_controller_changes_between_plain_decode_and_shapes(
    plain_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that rests for long gets what it has missed before it drafts again."""
    monkeypatch.setattr(controllers, "PLAIN_AFTER", plain_after)
    shared = chain(3)._replace(budget=2)
    shapes = [Shape(6, 3, 2), NO_DRAFT, NO_DRAFT, chain(2), shared, NO_DRAFT, NO_DRAFT, Shape(4, 2, 2)]
    requests = [greedy(1, 6, 150), greedy(2, 30, 110), greedy(3, 9, 60)]
    course = Course(requests, {1: 9, 2: 21}, num_steps=0, prompt_rows=8)
    choose(course.runs, lambda number: shapes[number // 6 % len(shapes)])
    course.run()
    assert course.runs.num_ordinary == 0
    plain_runs, drafted_runs = (step.num_runs for step in course.runs.steps)
    if plain_after == 64:
        assert (plain_runs, drafted_runs) == (0, 1)
    else:
        assert plain_runs > 2 and drafted_runs > 2
    assert all(course.num_accepted(index) > 10 for index in range(3))


def test_late_trees_of_shared_rows_are_no_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence without a row may have had a worse draft than others, but not if none came."""
    late, walks = 12, []

    def look(number: int) -> None:
        if number == late:
            course.step.memory.draft_stamp.fill_(-1)

    observe = Controller.observe_walk

    def observe_walk(self: Controller, shape: Shape, num_matched: int, depth: int, num_rows: int = 1) -> None:
        walks.append(num_matched)
        observe(self, shape, num_matched, depth, num_rows)

    monkeypatch.setattr(Controller, "observe_walk", observe_walk)
    course = Course(
        [greedy(1, 6, 60), greedy(2, 9, 60)],
        look=look,
        is_stuck=lambda number, num_releases: number == late and num_releases < 1,
        timeout_s=0.0,
        num_steps=0,
    )
    choose(course.runs, lambda number: chain(3)._replace(budget=4))
    course.run()
    assert course.harness.engine.counters.fallback_steps[FallbackReason.NO_DRAFT_IN_TIME] == 2
    # The rows suffice for all, and the drafts are right, so no walk has no match.
    assert len(walks) > 10 and 0 not in walks


@pytest.mark.parametrize("drafts", [False, True])
def test_batch_rows_and_batch_slots_change_hands_at_once(drafts: bool) -> None:
    """Many short requests pass through two batch rows; each is drafted for as its own."""
    requests = [greedy(i, 3 + i % 7, 4 + i % 5) for i in range(24)]
    course = Course(requests, drafts=drafts, max_running=2)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert max(course.step.num_running) == 2
    if drafts:
        assert sum(course.num_accepted(index) for index in range(24)) > 24
        assert max(batch_slot for batch_slot, _ in course.oracle.num_without_hidden) == 1
        assert len(course.oracle.num_without_hidden) == 24
