"""The verifier's service over real gRPC: sessions, error events, hostile values, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import torch

from foretoken import rpc
from foretoken.limits import MAX_LOGIT_BIAS_ENTRIES, ModelLimits
from foretoken.models.batch import ForwardBatch
from foretoken.tracing import Tracer
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.block_books import check_blocks
from tests.support.engine_harness import Harness
from tests.support.hash_target import HashTarget
from tests.support.sampling_limits import at_the_ends_on_the_wire, beyond_on_the_wire
from tests.support.services import verifier_info
from verifier_svc.service import VerifierService

VOCAB = 40
CONTEXT = 64
Stub = Any


def run(scenario: Callable[[Stub, Harness], Awaitable[None]], **options: object) -> None:
    asyncio.run(_run(scenario, options))


async def _run(scenario: Callable[[Stub, Harness], Awaitable[None]], options: dict[str, object]) -> None:
    async with served(options) as (stub, harness, _):
        await scenario(stub, harness)
        # Whatever happened, every block comes back.
        blocks = harness.blocks
        await until(lambda: harness.engine.is_idle and blocks.num_free_blocks == blocks.num_blocks)
    # The engine has stopped: it is in no step that could be half done.
    check_blocks(blocks)


@contextlib.asynccontextmanager
async def served(
    options: dict[str, object], tracer: Tracer | None = None
) -> AsyncIterator[tuple[Stub, Harness, VerifierService]]:
    target: HashTarget = options.pop("target", None) or HashTarget(VOCAB, 200, 4)  # type: ignore[assignment]
    harness = Harness(
        target,
        vocab_size=VOCAB,
        num_blocks=200,
        block_size=4,
        max_model_len=CONTEXT,
        **options,  # type: ignore[arg-type]
    )
    info = verifier_info(ModelLimits(VOCAB, CONTEXT, ("ngram",)))
    server = rpc.async_server()
    service = VerifierService(harness.engine, info, tracer)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
    port = rpc.bind(server, "127.0.0.1:0")
    harness.engine.start()
    await server.start()
    try:
        async with rpc.async_channel(f"127.0.0.1:{port}") as channel:
            yield verifier_pb2_grpc.VerifierServiceStub(channel), harness, service
    finally:
        await server.stop(None)
        harness.engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def sequence(request_id: str = "r", **fields: Any) -> verifier_pb2.Sequence:
    sampling = fields.pop("sampling", common_pb2.SamplingParams(temperature=0, max_tokens=8))
    values = {"request_id": request_id, "prompt_token_ids": [1, 2, 3], "sampling": sampling} | fields
    return verifier_pb2.Sequence(**values)


def submit(message: verifier_pb2.Sequence) -> verifier_pb2.SessionRequest:
    return verifier_pb2.SessionRequest(submit=message)


def test_a_session_streams_tokens_with_offsets_and_ends_each_sequence() -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        started = await call.read()
        assert started.started.epoch == 5 and started.started.model_fingerprint == "f" * 64
        for name in ("a", "b"):
            await call.write(submit(sequence(name)))
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        reasons = {}
        while len(reasons) < 2:
            message = await call.read()
            for part in message.tokens:
                assert part.offset == len(tokens[part.request_id])
                assert len(part.sources) == len(part.token_ids)
                tokens[part.request_id].extend(part.token_ids)
            for end in message.finished:
                reasons[end.request_id] = end.reason
        assert reasons == dict.fromkeys("ab", common_pb2.FINISH_REASON_LENGTH)
        assert tokens["a"] == tokens["b"] and len(tokens["a"]) == 8
        await call.done_writing()

    run(scenario)


def test_generate_streams_one_sequence() -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        events = [event async for event in stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence()))]
        assert sum(len(event.tokens.token_ids) for event in events) == 8
        assert events[-1].finished.num_output_tokens == 8

    run(scenario)


# More children of a node than the flags admit.
LARGE = common_pb2.DraftShape(num_steps=3, topk=5, num_draft_tokens=8)
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"sampling": common_pb2.SamplingParams(temperature=3)}, "temperature"),
    "nan temperature": ({"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, "temperature"),
    "infinite penalty": ({"sampling": common_pb2.SamplingParams(presence_penalty=float("inf"))}, "presence_penalty"),
    "top_p": ({"sampling": common_pb2.SamplingParams(top_p=0)}, "top_p"),
    "top_k": ({"sampling": common_pb2.SamplingParams(top_k=-5)}, "top_k"),
    "min_p": ({"sampling": common_pb2.SamplingParams(min_p=1.5)}, "min_p"),
    "repetition": ({"sampling": common_pb2.SamplingParams(repetition_penalty=0)}, "repetition_penalty"),
    "max_tokens": ({"sampling": common_pb2.SamplingParams(max_tokens=2**32 - 1)}, "max_tokens"),
    "no tokens": ({"sampling": common_pb2.SamplingParams(max_tokens=0)}, "max_tokens"),
    "min over max": ({"sampling": common_pb2.SamplingParams(max_tokens=3, min_tokens=4)}, "min_tokens"),
    "logprobs": ({"sampling": common_pb2.SamplingParams(logprobs=1000)}, "logprobs"),
    "bias id": ({"sampling": common_pb2.SamplingParams(logit_bias={VOCAB: 1})}, "logit_bias"),
    "bias value": ({"sampling": common_pb2.SamplingParams(logit_bias={1: 1e9})}, "logit_bias"),
    "many biases": (
        {"sampling": common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 1.0))},
        "logit_bias",
    ),
    "stop id": ({"sampling": common_pb2.SamplingParams(stop_token_ids=[VOCAB])}, "stop_token_ids"),
    "empty prompt": ({"prompt_token_ids": []}, "prompt"),
    "prompt id": ({"prompt_token_ids": [1, VOCAB]}, "prompt"),
    "long prompt": ({"prompt_token_ids": [1] * CONTEXT}, "prompt"),
    "output id": ({"output_token_ids": [2**32 - 1]}, "output_token_ids"),
    "full context": ({"prompt_token_ids": [1] * 40, "output_token_ids": [1] * 24}, "output_token_ids"),
    "choice": ({"choice_index": 2**31}, "choice_index"),
    "attempt": ({"attempt": 2**32 - 1}, "attempt"),
    "request id": ({"request_id": "x" * 10_000}, "request_id"),
    "no request id": ({"request_id": ""}, "request_id"),
    "salt": ({"cache_salt": "x" * 10_000}, "cache_salt"),
    "timeout": ({"timeout_ms": 2**63}, "timeout_ms"),
    "drafter": ({"speculation": common_pb2.SpeculationOptions(drafter="nobody")}, "speculative.drafter"),
    "width": ({"speculation": common_pb2.SpeculationOptions(max_draft_tokens=10_000)}, "speculative.max_draft_tokens"),
    "shape": ({"speculation": common_pb2.SpeculationOptions(shape=LARGE)}, "speculative.shape.topk"),
    "another model": ({"model_fingerprint": "other"}, "model_fingerprint"),
}


def test_numbers_are_taken_to_the_ends_of_their_ranges_and_not_beyond() -> None:
    async def outcome(stub: Stub, sampling: common_pb2.SamplingParams) -> str:
        try:
            request = verifier_pb2.GenerateRequest(sequence=sequence(sampling=sampling))
            events = [event async for event in stub.Generate(request)]
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return rpc.error_from_rpc(error).field
        assert events[-1].HasField("finished")
        return ""

    async def scenario(stub: Stub, harness: Harness) -> None:
        for field, sampling in beyond_on_the_wire():
            assert await outcome(stub, sampling) == field, sampling
        for sampling in at_the_ends_on_the_wire():
            assert await outcome(stub, sampling) == "", sampling

    run(scenario)


@pytest.mark.parametrize(("fields", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_values_name_their_field_and_leave_the_session_whole(fields: dict[str, Any], named: str) -> None:
    expected = grpc.StatusCode.FAILED_PRECONDITION if named == "model_fingerprint" else grpc.StatusCode.INVALID_ARGUMENT

    async def scenario(stub: Stub, harness: Harness) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence(**fields))):
                pass
        assert caught.value.code() is expected
        assert rpc.error_from_rpc(caught.value).field == named
        call = stub.Session()
        await call.write(submit(sequence(**fields)))
        await call.write(submit(sequence("good")))
        errors, finished = [], []
        while not finished or not errors:
            message = await call.read()
            errors.extend(message.errors)
            finished.extend(message.finished)
        assert [(error.code, error.field) for error in errors] == [(expected.value[0], named)]
        assert [end.request_id for end in finished] == ["good"]
        await call.done_writing()

    run(scenario)


def test_an_abort_and_a_vanished_session_free_everything() -> None:
    target = HeldTarget()

    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        long = common_pb2.SamplingParams(temperature=0, max_tokens=55)
        await call.write(submit(sequence("a", sampling=long)))
        await asyncio.to_thread(target.began.wait)
        await call.write(
            verifier_pb2.SessionRequest(abort=verifier_pb2.Abort(request_id="a", choice_index=0, kept_tokens=1))
        )
        # Its step goes on once the abort is there: the sequence cannot end by itself before.
        await until(lambda: len(harness.engine._inbox) == 1)
        target.go_on.set()
        reasons = []
        while not reasons:
            reasons = [end.reason for end in (await call.read()).finished]
        assert reasons == [common_pb2.FINISH_REASON_ABORT]
        await until(lambda: harness.engine.is_idle)
        target.hold()
        await call.write(submit(sequence("0", sampling=long)))
        await asyncio.to_thread(target.began.wait)
        for index in range(1, 8):
            await call.write(submit(sequence(str(index), sampling=long)))
        await until(lambda: len(harness.engine._inbox) == 7)
        call.cancel()
        await until(lambda: len(harness.engine._inbox) == 8)
        target.go_on.set()

    run(scenario, target=target)


def test_waiting_sequences_start_by_priority() -> None:
    target = HeldTarget()

    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.write(submit(sequence("first")))
        await asyncio.to_thread(target.began.wait)
        for name, priority in (("late", 2), ("usual", 0), ("urgent", -1), ("usual too", 0)):
            await call.write(submit(sequence(name, priority=priority)))
        await until(lambda: len(harness.engine._inbox) == 4)
        target.go_on.set()
        ended: list[str] = []
        while len(ended) < 5:
            ended += [end.request_id for end in (await call.read()).finished]
        assert ended == ["first", "urgent", "usual", "usual too", "late"]
        await call.done_writing()

    run(scenario, target=target, max_running=1)


def test_a_reader_that_is_behind_gets_merged_tokens() -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.read()
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=50)
        for index in range(6):
            await call.write(submit(sequence(str(index), sampling=sampling)))
        # Nothing is read until the engine is done; others are not held up by that.
        await until(lambda: harness.engine.counters.num_generated_tokens >= 300)
        other = [event async for event in stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence("x")))]
        assert other[-1].HasField("finished")
        counts = dict.fromkeys(map(str, range(6)), 0)
        ends: set[str] = set()
        while len(ends) < 6:
            message = await call.read()
            for part in message.tokens:
                assert part.offset == counts[part.request_id]
                counts[part.request_id] += len(part.token_ids)
            ends |= {end.request_id for end in message.finished}
        assert set(counts.values()) == {50}
        await call.done_writing()

    run(scenario)


def test_an_empty_session_request_breaks_the_session() -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.write(verifier_pb2.SessionRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_heartbeats_come_without_events() -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.read()
        message = await call.read()
        assert message.HasField("heartbeat") and not message.tokens
        await call.done_writing()

    run(scenario)


def test_get_info_has_the_figures_of_the_moment() -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        async for event in stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence())):
            last = event
        assert last.finished.prefill_ms > 0 and last.finished.decode_ms > 0
        harness.engine.counters.num_overlapped_steps = 3
        harness.engine.counters.count_blocked_overlap("catching_up")
        info = await stub.GetInfo(verifier_pb2.GetInfoRequest())
        assert (info.model_name, info.vocab_size, info.max_model_len) == ("hash", VOCAB, CONTEXT)
        assert info.num_generated_tokens == 8
        assert info.num_free_blocks == info.num_blocks == 200
        assert info.num_steps >= 8 and info.num_resident_steps == 3
        assert info.step_time_us["step"] > 0 and info.overlap_blocked_steps == {"catching_up": 1}

    run(scenario)


def test_a_drain_is_sent_at_once_to_old_and_new_sessions_and_running_sequences_finish() -> None:
    async def scenario() -> None:
        async with served({}) as (stub, harness, service):
            call = stub.Session()
            assert not (await call.read()).draining
            sampling = common_pb2.SamplingParams(temperature=0, max_tokens=55)
            await call.write(submit(sequence("running", sampling=sampling)))
            message = await call.read()
            while not message.tokens:
                message = await call.read()
            service.drain()
            messages = [message]
            while not messages[-1].finished:
                messages.append(await call.read())
            draining = [message.draining for message in messages]
            assert draining == sorted(draining)
            assert sum(len(part.token_ids) for message in messages for part in message.tokens) == 55
            await call.write(submit(sequence("new")))
            while not messages[-1].errors:
                messages.append(await call.read())
            assert messages[-1].errors[0].code == grpc.StatusCode.UNAVAILABLE.value[0] and messages[-1].draining
            late = stub.Session()
            assert (await late.read()).draining
            # The engine's events so far come before the end.
            harness.engine.stop()
            service.close()
            assert await call.read() is grpc.aio.EOF and await late.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(scenario())


def test_the_room_in_the_queue_is_sent_with_every_message() -> None:
    target = HeldTarget()

    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        rooms = [(await call.read()).queue_room]
        await call.write(submit(sequence("running")))
        await asyncio.to_thread(target.began.wait)
        await call.write(submit(sequence("waiting")))
        await until(lambda: len(harness.engine._inbox) == 1)
        # Earlier heartbeats may be on their way.
        while rooms[-1] != 1:
            rooms.append((await call.read()).queue_room)
        target.go_on.set()
        ended = 0
        while ended < 2:
            message = await call.read()
            ended += len(message.finished)
        while message.queue_room != rooms[0]:
            message = await call.read()
        # One place to run in and two to wait in.
        assert rooms[0] == 3 and set(rooms) <= {3, 2, 1}
        await call.done_writing()

    run(scenario, target=target, max_running=1, max_waiting=2)


def test_the_load_of_all_sessions_is_sent_with_every_message() -> None:
    target = HeldTarget()

    async def scenario(stub: Stub, harness: Harness) -> None:
        blocks = harness.engine.scheduler.blocks
        busy, other = stub.Session(), stub.Session()
        first = (await other.read()).load
        assert (first.num_running, first.num_waiting, first.max_running) == (0, 0, 1)
        assert first.num_free_blocks == first.num_blocks == blocks.num_blocks
        await busy.read()
        await busy.write(submit(sequence("running")))
        await asyncio.to_thread(target.began.wait)
        # A heartbeat sends a session the sequences of others.
        while (load := (await other.read()).load).num_running != 1:
            pass
        assert load.num_free_blocks < load.num_blocks
        target.go_on.set()
        while (load := (await other.read()).load).num_running:
            pass
        assert load.num_free_blocks == load.num_blocks
        for call in (busy, other):
            await call.done_writing()

    run(scenario, target=target, max_running=1, max_waiting=2)


def test_a_drain_without_events_is_sent_before_the_next_heartbeat() -> None:
    async def scenario() -> None:
        async with served({}) as (stub, _, service):
            call = stub.Session()
            await call.read()
            service.drain()
            message = await call.read()
            while not message.draining:
                # An earlier heartbeat.
                message = await call.read()
            assert not message.HasField("heartbeat")
            service.close()

    asyncio.run(scenario())


class HeldTarget(HashTarget):
    """A target whose step lasts until it is released."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 200, 4)
        self.began, self.go_on = threading.Event(), threading.Event()

    def hold(self) -> None:
        """Hold the target from the next step on."""
        self.began.clear()
        self.go_on.clear()

    def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
        self.began.set()
        self.go_on.wait()
        return super().forward(batch, captured_layers)


def test_a_flush_empties_the_prefix_cache_unless_a_sequence_runs() -> None:
    target = HeldTarget()
    target.go_on.set()

    async def scenario(stub: Stub, harness: Harness) -> None:
        def generate() -> Any:
            return stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence(prompt_token_ids=[*range(9)])))

        async def cached_tokens() -> int:
            num_tokens = [event async for event in generate()][-1].finished.num_cached_tokens
            await until(lambda: harness.engine.is_idle)
            return int(num_tokens)

        assert [await cached_tokens(), await cached_tokens()] == [0, 8]
        # The output's blocks as well.
        assert (await stub.FlushCache(verifier_pb2.FlushCacheRequest())).num_blocks >= 2
        assert [await cached_tokens(), await cached_tokens()] == [0, 8]
        target.hold()
        call = generate()
        await asyncio.to_thread(target.began.wait)
        flush = stub.FlushCache(verifier_pb2.FlushCacheRequest())
        await until(lambda: len(harness.engine._inbox) > 0)
        target.go_on.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flush
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert [event async for event in call][-1].finished.num_output_tokens == 8

    run(scenario, target=target)


def test_a_full_queue_refuses_while_a_step_runs_and_never_a_resumed_sequence() -> None:
    target = HeldTarget()

    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.write(submit(sequence("running")))
        await asyncio.to_thread(target.began.wait)
        for name in ("first", "second", "third"):
            await call.write(submit(sequence(name)))
        await call.write(submit(sequence("resumed", attempt=1)))
        errors = []
        # The step stands still: whoever waited for it would wait for ever.
        while not errors:
            errors = list((await call.read()).errors)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence("alone"))):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [(error.request_id, error.code) for error in errors] == [
            ("third", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        ]
        target.go_on.set()
        ended: set[str] = set()
        while not {"running", "first", "second"} <= ended:
            ended |= {end.request_id for end in (await call.read()).finished}
        await call.done_writing()

    run(scenario, target=target, max_running=1, max_waiting=2)
