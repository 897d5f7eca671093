"""Drafters lie, stall and die under an engine, over every transport.

The text stays, each fault is counted, the circuit opens, and a drafter that behaves again is used
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor

from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.sampling import SamplingParams
from protos import drafter_pb2
from tests.support.draft_requests import draft_batch
from tests.support.engine_harness import EPOCH, Harness, Request, Result
from tests.support.hash_target import HashTarget
from tests.support.lying_drafter import Bent, Lie, LyingServer
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import MAX_CONSECUTIVE_FAILURES, DraftSource
from verifier_svc.drafters.stream import StreamTransport
from verifier_svc.drafters.waits import AFFORDABLE_SHARE, AFFORDABLE_TIMEOUTS, WaitBudget

VOCAB = 40
TARGET = TargetInfo("test", VOCAB, 256, 8, 8)
WIRES = ("shared-memory", "grpc")
TRANSPORTS = (*WIRES, "in-process")
# Lies enough to open the circuit, and then some.
NUM_LIES = MAX_CONSECUTIVE_FAILURES + 1
REQUESTS = [
    Request(
        np.random.default_rng(seed).integers(0, VOCAB, 11).tolist(),
        SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True),
    )
    for seed, temperature in enumerate((0.0, 1.0))
]


def harness(source: DraftSource | None = None, timeout_s: float = 5.0, **options: Any) -> Harness:
    sources = [] if source is None else [source]
    return Harness(
        HashTarget(VOCAB, 600, 4),
        vocab_size=VOCAB,
        num_blocks=600,
        block_size=4,
        sources=sources,
        timeout_s=timeout_s,
        **options,
    )


@pytest.fixture(name="expected", scope="module")
def _expected() -> list[Result]:
    return harness().run([request.plain() for request in REQUESTS])


def scripted(expected: list[Result]) -> ScriptedDrafter:
    outputs = {(tuple(r.prompt), 0): [*out.token_ids, 1, 2] for r, out in zip(REQUESTS, expected, strict=True)}
    return ScriptedDrafter(outputs)


@contextmanager
def source_of(bent: Bent, transport: str, folder: Path) -> Iterator[DraftSource]:
    if transport == "in-process":
        inside = InProcessClient("liar", bent, TARGET, EPOCH)
        yield inside
        inside.close()
        return
    server = LyingServer(bent, folder)
    endpoint = DrafterEndpoint(name="liar", address=server.address, transport=transport)  # type: ignore[arg-type]
    client = DrafterClient(endpoint, TARGET, EPOCH)
    client.start()
    try:
        until(lambda: client.transport is not None)
        yield client
    finally:
        client.close()
        server.close()


def wait_arrived(source: DraftSource) -> None:
    """Wait until a stream's reply has arrived, as it would have during a real target's step."""
    transport, deadline = source.transport, time.monotonic() + 0.02
    while isinstance(transport, StreamTransport) and transport._replies.empty() and time.monotonic() < deadline:
        time.sleep(0.0002)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def bent_columns(**changes: Callable[[DraftBatch], Any]) -> Lie:
    """Return a lie: the honest reply with columns replaced."""
    return lambda request, batch: replace(batch, **{name: change(batch) for name, change in changes.items()})


def with_item(name: str, index: int, value: int) -> Lie:
    """Return a lie: two nodes below each root, and item ``index`` of ``name`` is ``value``."""

    def lie(request: DraftRequest, batch: DraftBatch) -> DraftBatch:
        return trees(request, batch, **{name: (index, value)})

    return lie


def trees(
    request: DraftRequest,
    batch: DraftBatch,
    *,
    num_nodes: int = 3,
    tokens: tuple[int, int] | None = None,
    parents: tuple[int, int] | None = None,
) -> DraftBatch:
    """Return a chain of ``num_nodes`` for each row that may draft, with one item changed."""
    starts, all_tokens, all_parents = [0], [], []
    for row in range(request.num_rows):
        n = num_nodes if request.max_nodes[row] > 1 else 1
        columns = np.full(n, 5, np.int32), np.arange(-1, n - 1, dtype=np.int32)
        columns[0][0] = batch.tokens[batch.node_starts[row]]
        for column, change in zip(columns, (tokens, parents), strict=True):
            if change is not None and n > change[0]:
                column[change[0]] = change[1]
        all_tokens.append(columns[0])
        all_parents.append(columns[1])
        starts.append(starts[-1] + n)
    return draft_batch(
        batch.epoch,
        batch.step_id,
        np.array(starts, np.int32),
        np.concatenate(all_tokens),
        np.concatenate(all_parents),
    )


LIES: dict[str, Lie] = {
    "negative id": with_item("tokens", 1, -1),
    "id beyond the vocabulary": with_item("tokens", 2, VOCAB),
    "largest id": with_item("tokens", 1, 2**31 - 1),
    "another root": with_item("tokens", 0, VOCAB + 1),
    "a node that is its own parent": with_item("parents", 1, 1),
    "a parent that comes later": with_item("parents", 1, 2),
    "a parent beyond the tree": with_item("parents", 2, 7),
    "a second root": with_item("parents", 2, -1),
    "a root with a parent": with_item("parents", 0, 0),
    "too many nodes": lambda request, batch: trees(request, batch, num_nodes=9),
    "no row": bent_columns(
        node_starts=lambda _: np.zeros(1, np.int32),
        tokens=lambda _: np.zeros(0, np.int32),
        parents=lambda _: np.zeros(0, np.int32),
        scores=lambda _: np.zeros(0, np.float32),
    ),
    "offsets beyond the nodes": bent_columns(node_starts=lambda batch: batch.node_starts + np.int32(3)),
    "offsets that fall": bent_columns(node_starts=lambda batch: batch.node_starts[::-1].copy()),
    "scores that are no numbers": bent_columns(scores=lambda batch: np.full_like(batch.scores, np.nan)),
    "an old step": bent_columns(step_id=lambda batch: batch.step_id - 1),
    "another epoch": bent_columns(epoch=lambda batch: batch.epoch + 1),
}
ARENA_LIES: dict[str, Lie] = {
    "zeroes": lambda request, batch: b"\0",
    "all ones": lambda request, batch: b"\xff",
    "text": lambda request, batch: b"garbage ",
    # The header of this reply over trees that belong to no reply.
    "a torn reply": lambda request, batch: (
        np.array([batch.epoch, batch.step_id], "<u8").tobytes()
        + np.array([request.num_rows, 3 * request.num_rows], "<u4").tobytes()
    ),
}


@pytest.mark.parametrize(
    "transport", [TRANSPORTS[0], *(pytest.param(other, marks=pytest.mark.slow) for other in TRANSPORTS[1:])]
)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_costs_root_only_steps_and_a_counter(
    lie: Lie, transport: str, expected: list[Result], tmp_path: Path
) -> None:
    assert_survives(lie, transport, expected, tmp_path)


@pytest.mark.parametrize("lie", ARENA_LIES.values(), ids=ARENA_LIES)
def test_garbage_in_the_arena_costs_root_only_steps_and_a_counter(
    lie: Lie, expected: list[Result], tmp_path: Path
) -> None:
    assert_survives(lie, "shared-memory", expected, tmp_path)


def assert_survives(lie: Lie, transport: str, expected: list[Result], folder: Path) -> None:
    """Assert plain decode's text during lies, an open circuit, and accepted drafts afterwards."""
    bent = Bent(scripted(expected), lie, 0)
    with source_of(bent, transport, folder) as source:
        run = harness(source, timeout_s=600.0)
        counters = run.speculator.drafter("liar").counters
        began_to_lie = False

        def next_reply(_: Harness) -> None:
            nonlocal began_to_lie
            if not began_to_lie and counters.num_accepted_tokens:
                began_to_lie, bent.lies_left = True, NUM_LIES
            # The drafter has time to answer between two steps, as a real target gives it.
            if transport != "in-process" and bent.handled.wait(0.02):
                wait_arrived(source)
            bent.handled.clear()

        fallback_steps = num_accepted = 0
        while not began_to_lie or bent.lies_left or source.num_attaches < 2 or not num_accepted:
            before = counters.num_accepted_tokens
            attached = source.num_attaches
            got = run.run(REQUESTS, every_step=next_reply)
            assert [result.token_ids for result in got] == [result.token_ids for result in expected]
            fallback_steps += sum(r.finished.speculation.fallback_steps for r in got if r.finished)
            # Counted for requests that ran after the circuit had closed again.
            num_accepted = counters.num_accepted_tokens - before if attached >= 2 and not bent.lies_left else 0
        run.drain()
        assert counters.num_rejected_drafts + source.num_rejected > 0
        assert fallback_steps > 0
        assert source.state == "attached"


def test_padding_ids_are_legal_and_never_accepted(expected: list[Result], tmp_path: Path) -> None:
    """The output head is padded beyond the tokenizer's ids: embedding rows without a token."""
    limit = VOCAB - 4
    plain = harness(token_limit=limit).run([request.plain() for request in REQUESTS])
    bent = Bent(scripted(plain), with_item("tokens", 1, VOCAB - 1), 10**6)
    with source_of(bent, "in-process", tmp_path) as source:
        run = harness(source, token_limit=limit)
        got = run.run(REQUESTS)
        run.drain()
        assert [result.token_ids for result in got] == [result.token_ids for result in plain]
        assert (
            run.speculator.drafter("liar").counters.num_draft_tokens
            > run.speculator.drafter("liar").counters.num_accepted_tokens
        )


def test_only_scores_could_be_no_numbers() -> None:
    """Replies whose scores are not numbers are among the lies above."""
    fields = drafter_pb2.DraftResponse.DESCRIPTOR.fields
    floats = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_MESSAGE)
    assert [field.name for field in fields if field.cpp_type in floats] == ["scores"]


class Clock:
    """A clock that moves only when somebody waits or a step runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowSource:
    """An in-process drafter to wait for.

    Each awaited draft takes ``delay_s`` of the clock; scouted drafts are late.
    """

    transport_name = "in-process"
    address = ""

    def __init__(self, drafter: ScriptedDrafter, clock: Clock, timeout_s: float) -> None:
        self._inside = InProcessClient("slow", drafter, TARGET, EPOCH, clock=clock)
        self._clock = clock
        self._timeout_s = timeout_s
        self.delay_s = 0.0
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    @property
    def transport(self) -> Any:
        return None if self._inside.transport is None else self

    def post(self, request: DraftRequest) -> None:
        self._inside.transport.post(request)  # type: ignore[union-attr]

    def post_unawaited(self, request: DraftRequest) -> None:
        self.post(request)

    def begin_unawaited(self, least: int = 0) -> None:
        return

    def release(self, batch_slots: Any) -> None:
        self._inside.transport.release(batch_slots)  # type: ignore[union-attr]

    def receive(self, timeout_s: float) -> DraftBatch | None:
        batch = self._inside.transport.receive(0.0)  # type: ignore[union-attr]
        waited_s = min(self.delay_s, timeout_s)
        self._clock.now += waited_s
        if timeout_s:
            self.waits.append(waited_s)
        return batch if self.delay_s <= timeout_s else None


STEP_S = 0.001
TIMEOUT_S = 0.2


def slow_run(drafter: ScriptedDrafter, **sizes: Any) -> tuple[Harness, SlowSource, Clock]:
    """Return an engine whose plain step takes a millisecond of the clock."""
    clock = Clock()
    source = SlowSource(drafter, clock, TIMEOUT_S)
    costs = {1: STEP_S, 256: STEP_S * 1.001}
    run = harness(source, timeout_s=TIMEOUT_S, clock=clock, costs=costs, **sizes)  # type: ignore[arg-type]
    return run, source, clock


def tick_fast(clock: Clock) -> Callable[[Harness], None]:
    def tick(_: Harness) -> None:
        clock.now += STEP_S

    return tick


@pytest.mark.parametrize(
    "share_of_timeout", [0.05, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.9))]
)
def test_a_slow_drafter_is_hardly_waited_for_and_used_again_once_it_is_fast(share_of_timeout: float) -> None:
    """The cost is also bounded for a drafter that never misses a time-out, whatever is accepted."""
    sizes: dict[str, Any] = {"max_model_len": 2048}
    long = replace(REQUESTS[0], sampling=replace(REQUESTS[0].sampling, max_tokens=1500))
    (plain,) = harness(**sizes).run([long.plain()])
    run, source, clock = slow_run(ScriptedDrafter({(tuple(long.prompt), 0): plain.token_ids}), **sizes)
    late: list[float] = []
    began = 0.0

    def tick(_: Harness) -> None:
        nonlocal began
        clock.now += STEP_S
        if len(source.waits) > 20 and not source.delay_s:
            began, source.delay_s, source.waits = clock.now, share_of_timeout * TIMEOUT_S, late

    (got,) = run.run([long], every_step=tick)
    assert got.token_ids == plain.token_ids
    # The budget at hand, one wait that overdraws it, and the budget's share of the time.
    affordable_s = (AFFORDABLE_TIMEOUTS + 1) * TIMEOUT_S + AFFORDABLE_SHARE * (clock.now - began)
    worth_s = len(late) * (TARGET.max_nodes - 1) * STEP_S * 1.01
    assert late and sum(late) < affordable_s + worth_s
    source.delay_s = 0.0
    counters = run.speculator.drafter("slow").counters
    accepted = counters.num_accepted_tokens
    while counters.num_accepted_tokens < accepted + 100:
        run.run([long], every_step=tick_fast(clock))
    run.drain()


def test_a_drafter_that_stops_opens_the_circuit_within_the_first_time_outs(expected: list[Result]) -> None:
    run, source, clock = slow_run(scripted(expected))
    stopped_at = detached_at = 0.0
    late: list[float] = []

    def tick(_: Harness) -> None:
        nonlocal stopped_at, detached_at, late
        clock.now += STEP_S
        if source.waits and not stopped_at:
            stopped_at, source.delay_s, source.waits = clock.now, 3600.0, late
        if source.num_attaches > 1 and not detached_at:
            detached_at = clock.now

    while not detached_at:
        got = run.run(
            [replace(request, sampling=replace(request.sampling, max_tokens=200)) for request in REQUESTS],
            every_step=tick,
        )
        assert [result.token_ids[:60] for result in got] == [result.token_ids for result in expected]
    # Waits for the new attachment are paid from the rest of the budget.
    assert stopped_at and 0 < len(late) <= AFFORDABLE_TIMEOUTS + 1
    assert detached_at - stopped_at < 1.0
    run.drain()


def test_the_wait_budget_is_spent_on_what_cannot_pay_and_comes_back_with_time() -> None:
    budget = WaitBudget(0.2)
    assert budget.has_some(0.0)
    for _ in range(100):
        budget.spend(0.002, 0.0)
    assert budget.has_some(0.0)
    for _ in range(3):
        budget.spend(0.21, 0.21)
    assert not budget.has_some(0.0)
    assert not budget.has_some(1.0)
    assert budget.has_some(2.0)


def test_late_scouts_are_time_outs_only_after_an_awaited_draft() -> None:
    budget = WaitBudget(0.2)
    assert not budget.times_out_again(100.0)
    budget.time_out(100.0)
    assert not budget.times_out_again(100.1)
    assert budget.times_out_again(100.2) and not budget.times_out_again(100.3)
    budget.answer()
    assert not budget.times_out_again(200.0)
