"""Drafters come and go while sequences run: the text stays that of plain decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from foretoken.drafter import Drafter
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import NotFoundError, PreconditionError
from foretoken.limits import MAX_DRAFTER_NAMES, MAX_DRAFTERS
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.engine_harness import EPOCH, Harness, Request, Result, TestSource
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.drafters.changes import AttachDrafter, DetachDrafter
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.source import DraftSource
from verifier_svc.info import drafter_state

VOCAB = 40
TARGET = TargetInfo(
    "test",
    VOCAB,
    max_model_len=256,
    max_batch_slots=8,
    max_nodes=8,
    hidden_size=4,
    num_layers=2,
    block_size=4,
    num_blocks=400,
)
TEMPERATURES = {"greedy": 0.0, "seeded 1.0": 1.0}


def harness(**drafters: Drafter) -> Harness:
    return Harness(
        HashTarget(VOCAB, 400, 4),
        vocab_size=VOCAB,
        num_blocks=400,
        block_size=4,
        drafters=drafters,
        hidden_size=TARGET.hidden_size,
        num_layers=TARGET.num_layers,
    )


def request(temperature: float, drafter: str = "auto", seed: int = 3) -> Request:
    prompt = np.random.default_rng(seed).integers(0, VOCAB, 11).tolist()
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, presence_penalty=0.4, logprobs=1)
    return Request(prompt, sampling, speculation=SpeculationOptions(drafter=drafter))


def plain(one: Request) -> Result:
    return harness().run([one.plain()])[0]


def script(one: Request, expected: Result, seed: int = 0) -> ScriptedDrafter:
    return ScriptedDrafter({(tuple(one.prompt), 0): [*expected.token_ids, 1, 2, 3]}, seed=seed)


def source(name: str, drafter: Drafter) -> TestSource:
    return TestSource(name, drafter, TARGET)


def attach(run: Harness, drafter: DraftSource) -> Future[None]:
    done: Future[None] = Future()
    run.engine.send(AttachDrafter(drafter, done))
    return done


def detach(run: Harness, name: str) -> Future[DraftSource]:
    done: Future[DraftSource] = Future()
    run.engine.send(DetachDrafter(name, done))
    return done


def run_with(run: Harness, requests: Sequence[Request], at: dict[int, Callable[[], object]]) -> list[Result]:
    """Run to the end; ``at``: what to do when the first output has so many tokens."""
    left = dict(at)
    keys = [run.submit(one) for one in requests]
    while not all(run.results[key].is_done for key in keys):
        run.step()
        for length in [length for length in left if len(run.results[keys[0]].token_ids) >= length]:
            left.pop(length)()
    assert not left, "the output was too short for all that was to happen"
    run.drain()
    return [run.results[key] for key in keys]


def assert_same(got: Result, expected: Result) -> None:
    assert got.error is None
    assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)


def accepted_after(result: Result, position: int, drafter: int) -> int:
    return sum(number == drafter for number in result.sources[position:])


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_attached_in_the_middle_of_a_sequence_it_is_used(temperature: float) -> None:
    one = request(temperature)
    expected = plain(one)
    run = harness()
    got = run_with(run, [one], {10: lambda: attach(run, source("late", script(one, expected)))})[0]
    assert_same(got, expected)
    assert got.sources[:10] == [0] * 10 and accepted_after(got, 10, 1) > 3
    assert got.finished is not None and got.finished.speculation.drafter == "late"


@pytest.mark.parametrize("wanted", ["auto", "merge", "one"])
@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_detached_in_the_middle_of_a_sequence_it_goes_on_root_only(temperature: float, wanted: str) -> None:
    one = request(temperature, wanted)
    expected = plain(one)
    drafter = script(one, expected)
    run = harness(one=drafter)
    asked: list[int] = []

    def away() -> None:
        detach(run, "one")
        asked.append(drafter.num_requests)

    got = run_with(run, [one], {20: away})[0]
    assert_same(got, expected)
    # None of its trees was verified any more, not even the one at hand; it got no more requests.
    assert accepted_after(got, 0, 1) > 3
    assert drafter.num_requests == asked[0]
    finished = got.finished
    assert finished is not None
    assert accepted_after(got, 20 + TARGET.max_nodes, 1) == 0
    assert finished.speculation.fallback_steps >= len(got.token_ids) - 20 - TARGET.max_nodes
    # A request that names it later is served all the same.
    assert_same(run.run([one])[0], expected)


def test_a_tree_that_waits_is_dropped_with_its_drafter() -> None:
    one = request(0.0)
    expected = plain(one)
    drafter = script(one, expected)
    run = harness(one=drafter)
    key = run.submit(one)
    while not run.speculator.trees:
        run.step()
    before = len(run.results[key].token_ids)
    detach(run, "one")
    run.step()
    assert len(run.results[key].token_ids) == before + 1 and run.results[key].sources[-1] == 0
    while not run.results[key].is_done:
        run.step()
    assert_same(run.results[key], expected)


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_attached_again_it_has_its_number_and_its_counts(temperature: float) -> None:
    one = request(temperature, "two")
    expected = plain(one)
    run = harness(one=script(one, expected, 1), two=script(one, expected))
    counters = run.speculator.drafter("two").counters
    seen: list[tuple[int, int]] = []

    def away() -> None:
        detach(run, "two")
        seen.append((counters.num_drafts, counters.num_accepted_tokens))

    again = source("two", script(one, expected, 5))
    got = run_with(run, [one], {15: away, 25: lambda: attach(run, again)})[0]
    assert_same(got, expected)
    assert set(got.sources) == {0, 2}
    assert accepted_after(got, 30, 2) > 3, "the new one was sent the whole sequence"
    drafter = run.speculator.drafters[1]
    assert (drafter.number, drafter.num_attaches, drafter.source) == (2, 2, again)
    assert drafter.counters is counters and counters.num_drafts > seen[0][0] > 0
    assert got.finished is not None and [part.name for part in got.finished.speculation.drafters] == ["two"]
    assert got.finished.speculation.num_accepted_tokens == counters.num_accepted_tokens


@pytest.mark.parametrize("wanted", ["merge", "one+two"])
@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_one_of_two_that_are_merged_is_detached(temperature: float, wanted: str) -> None:
    one = request(temperature, wanted)
    expected = plain(one)
    run = harness(one=script(one, expected, 1), two=script(one, expected, 2))
    got = run_with(run, [one], {25: lambda: detach(run, "one")})[0]
    assert_same(got, expected)
    assert accepted_after(got, 0, 1) > 0
    assert accepted_after(got, 25 + TARGET.max_nodes, 1) == 0 < accepted_after(got, 25 + TARGET.max_nodes, 2)


def test_auto_takes_the_next_one() -> None:
    one = request(0.0)
    expected = plain(one)
    run = harness(one=script(one, expected, 1), two=script(one, expected, 2))
    got = run_with(run, [one], {25: lambda: detach(run, "one")})[0]
    assert_same(got, expected)
    assert accepted_after(got, 0, 1) > 0
    assert accepted_after(got, 25 + TARGET.max_nodes, 2) > 0


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_many_sequences_while_drafters_come_and_go(temperature: float) -> None:
    requests = [
        replace(request(temperature, name, seed), choice_index=seed % 2)
        for seed, name in enumerate(["auto", "merge", "one", "two", "auto", "merge"])
    ]
    expected = [plain(one) for one in requests]
    outputs = {
        (tuple(one.prompt), one.choice_index): [*want.token_ids, 1, 2, 3]
        for one, want in zip(requests, expected, strict=True)
    }
    run = harness(one=ScriptedDrafter(outputs, seed=1))

    def each_step(at: Harness) -> None:
        match at.num_steps % 12:
            case 2:
                attach(at, source("two", ScriptedDrafter(outputs, seed=at.num_steps)))
            case 5:
                detach(at, "one")
            case 7:
                attach(at, source("one", ScriptedDrafter(outputs, seed=at.num_steps)))
            case 10:
                detach(at, "two")

    got = run.run(requests, every_step=each_step)
    run.drain()
    for want, have in zip(expected, got, strict=True):
        assert_same(have, want)
    assert {number for result in got for number in result.sources} == {0, 1, 2}
    assert len(run.speculator.drafters) == 2 and run.speculator.drafters[0].num_attaches >= 2


def test_names_and_limits() -> None:
    one = request(0.0)
    run = harness(one=ScriptedDrafter({}))
    taken, unknown = attach(run, source("one", ScriptedDrafter({}))), detach(run, "nobody")
    gone, twice = detach(run, "one"), detach(run, "one")
    run.step()
    assert isinstance(taken.exception(), PreconditionError) and taken.exception().field == "name"  # type: ignore[union-attr]
    assert isinstance(unknown.exception(), NotFoundError) and isinstance(twice.exception(), NotFoundError)
    assert gone.result() is run.sources[0] and not run.sources[0].is_closed, "closing is not the engine's work"
    state = drafter_state(run.speculator.drafters[0])
    assert (state.name, state.state, state.num_attaches, dict(state.gauges)) == ("one", "detached", 1, {})

    full = [attach(run, source(f"d{number}", ScriptedDrafter({}))) for number in range(MAX_DRAFTERS + 1)]
    run.step()
    assert [done.exception() is None for done in full] == [True] * MAX_DRAFTERS + [False]
    for number in range(MAX_DRAFTERS, MAX_DRAFTER_NAMES + 1):
        detach(run, f"d{number - 1}")
        last = attach(run, source(f"d{number}", ScriptedDrafter({})))
        run.step()
    assert "use one of them again" in str(last.exception())
    back = attach(run, source("one", ScriptedDrafter({})))
    run.step()
    assert back.exception() is None and run.speculator.drafters[0].num_attaches == 2
    assert_same(run.run([one])[0], plain(one))


def test_changes_of_drafters_take_no_place_in_the_queue() -> None:
    run = Harness(HashTarget(VOCAB, 20, 4), vocab_size=VOCAB, num_blocks=20, block_size=4, max_running=1, max_waiting=1)
    for seed in range(2):
        run.submit(request(0.0, seed=seed))
    run.step()
    assert run.engine.queue_room == 0
    attach(run, source("one", ScriptedDrafter({})))
    detach(run, "one")
    assert run.engine.queue_room == 0, "taken for ends that free a place"
    run.step()
    assert run.engine.queue_room == 0


class HiddenStateReader(ScriptedDrafter):
    """A drafter that wants one layer's hidden states."""

    def __init__(self, layer: int) -> None:
        super().__init__({})
        self._layer = layer
        self.num_hidden = 0

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds(captured_layers=(self._layer,))

    def draft(self, request: DraftRequest) -> DraftBatch:
        self.num_hidden += len(request.hidden)
        return super().draft(request)


def test_hidden_states_of_a_drafter_that_attaches_within_a_step() -> None:
    """A bug once: the step had captured other states than the drafter wants; the engine died."""
    one = request(0.0, "merge")
    expected = plain(one)
    late = HiddenStateReader(2)
    run = harness(first=HiddenStateReader(1))
    got = run_with(run, [one], {10: lambda: attach(run, source("late", late))})[0]
    assert_same(got, expected)
    assert late.num_hidden > 0


class Closed:
    """A transport that nobody may use any more."""

    name = "in-process"

    def receive(self, timeout_s: float) -> DraftBatch | None:
        raise AssertionError("a detached drafter is listened to")

    post = release = receive


def test_what_was_asked_in_passing_is_not_read_any_more() -> None:
    one = request(0.0)
    run = harness(one=ScriptedDrafter({}))
    key = run.submit(one)
    drafter = run.speculator.drafters[0]
    while drafter.attachment is None or drafter.attachment._scout is None:
        run.step()
    detach(run, "one")
    run.sources[0].transport = Closed()  # type: ignore[assignment]
    while not run.results[key].is_done:
        run.step()
    assert_same(run.results[key], plain(one))


def test_a_drafter_in_this_process() -> None:
    one = request(0.0, "inside")
    expected = plain(one)
    inside = InProcessClient("inside", script(one, expected), TARGET, EPOCH)
    run = Harness(HashTarget(VOCAB, 400, 4), vocab_size=VOCAB, num_blocks=400, block_size=4, sources=[inside])
    gone: list[Future[DraftSource]] = []
    again = source("inside", script(one, expected, 2))
    at = {20: lambda: gone.append(detach(run, "inside")), 35: lambda: attach(run, again)}
    got = run_with(run, [one], at)[0]
    assert_same(got, expected)
    assert accepted_after(got, 0, 1) > accepted_after(got, 35, 1) > 0
    # Closed while the engine goes on without it.
    assert gone[0].result() is inside and inside.transport is not None
    inside.close()
    assert inside.transport is None
    assert_same(run.run([one])[0], expected)
