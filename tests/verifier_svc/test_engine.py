"""The engine apart from decoding: refusals, deadlines, aborts, statistics, a dead engine."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import grpc
import pytest

from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc import engine
from verifier_svc.messages import CloseSession, TokensEvent

VOCAB = 40


def harness(**options: object) -> Harness:
    return Harness(HashTarget(VOCAB, 100, 4), vocab_size=VOCAB, num_blocks=100, block_size=4, **options)  # type: ignore[arg-type]


def request(max_tokens: int = 20, **fields: object) -> Request:
    return Request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


def code(status: grpc.StatusCode) -> int:
    return int(status.value[0])


def test_a_full_queue_refuses_and_serves_what_it_took() -> None:
    # One can start at once, two wait.
    run = harness(max_running=1, max_waiting=2)
    keys = [run.submit(request()) for _ in range(5)]
    run.step()
    errors = [run.results[key].error for key in keys]
    assert [error.code if error else 0 for error in errors] == [0, 0, 0] + [
        code(grpc.StatusCode.RESOURCE_EXHAUSTED)
    ] * 2
    run.drain()
    assert all(run.results[key].finished for key in keys[:2])


def test_a_resumed_sequence_passes_the_queues_limit_and_the_new_ones_in_it() -> None:
    run = harness(max_running=1, max_waiting=2)
    keys = [run.submit(request(max_tokens=5))]
    run.step()
    keys += [run.submit(request(max_tokens=5)) for _ in range(3)]
    resumed = [run.submit(request(max_tokens=5, output=(4, 5), attempt=1)) for _ in range(2)]
    run.step()
    assert run.results[keys[3]].error is not None
    assert [sequence.submission.attempt for sequence in run.scheduler.waiting] == [1, 1, 0, 0]
    ends = []
    while not run.engine.is_idle:
        run.step()
        ends += [key for key, result in run.results.items() if result.finished and key not in ends]
    assert ends == [keys[0], *resumed, *keys[1:3]]
    run.drain()


def test_a_preempted_sequence_waits_before_a_resumed_one() -> None:
    run = Harness(HashTarget(VOCAB, 8, 4), vocab_size=VOCAB, num_blocks=8, block_size=4, max_model_len=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=25)
    first, second = (run.submit(Request([number, 2, 3], sampling)) for number in range(2))
    while not run.scheduler.num_preemptions:
        run.step()
    resumed = run.submit(request(max_tokens=25, output=(4,), attempt=1))
    run.step()
    assert [sequence.key for sequence in run.scheduler.waiting] == [second, resumed]
    run.drain()
    assert run.results[first].finished and run.results[second].finished and run.results[resumed].finished


def test_what_the_prefix_cache_held_comes_with_the_first_tokens_of_an_attempt() -> None:
    run = harness()
    prompt = Request(list(range(1, 14)), SamplingParams(temperature=0.0, max_tokens=3))
    run.run([prompt])
    run.submit(prompt)
    run.engine.run_step()
    run.engine.run_step()
    (event,) = run.outbox.take()
    assert isinstance(event, TokensEvent) and len(event.token_ids) == 2
    assert event.num_cached_tokens == 12
    run.drain()


def test_a_passed_deadline_ends_the_sequence_and_frees_its_blocks() -> None:
    run = harness()
    late = run.submit(request(deadline=time.monotonic() - 1))
    fine = run.submit(request(deadline=time.monotonic() + 600))
    run.drain()
    error = run.results[late].error
    assert error is not None and error.code == code(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert run.results[fine].finished is not None


def test_an_identity_that_runs_is_refused() -> None:
    run = harness()
    first = run.submit(request(), "same")
    run.step()
    assert run.results[first].token_ids
    assert run.submit(request(attempt=1), "same") == first
    run.step()
    error = run.results[first].error
    assert error is not None and error.field == "request_id"


def test_a_complete_output_cannot_be_resumed() -> None:
    run = harness()
    key = run.submit(request(max_tokens=2, output=[4, 5]))
    run.step()
    error = run.results[key].error
    assert error is not None and error.code == code(grpc.StatusCode.FAILED_PRECONDITION)


def test_a_draining_engine_finishes_what_runs_and_takes_no_more() -> None:
    run = harness()
    first = run.submit(request())
    run.step()
    run.engine.drain()
    second = run.submit(request())
    run.drain()
    assert run.results[first].finished is not None
    error = run.results[second].error
    assert error is not None and error.code == code(grpc.StatusCode.UNAVAILABLE)


def test_the_context_end_is_a_length_finish() -> None:
    run = harness(max_model_len=10)
    result = run.run([request(max_tokens=500)])[0]
    assert result.finished is not None
    assert result.finished.reason is FinishReason.LENGTH
    assert len(result.token_ids) == 7


def test_an_abort_frees_the_blocks_in_the_next_step_and_counts_the_kept_tokens() -> None:
    plain = harness().run([request(max_tokens=30)])[0].token_ids
    run = harness(drafters={"scripted": ScriptedDrafter({((1, 2, 3), 0): plain})})
    key = run.submit(request(max_tokens=30))
    while len(run.results[key].token_ids) < 12:
        run.step()
    run.abort(key, kept_tokens=4)
    run.step()
    assert run.blocks.num_free_blocks == run.blocks.num_blocks
    finished = run.results[key].finished
    assert finished is not None and finished.reason is FinishReason.ABORT
    # The first token is prefill's; decode steps count up to the fourth token, the last one whole.
    assert 3 <= finished.speculation.num_decode_tokens < 12


def test_a_closed_session_leaves_nothing() -> None:
    run = harness()
    for _ in range(3):
        run.submit(request(max_tokens=100))
    run.step()
    run.engine.send(CloseSession(run.session))
    run.step()
    assert run.engine.is_idle
    assert run.blocks.num_free_blocks == run.blocks.num_blocks


def test_statistics_follow_their_formulas() -> None:
    plain = harness().run([request(max_tokens=30)])[0].token_ids
    run = harness(drafters={"scripted": ScriptedDrafter({((1, 2, 3), 0): plain})})
    result = run.run([request(max_tokens=30)])[0]
    assert result.finished is not None
    stats = result.finished.speculation
    counters = run.speculator.drafter("scripted").counters
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps == counters.num_drafts
    accepted = sum(k * n for k, n in enumerate(stats.acceptance_histogram))
    assert accepted == stats.num_accepted_tokens == counters.num_accepted_tokens
    assert stats.num_draft_tokens == counters.num_draft_tokens
    assert stats.num_decode_steps == stats.num_spec_steps + stats.fallback_steps
    # Every decode step emits its accepted tokens and one more; the first token is prefill's.
    assert stats.num_decode_tokens == stats.num_decode_steps + stats.num_accepted_tokens
    assert stats.num_decode_tokens >= len(result.token_ids) - 1
    assert sum(1 for source in result.sources if source == 1) <= stats.num_accepted_tokens
    assert counters.accepted_per_position[0] >= counters.accepted_per_position[-1] > 0


def test_a_step_that_raises_ends_the_engine_and_says_so() -> None:
    class Broken(HashTarget):
        def forward(self, batch, captured_layers=()):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of order")

    run = Harness(Broken(VOCAB, 100, 4), vocab_size=VOCAB, num_blocks=100, block_size=4)
    run.engine.start()
    run.submit(request())
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread.join()
    assert not run.engine.is_alive()
    assert isinstance(run.engine.failure, RuntimeError)


@pytest.mark.parametrize("wait", [0, 1])
def test_an_idle_engine_thread_wakes_for_a_message_and_stops(wait: int) -> None:
    run = harness()
    arrived = threading.Event()
    run.outbox._wake = arrived.set
    run.engine.start()
    for _ in range(wait + 1):
        arrived.clear()
        run.submit(request(max_tokens=1))
        arrived.wait()
        run.outbox.take()
    run.engine.stop()
    assert not run.engine.is_alive() and run.engine.failure is None


def test_an_engine_is_prepared_once_the_graphs_of_a_later_drafter_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readiness may still wait for that drafter. Nobody waits for ever."""
    now, has_more = 0.0, False
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now))
    run = harness(
        overlap_runs=SimpleNamespace(prepare=lambda speculator: has_more), drafters={"head": ScriptedDrafter({})}
    )
    assert not run.engine.is_prepared
    run.engine._prepare()
    assert run.engine.is_prepared
    run.sources[0].num_attaches += 1
    has_more, now = True, 500.0
    run.engine._prepare()
    assert not run.engine.is_prepared
    now += engine._PREPARES_S + 1
    assert run.engine.is_prepared
    has_more = False
    run.sources[0].num_attaches += 1
    run.engine._prepare()
    assert run.engine.is_prepared
