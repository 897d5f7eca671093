"""Each sequence gets a span, child of the caller's, with the times that the engine measured."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
import torch

from foretoken.models.batch import ForwardBatch
from foretoken.tracing import make_tracer
from protos import common_pb2, verifier_pb2
from tests.support.collector import ReceivedSpan, collecting
from tests.support.engine_harness import Harness
from tests.verifier_svc.test_service import sequence, served, until

TRACE, PARENT = "a" * 32, "b" * 16
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


def test_sequences_are_children_of_their_callers_spans() -> None:
    with collecting() as collector:
        asyncio.run(run_all(collector.endpoint))
        found = collector.spans(6, "sequence")
    spans = {span.attributes["foretoken.request_id"]: span for span in found if span.name == "sequence"}
    assert {span.service for span in found} == {"foretoken-verifier"}
    for name in ("done", "stopped", "metadata"):
        check_times(spans[name])
        assert (spans[name].trace_id, spans[name].parent_id, spans[name].is_error) == (TRACE, PARENT, False)
    assert spans["done"].trace_state == "vendor=1"
    assert spans["done"].attributes["gen_ai.usage.input_tokens"] == 3
    assert spans["done"].attributes["gen_ai.usage.output_tokens"] == 8
    assert spans["done"].attributes["spec.steps"] == 7
    assert (spans["late"].is_error, spans["late"].attributes["error.type"]) == (True, "deadline_exceeded")
    for name in ("dropped", "left"):
        assert (spans[name].is_error, spans[name].attributes["error.type"]) == (True, "cancelled")
    # Without the caller's context it gets a trace of its own.
    assert spans["left"].parent_id == "" and spans["left"].trace_id != TRACE
    for name in ("done", "stopped", "dropped", "metadata"):
        check_phases(spans[name], [span for span in found if span.parent_id == spans[name].span_id])
    # The engine sends no times of a failure, nor after the caller left.
    for name in ("late", "left"):
        assert [span for span in found if span.parent_id == spans[name].span_id] == []


def check_times(span: ReceivedSpan) -> None:
    names = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    queue, prefill, decode = (span.attributes[f"gen_ai.latency.{name}"] for name in names)
    assert min(queue, prefill, decode) >= 0 and prefill > 0
    assert span.attributes["gen_ai.latency.time_in_model_inference"] == pytest.approx(prefill + decode)
    assert queue + prefill + decode <= span.duration_s + 1e-3


def check_phases(span: ReceivedSpan, children: list[ReceivedSpan]) -> None:
    """Assert that the phases follow one another without gaps, up to the end of the sequence."""
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    queue, prefill, decode = children
    assert (queue.ended_ns, prefill.ended_ns, decode.ended_ns) == (prefill.began_ns, decode.began_ns, span.ended_ns)
    assert queue.began_ns <= queue.ended_ns
    for child, name in zip(children, ("in_queue", "in_model_prefill", "in_model_decode"), strict=True):
        assert child.duration_s == pytest.approx(span.attributes[f"gen_ai.latency.time_{name}"], abs=1e-6)
        assert child.trace_id == span.trace_id and not child.is_error


async def run_all(endpoint: str) -> None:
    tracer = make_tracer(endpoint, "verifier")
    assert tracer is not None
    long = common_pb2.SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    async with asyncio.timeout(120), served({}, tracer) as (stub, harness, _):
        gate = held(harness)
        call = stub.Session()

        async def submit(name: str, **fields: object) -> None:
            await call.write(verifier_pb2.SessionRequest(submit=sequence(name, **fields)))

        async def running() -> None:
            await until(lambda: bool(harness.engine.scheduler.running))

        async def ended(name: str) -> None:
            gate.set()
            async for response in call:
                if any(event.request_id == name for event in (*response.finished, *response.errors)):
                    return

        await submit("done", **CONTEXT)
        await ended("done")
        gate.clear()
        await submit("late", sampling=long, timeout_ms=1, **CONTEXT)
        passed_at = time.monotonic() + 0.002
        await until(lambda: time.monotonic() > passed_at)
        await ended("late")
        for name, kept in (("stopped", 1), ("dropped", None)):
            gate.clear()
            await submit(name, sampling=long, **CONTEXT)
            await running()
            abort = verifier_pb2.Abort(request_id=name, kept_tokens=kept)
            await call.write(verifier_pb2.SessionRequest(abort=abort))
            await until(lambda: bool(harness.engine._inbox))
            await ended(name)
        gate.clear()
        await submit("left", sampling=long)
        await running()
        call.cancel()
        await until(lambda: bool(harness.engine._inbox))
        gate.set()
        await until(lambda: harness.engine.is_idle)
        request = verifier_pb2.GenerateRequest(sequence=sequence("metadata"))
        async for _ in stub.Generate(request, metadata=list(CONTEXT.items())):
            pass
    await asyncio.to_thread(tracer.close)


def held(harness: Harness) -> threading.Event:
    """Return an event; while it is clear, the engine stops in its next forward pass."""
    gate, forward = threading.Event(), harness.runner.forward
    gate.set()

    def wait_then_forward(batch: ForwardBatch, captured_layers: tuple[int, ...]) -> torch.Tensor:
        gate.wait()
        return forward(batch, captured_layers)

    harness.runner.forward = wait_then_forward  # type: ignore[method-assign]
    return gate


def test_without_a_tracer_nothing_is_kept() -> None:
    async def run() -> None:
        async with asyncio.timeout(60), served({}) as (stub, _, _):
            request = verifier_pb2.GenerateRequest(sequence=sequence("plain", **CONTEXT))
            try:
                assert [response async for response in stub.Generate(request)][-1].HasField("finished")
            except grpc.aio.AioRpcError as error:
                raise AssertionError(error.details()) from error

    asyncio.run(run())
