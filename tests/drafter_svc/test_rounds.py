"""What a drafter did for a sequence: counted by batch slot and
generation, and a span in the request's trace.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from drafter_svc.rounds import RoundCounts, SequenceRounds
from foretoken.tracing import make_tracer
from protos import drafter_pb2
from tests.drafter_svc.test_service import EPOCH, proto, served
from tests.support.collector import collecting
from tests.support.draft_requests import draft_request

TRACE, PARENT = "a" * 32, "b" * 16
SECOND = 10**9


def test_rounds_tokens_and_time_add_up_for_each_sequence() -> None:
    counts = RoundCounts(4)
    counts.count(draft_request([[1, 2, 3], [4]], max_nodes=[4, 1]), 10 * SECOND, 11 * SECOND)
    # An empty batch row has batch slot -1.
    request = draft_request([[5], [], []], batch_slots=[0, -1, -1], generations=[1, 0, 0], max_nodes=[4, 1, 1])
    counts.count(request, 20 * SECOND, 22 * SECOND)
    assert counts.take(0, 1) == SequenceRounds(10 * SECOND, 22 * SECOND, 2, 4, 3.0)
    # Batch slot 1 only learned a token.
    assert counts.take(1, 1) == SequenceRounds(10 * SECOND, 11 * SECOND, 0, 1, 1.0)
    assert counts.take(0, 1) is None and counts.take(2, 1) is None and counts.take(9, 1) is None


def test_a_batch_slots_next_sequence_begins_anew_and_the_former_one_is_kept() -> None:
    counts = RoundCounts(2)
    counts.count(draft_request([[1]], batch_slots=[1], generations=[7]), 1, 2)
    # The last tokens of the ended sequence come before the new one, in one request.
    both = draft_request([[2, 3], [4]], batch_slots=[1, 1], generations=[7, 8], max_nodes=[1, 4])
    counts.count(both, 3, 4)
    assert counts.take(1, 7) == SequenceRounds(1, 4, 1, 3, 2 / SECOND)
    assert counts.take(1, 8) == SequenceRounds(3, 4, 1, 1, 1 / SECOND)


def test_sequences_that_nobody_asks_for_do_not_pile_up() -> None:
    counts = RoundCounts(2)
    for generation in range(1, 6):
        counts.count(draft_request([[1]], generations=[generation]), generation, generation + 1)
    assert [counts.take(0, generation) is not None for generation in range(1, 6)] == [False, False, True, True, True]


def test_a_traced_sequence_gets_one_span_of_the_drafter(tmp_path: Path) -> None:
    async def scenario(endpoint: str) -> None:
        tracer = make_tracer(endpoint, "drafter")
        assert tracer is not None
        async with served(tmp_path, tracer) as service:
            await service.attach()
            call = service.stub.Draft()
            for step_id in (3, 4):
                await call.write(proto([[5, 6], [9]], step_id=step_id, max_nodes=[3, 1]))
                await call.read()
            parent = f"00-{TRACE}-{PARENT}-01"
            for fields in (
                {"slot": 0, "generation": 1, "traceparent": parent, "tracestate": "vendor=1"},
                # Told once; another sequence of the batch slot; another attachment; no context.
                {"slot": 0, "generation": 1, "traceparent": parent},
                {"slot": 1, "generation": 2, "traceparent": parent},
                {"slot": 1, "generation": 1, "traceparent": parent, "epoch": EPOCH + 1},
                {"slot": 1, "generation": 1, "traceparent": "nonsense"},
            ):
                await service.stub.TraceSequence(drafter_pb2.TraceSequenceRequest(**({"epoch": EPOCH} | fields)))
            call.cancel()
        await asyncio.to_thread(tracer.close)

    with collecting() as collector:
        asyncio.run(scenario(collector.endpoint))
        (span,) = collector.spans(1)
    assert (span.service, span.name, span.trace_id, span.parent_id) == ("foretoken-drafter", "draft", TRACE, PARENT)
    assert span.trace_state == "vendor=1" and span.began_ns < span.ended_ns
    expected = {"spec.drafter": "mirror", "spec.algorithm": "MIRROR", "spec.transport": "grpc"}
    assert expected.items() <= span.attributes.items()
    assert (span.attributes["spec.rounds"], span.attributes["spec.tokens_sent"]) == (2, 4)
    assert 0 < span.attributes["spec.draft_time"] <= span.duration_s


def test_without_a_collector_nothing_is_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            await service.attach()
            call = service.stub.Draft()
            await call.write(proto([[5, 6]], step_id=3))
            await call.read()
            assert await asyncio.wrap_future(service.thread.rounds(EPOCH, 0, 1)) is None
            request = drafter_pb2.TraceSequenceRequest(epoch=EPOCH, generation=1, traceparent=f"00-{TRACE}-{PARENT}-01")
            assert await service.stub.TraceSequence(request) == drafter_pb2.TraceSequenceResponse()
            call.cancel()

    asyncio.run(scenario())
