"""What begins and ends runs of overlapped steps, and what a drafter is sent.

The target and its steps cost nothing.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.drafting import DraftRequest, TargetInfo
from foretoken.overlap_memory import StreamOrder
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.transports.transport import ROWS_PER_BATCH_SLOT
from tests.support.engine_harness import Request, Result, TestSource, assert_bits
from tests.support.runs import (
    BATCH_ROWS,
    BLOCK,
    NODES,
    VOCAB,
    Runs,
    choose,
    greedy,
    keep_masked_steps_ordinary,
    oracle_of,
    plain,
    prompt,
    with_grammar,
)
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.messages import SequenceKey
from verifier_svc.overlap import blocks as overlap_blocks
from verifier_svc.overlap import run as overlap_run
from verifier_svc.overlap import times as overlap_times
from verifier_svc.overlap import wait as overlap_wait
from verifier_svc.overlap.launch_time import LaunchTime
from verifier_svc.speculation import controllers
from verifier_svc.speculation.candidate_shapes import chain
from verifier_svc.speculation.lookups import Lookups


def test_pages_are_reserved_for_many_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 5 * BLOCK)
    sizes = set()

    def look(number: int) -> None:
        (sequence,) = runs.harness.engine.scheduler.running
        sizes.add(len(sequence.block_ids))

    runs = Runs(on_launch=look)
    (result,) = runs.harness.run([greedy(1, 6, 100)])
    assert len(result.token_ids) == 100 and runs.num_ahead > 90
    assert 2 <= len(sizes) <= 100 // (5 * BLOCK) + 2


def with_masks(draw: random.Random, request: Request) -> Request:
    """Return a request with a grammar or token masks."""
    match draw.randrange(4):
        case 0:
            return with_grammar(request)
        case 1:
            # It ends by itself, in a word or in an alternative.
            return with_grammar(request, "[a-f]{3,9}(x|yz)[0-9]{4,12}", looks_ahead=draw.random() < 0.8)
        case 2:
            fields: dict[str, Any] = {"allowed_token_ids": tuple(draw.sample(range(VOCAB), 20))}
        case _:
            pairs = [(draw.randrange(VOCAB), draw.randrange(VOCAB)) for _ in range(200)]
            fields = {"bad_token_ids": ((draw.randrange(VOCAB),), *pairs)}
    return replace(request, sampling=replace(request.sampling, **fields))


def any_requests(draw: random.Random, seed: int, with_grammars: bool) -> list[Request]:
    """Return requests of all kinds; some prompts begin as an earlier one does, or are the same."""
    requests: list[Request] = []
    for i in range(16):
        options = SpeculationOptions(enabled=draw.random() < 0.8, max_draft_tokens=draw.choice([None, None, 0, 2]))
        stops = tuple(draw.sample(range(VOCAB), draw.choice([0, 2])))
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=i,
            max_tokens=draw.choice([1, 2, draw.randrange(3, 60)]),
            stop_token_ids=stops,
            logprobs=draw.choice([None, None, 1]),
            min_tokens=draw.choice([0, 0, 5]),
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        )
        first: list[int] = []
        if requests and draw.random() < 0.4:
            other = draw.choice(requests).prompt
            first = list(other[: draw.randrange(len(other)) + 1])
        length = draw.choice([draw.randrange(0, 30), draw.randrange(30, 60)]) if len(first) < 30 else 0
        request = Request([*first, *prompt(100 * seed + i, length)] or [1], params, speculation=options)
        if with_grammars and draw.random() < 0.35:
            request = with_masks(draw, request)
        elif with_grammars and draw.random() < 0.1:
            request = replace(request, sampling=replace(request.sampling, prompt_logprobs=1))
        elif draw.random() < 0.2:
            (whole,) = plain([request])
            output = whole.token_ids[: draw.randrange(max(len(whole.token_ids), 1))]
            request = replace(request, output=output, attempt=1)
        requests.append(request)
    return requests


def looking_up(requests: list[Request], draw: random.Random) -> list[Request]:
    """Return requests that use a look-up drafter too: some name it, some predict their output."""
    found = []
    for request in requests:
        drafter = draw.choice(["auto", "merge", "lookup", "lookup", "oracle+lookup"])
        found.append(
            replace(
                request,
                speculation=replace(request.speculation, drafter=drafter),
                prediction=tuple(prompt(draw.randrange(99), 20)) if draw.random() < 0.3 else (),
            )
        )
    return found


def lookup_of(requests: list[Request], expected: list[Result], seed: int) -> TestSource:
    """Return a look-up drafter that knows the texts, and errs."""
    outputs = {
        (tuple(request.prompt), request.choice_index): [*request.output, *result.token_ids[len(request.output) :]]
        for request, result in zip(requests, expected, strict=True)
    }
    info = TargetInfo("hash", VOCAB, 400, BATCH_ROWS, NODES, 8, 2, BLOCK, 400, "")
    return TestSource("lookup", ScriptedDrafter(outputs, seed=seed), info)


def launch_late_now_and_then(course: Disturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host wait for a whole step instead of by
    the clock, so that a seed gives one course.
    """
    monkeypatch.setattr(LaunchTime, "wait_s", lambda self, step_s: 3600.0 * (course.draw.random() < 0.2))


class Disturbed:
    """A course of requests that come and are ended at any time, with drafters that come and go.

    Args:
        comes_and_goes: whether drafters do, are late, and have the shapes of trees changed.
        looks_up: whether there is a look-up drafter.
    """

    def __init__(
        self, seed: int, *, drafts: bool, with_grammars: bool, comes_and_goes: bool, looks_up: bool = False
    ) -> None:
        self.draw = draw = random.Random(seed)
        self.requests = any_requests(draw, seed, with_grammars)
        if looks_up:
            self.requests = looking_up(self.requests, random.Random(seed))
        self.expected = plain(self.requests)
        self._lookup = lookup_of(self.requests, self.expected, seed) if looks_up else None
        self.waiting = list(self.requests)
        self.keys: list[SequenceKey] = []
        self.ended: set[SequenceKey] = set()
        chunk = draw.choice([6, 16, 64])
        self.oracle = oracle_of(
            self.requests, self.expected, prompt_rows=chunk, spoil=lambda number: draw.random() < 0.2
        )
        self._comes_and_goes = drafts and comes_and_goes
        self._is_disturbed = comes_and_goes
        sources: list[Any] = [self.oracle] if drafts else []
        self.runs = Runs(
            [*sources, self._lookup] if self._lookup is not None else sources,
            num_blocks=draw.choice([37, 44, 90]),
            max_running=draw.choice([2, 4, 8]),
            max_batch_size=draw.choice([0, 0, 3]),
            chunk_tokens=chunk,
            on_launch=self.disturb,
            is_stuck=self._is_stuck,
            max_model_len=148,
            num_steps=0 if self._comes_and_goes else 3,
            timeout_s=0.0 if self._comes_and_goes else 600.0,
        )
        if self._comes_and_goes:
            choose(self.runs, self._shape)
        self._shape_now = Shape(6, 3, 4)
        self._num_stuck = 0

    def run(self) -> None:
        while self.waiting or not self.runs.harness.engine.is_idle:
            self.disturb(0)
            self.runs.harness.step()
        # Nobody drafts now, and the drafter may be gone.
        self.runs.harness.drain()
        for key, result in zip(self.keys, self.expected, strict=True):
            got = self.runs.harness.results[key]
            assert got.is_done and got.token_ids[: len(result.token_ids)] == result.token_ids[: len(got.token_ids)]
            if key not in self.ended:
                assert_bits(result, got)

    def disturb(self, number: int) -> None:
        draw, harness = self.draw, self.runs.harness
        if self.waiting and draw.random() < 0.15:
            self.keys.append(harness.submit(self.waiting.pop(0)))
        if self.keys and draw.random() < 0.02:
            key = draw.choice(self.keys)
            self.ended.add(key)
            if draw.random() < 0.5:
                harness.abort(key)
            for sequence in (*harness.scheduler.running, *harness.scheduler.waiting):
                if sequence.key == key:
                    sequence.deadline = 0.0
        if self._lookup is not None and self._is_disturbed and draw.random() < 0.03:
            if self._lookup.transport is None:
                self._lookup.start()
            else:
                self._lookup.kill()
        if not self._comes_and_goes or draw.random() > 0.03:
            return
        if self.oracle.is_closed:
            self.oracle.is_closed = False
            self.oracle.attach_anew()
        elif draw.random() < 0.5:
            self.oracle.close()
        else:
            self.oracle.attach_anew()

    def _shape(self, number: int) -> Shape:
        if self.draw.random() < 0.2:
            shared = chain(3)._replace(budget=2), Shape(6, 3, 4, 3)
            shapes = [NO_DRAFT, NO_DRAFT, chain(1), chain(3), *shared, Shape(4, 2, 2), Shape(6, 3, 4)]
            self._shape_now = self.draw.choice(shapes)
        return self._shape_now

    def _is_stuck(self, number: int, num_releases: int) -> bool:
        """Be late now and then; the first look finds that there is no time left."""
        if not self._comes_and_goes:
            return False
        self._num_stuck = self._num_stuck - 1 if self._num_stuck else 2 * (self.draw.random() < 0.01)
        return self._num_stuck > 0


@pytest.mark.parametrize(
    ("drafts", "with_grammars", "comes_and_goes"),
    [
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ],
)
@pytest.mark.parametrize(
    "seed", [0, 5, 8, 41, 265, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_any_course_of_requests(
    seed: int, drafts: bool, with_grammars: bool, comes_and_goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, are ended and preempted at any time; no block is lost, no text changes.

    ``with_grammars``: some have a grammar or token masks, which are bound late; for others the host
    works, so some steps do not overlap. Logprobs are the same, bit for bit.
    """
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", seed % 3 * 5)
    monkeypatch.setattr(controllers, "PLAIN_AFTER", 4)
    course = Disturbed(seed, drafts=drafts, with_grammars=with_grammars, comes_and_goes=comes_and_goes)
    launch_late_now_and_then(course, monkeypatch)
    course.run()
    assert course.runs.num_ahead > 20
    # The course of 41 has next to no masks.
    assert not with_grammars or seed == 41 or sum(step.num_bound for step in course.runs.steps) > 1


@pytest.mark.parametrize(
    ("drafts", "with_grammars", "comes_and_goes"),
    [(False, False, False), (False, True, True), (True, False, False), (True, True, False), (True, True, True)],
)
@pytest.mark.parametrize("seed", [0, 77, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_any_course_of_requests_with_lookups(
    seed: int, drafts: bool, with_grammars: bool, comes_and_goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up drafter is sent each token once, and errs.

    Its trees are larger than the model's.
    """
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", seed % 3 * 5)
    monkeypatch.setattr(controllers, "PLAIN_AFTER", 4)
    if seed % 2:
        # Every tree that is found is verified, also where the model's promises more.
        monkeypatch.setattr(Lookups, "_passes_over", lambda *_: False)
    course = Disturbed(seed, drafts=drafts, with_grammars=with_grammars, comes_and_goes=comes_and_goes, looks_up=True)
    launch_late_now_and_then(course, monkeypatch)
    course.run()
    found = sum(sum(step.num_found) for step in course.runs.steps)
    assert found > 2 or with_grammars


class NumberedOrder(StreamOrder):
    """The stream order of one attachment's flag words: what was signalled once stays so."""

    def __init__(self) -> None:
        self.step = 0

    def signal_step(self, number: int) -> None:
        assert number > self.step, "whoever waits for this step has been let past long ago"
        self.step = number


def test_runs_of_two_drafters_in_turn_count_on() -> None:
    requests = [
        greedy(i, 6, 8, speculation=SpeculationOptions(drafter=name)) for i, name in enumerate(["one", "two"] * 3)
    ]
    expected = plain(requests)
    oracles = [oracle_of(requests, expected) for _ in range(2)]
    for oracle, name in zip(oracles, ["one", "two"], strict=True):
        oracle.name = name
        assert oracle.transport is not None
        oracle.transport.order = NumberedOrder()
    runs = Runs(oracles)
    for request, result in zip(requests, expected, strict=True):
        assert runs.harness.run([request])[0].token_ids == result.token_ids
    for oracle in oracles:
        # Each of three runs had a last step that no request followed,
        # because the sequence had ended.
        steps = [later - number for number, later in zip(oracle.numbers, oracle.numbers[1:], strict=False)]
        assert len(oracle.numbers) > 6 and steps.count(2) == 2 and set(steps) == {1, 2}
    # A detached drafter's memory is freed.
    memory = weakref.ref(runs.steps[1])
    runs.harness.speculator.remove_source("one")
    del runs.steps[1]
    runs.harness.run([greedy(9, 6, 8).plain()])
    gc.collect()
    assert memory() is None


def test_a_drafter_that_attaches_anew_within_a_run_was_sent_nothing() -> None:
    """The whole sequence is sent again; no request of the run goes to the new attachment."""
    requests = [greedy(1, 6, 30)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)

    def attach_anew(number: int) -> None:
        if number == 4 and oracle.num_attaches == 1:
            oracle.attach_anew()

    runs = Runs([oracle], on_launch=attach_anew)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids
    # It checks everything that it is sent.
    assert oracle.num_attaches == 2 and not oracle.failures
    assert oracle.numbers and oracle.numbers[0] == 1


def test_a_request_names_the_blocks_that_its_step_may_need_and_no_others() -> None:
    """A transport takes two blocks a batch slot; reserves and rows without drafts would be more."""
    plain_row = greedy(0, 200, 40, speculation=SpeculationOptions(enabled=False))
    requests = [plain_row, *(greedy(i, 6, 30) for i in range(1, BATCH_ROWS))]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle], max_model_len=240)
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert runs.num_ahead > 3
    assert max(oracle.num_named) <= ROWS_PER_BATCH_SLOT * BATCH_ROWS


def test_no_block_is_named_after_the_end_of_the_context() -> None:
    requests = [greedy(1, 6, 300)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle], max_model_len=40)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids[:34]
    assert max(map(len, oracle.blocks.values())) == 40 // BLOCK


def test_steps_above_the_batch_limit_are_counted() -> None:
    requests = [greedy(i, 6, 20) for i in range(3)]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)], max_batch_size=2)
    assert [r.token_ids for r in runs.harness.run(requests)] == [r.token_ids for r in expected]
    # Nothing is launched after the step that makes the last token.
    assert runs.num_ordinary == 0
    assert runs.harness.speculator.limit.num_steps_above == runs.num_ahead == 20


@pytest.mark.parametrize("enabled", [False, True])
def test_steps_below_the_batch_limit_are_not_counted(enabled: bool) -> None:
    """If nobody wants drafts, the run goes on when an end takes the batch below the limit."""
    options = SpeculationOptions(enabled=enabled)
    requests = [greedy(i, 6, length, speculation=options) for i, length in enumerate((10, 30, 30))]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)], max_batch_size=2)
    assert [r.token_ids for r in runs.harness.run(requests)] == [r.token_ids for r in expected]
    assert [step.num_runs for step in runs.steps] == [1, 1] if enabled else [1]
    assert runs.num_ordinary == 0 and (enabled or runs.num_ahead > 25)
    # The step that was launched before the end was known has fewer rows.
    assert runs.harness.speculator.limit.num_steps_above == 10


@pytest.mark.parametrize("first_late", [2, 5])
def test_a_draft_that_is_late_ends_the_run_and_not_the_next(first_late: int) -> None:
    """The step goes on without the draft, also if the drafter takes that back once or twice."""
    requests = [greedy(1, 6, 40)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle], timeout_s=0.0, is_stuck=lambda number, releases: number >= first_late and releases < 3)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids
    assert [reason[:15] for reason in oracle.failures] == ["no draft within"]
    assert runs.steps[1].num_runs == 2


@pytest.mark.parametrize(("slow_step", "reasons"), [(2, []), (3, []), (6, ["no draft within 2000 ms"])])
def test_the_first_draft_of_a_kind_may_take_longer(
    slow_step: int, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter captures a graph then.

    Step 2 waits for the one with the prompt, step 3 for one without.
    """
    now, polls = [0.0], [0]

    def is_stuck(number: int, num_releases: int) -> bool:
        if number != slow_step or num_releases:
            return False
        now[0] += 1.0
        polls[0] += 1
        return polls[0] < 10

    def clock() -> float:
        now[0] += 1e-4
        return now[0]

    fake = SimpleNamespace(perf_counter=clock, monotonic=time.monotonic, sleep=lambda seconds: None)
    for module in (overlap_run, overlap_times, overlap_wait):
        monkeypatch.setattr(module, "time", fake)
    requests = [greedy(1, 6, 40)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle], timeout_s=2.0, is_stuck=is_stuck)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids
    assert oracle.failures == reasons and polls[0] == (2 if reasons else 10)


def test_a_drafter_that_is_gone_lets_the_step_go_on_before_its_time_is_over() -> None:
    requests = [greedy(1, 6, 40)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)

    def dies(number: int, num_releases: int) -> bool:
        if number == 4 and runs.steps[1].number == 5:
            oracle.close()
        return oracle.is_closed and number <= 5 and num_releases < 2

    runs = Runs([oracle], is_stuck=dies)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids
    assert oracle.is_closed and not oracle.failures


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_drafter_that_still_writes_a_prompt_catches_up_before_a_run(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary requests let it catch up: a run excludes sequences that it cannot draft for yet."""
    # The second request's prompt is computed beside another one, for which the host has work.
    keep_masked_steps_ordinary(monkeypatch)
    request, other = greedy(1, 30, 40), with_grammar(greedy(2, 6, 2))
    expected = plain([other, request])
    oracle = oracle_of([other, request], expected)
    right, learn = oracle._tree, oracle._learn
    num_asked = 0

    def tree(tokens: list[int]) -> tuple[list[int], list[int]]:
        return right(tokens) if num_asked > 4 else (tokens[-1:], [-1])

    def count(asked: DraftRequest, row: int, key: tuple[int, int]) -> None:
        nonlocal num_asked
        num_asked += asked.prompt_lengths[row] == 30
        learn(asked, row, key)

    monkeypatch.setattr(oracle, "_tree", tree)
    monkeypatch.setattr(oracle, "_learn", count)
    runs = Runs([oracle], num_steps=num_steps)
    results = runs.harness.run([other, request])
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert num_asked > 4 and runs.num_ahead > 5
    assert runs.harness.engine.counters.overlap_blocked_steps["undrafted_row"] > 1
    finished = results[1].finished
    assert finished is not None and finished.speculation.num_accepted_tokens > 10


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_prompt_is_drafted_for_from_its_first_token_on(num_steps: int) -> None:
    requests = [greedy(1, 30, 40)]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)], num_steps=num_steps)
    (result,) = runs.harness.run(requests)
    assert result.token_ids == expected[0].token_ids and result.finished is not None
    assert runs.num_ordinary == 0 and result.sources[:2] == [0, 1]
    # Where one token is left, no draft is needed.
    assert result.finished.speculation.fallback_steps == 1
