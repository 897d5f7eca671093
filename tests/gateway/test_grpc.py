"""The public gRPC API against a real server: streaming, errors as statuses, health, reflection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from foretoken import rpc
from gateway.grpc.api import SERVICE_NAME, GatewayServicer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import LONG_TOKEN, Stack
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps
from tests.support.sampling_limits import at_the_ends_on_the_wire, beyond_on_the_wire

pytestmark = pytest.mark.anyio
STATS = common_pb2.SpeculationStats(num_decode_steps=3, num_accepted_tokens=2, acceptance_histogram=[1, 2])


async def generate(stack: Stack, **fields: Any) -> list[gateway_pb2.GenerateResponse]:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        return [response async for response in stub.Generate(gateway_pb2.GenerateRequest(**fields))]


async def test_text_in_chunks_and_completions_out(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" wor"), reason=STOP, stats=STATS)
    responses = await generate(stack, text="def add", n=2, request_id="mine")
    for index in (0, 1):
        chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.choice_index == index]
        assert "".join(chunk.text for chunk in chunks) == "hello wor"
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert ids == stack.ids("hello") + stack.ids(" wor")
        ends = [sum(len(chunk.token_ids) for chunk in chunks[: k + 1]) for k in range(len(chunks))]
        assert [chunk.num_output_tokens for chunk in chunks] == ends
        assert [chunk.offset for chunk in chunks] == [0, *ends[:-1]]
        assert all(len(chunk.sources) == len(chunk.token_ids) for chunk in chunks)
    # Two choices that run beside each other end in either order.
    completes = {r.complete.choice_index: r.complete for r in responses if r.HasField("complete")}
    assert sorted(completes) == [0, 1] and responses[-1].HasField("complete")
    complete = completes[0]
    assert (complete.reason, complete.request_id, complete.num_output_tokens) == (STOP, "mine", len(ids))
    assert complete.speculation == STATS
    assert complete.seed == stack.verifier.submitted[0].sampling.seed > 0
    assert stack.verifier.submitted[0].sampling.max_tokens == 16


async def test_a_token_limit_beyond_the_context_is_cut(stack: Stack) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=100_000)
    responses = await generate(stack, token_ids=gateway_pb2.TokenIds(ids=[5] * 120), sampling=sampling)
    assert responses[-1].complete.reason == LENGTH
    assert stack.verifier.submitted[0].sampling.max_tokens == 8


async def test_offsets_belong_to_the_chunk_whatever_comes_meanwhile(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader stops between two chunks of one step, while the second choice goes on."""
    players: dict[int, Player] = {}
    end = asyncio.Event()

    async def play(player: Player) -> None:
        players[player.sequence.choice_index] = player
        player.tokens([1])
        await end.wait()
        player.finish()

    arrived = asyncio.Semaphore(0)
    monkeypatch.setattr(stack.gateway.core.metrics, "tokens_arrived", lambda seconds, num_tokens: arrived.release())
    stack.verifier.script = play

    class Call:
        def time_remaining(self) -> None:
            return None

        def invocation_metadata(self) -> tuple[()]:
            return ()

    request = gateway_pb2.GenerateRequest(text="def add", n=2)
    responses = GatewayServicer(stack.gateway.core).Generate(request, cast(Any, Call()))
    offsets: dict[int, list[int]] = {0: [], 1: []}

    async def read_chunk() -> None:
        chunk = (await anext(responses)).chunk
        offsets[chunk.choice_index].append(chunk.offset)
        assert chunk.num_output_tokens == chunk.offset + len(chunk.token_ids)

    for _ in range(2):
        await read_chunk()
    for index in (0, 1):
        players[index].tokens([2])
        await arrived.acquire()
    await read_chunk()
    players[1].tokens([3])
    await arrived.acquire()
    for _ in range(2):
        await read_chunk()
    assert offsets == {0: [0, 1], 1: [0, 1, 2]}
    end.set()
    assert [response.WhichOneof("event") async for response in responses] == ["complete", "complete"]


async def test_ids_stop_strings_and_options(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello stop it"))
    responses = await generate(
        stack,
        token_ids=gateway_pb2.TokenIds(ids=[5, 6]),
        stop=["stop"],
        sampling=common_pb2.SamplingParams(temperature=0, seed=0, max_tokens=50),
        speculation=common_pb2.SpeculationOptions(max_draft_tokens=0),
        cache_salt="s",
        model="tiny",
    )
    assert "".join(r.chunk.text for r in responses) == "hello "
    assert responses[-1].complete.stop == "stop"
    assert responses[-1].complete.num_output_tokens < len(stack.ids("hello stop it"))
    sequence = stack.verifier.submitted[0]
    assert list(sequence.prompt_token_ids) == [5, 6]
    assert (sequence.sampling.seed, sequence.sampling.temperature, sequence.cache_salt) == (0, 0, "s")
    assert sequence.speculation.HasField("max_draft_tokens")


BAD: list[tuple[grpc.StatusCode, str, dict[str, Any]]] = [
    (grpc.StatusCode.NOT_FOUND, "model", {"text": "a", "model": "other"}),
    (grpc.StatusCode.INVALID_ARGUMENT, "prompt", {}),
    (grpc.StatusCode.INVALID_ARGUMENT, "text", {"text": ""}),
    (grpc.StatusCode.INVALID_ARGUMENT, "token_ids", {"token_ids": gateway_pb2.TokenIds(ids=[10**6])}),
    (grpc.StatusCode.INVALID_ARGUMENT, "token_ids", {"token_ids": gateway_pb2.TokenIds(ids=[1] * 128)}),
    (grpc.StatusCode.INVALID_ARGUMENT, "n", {"text": "a", "n": 17}),
    (grpc.StatusCode.INVALID_ARGUMENT, "n", {"text": "a", "n": 0}),
    (grpc.StatusCode.INVALID_ARGUMENT, "stop", {"text": "a", "stop": [""]}),
    (grpc.StatusCode.INVALID_ARGUMENT, "stop", {"text": "a", "stop": ["a"] * 65}),
    (grpc.StatusCode.INVALID_ARGUMENT, "bad_words", {"text": "a", "bad_words": ["x" * 257]}),
    (grpc.StatusCode.INVALID_ARGUMENT, "truncate_prompt_tokens", {"text": "a", "truncate_prompt_tokens": 0}),
    (grpc.StatusCode.INVALID_ARGUMENT, "request_id", {"text": "a", "request_id": "x" * 129}),
    (grpc.StatusCode.INVALID_ARGUMENT, "cache_salt", {"text": "a", "cache_salt": "x" * 257}),
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
        {"text": "a", "sampling": common_pb2.SamplingParams(temperature=float("nan"))},
    ),
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens",
        {"text": "a", "sampling": common_pb2.SamplingParams(max_tokens=0)},
    ),
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        "speculative.drafter",
        {"text": "a", "speculation": common_pb2.SpeculationOptions(drafter="typo")},
    ),
]


async def test_bad_requests_get_a_status_that_names_the_field(stack: Stack) -> None:
    for code, field, fields in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stack, **fields)
        metadata = dict(caught.value.trailing_metadata() or ())
        assert (caught.value.code(), metadata.get("foretoken-field")) == (code, field), fields
    assert not stack.verifier.submitted
    assert await stack.metric("foretoken_admission_rejections_total", reason="not_found") == 1.0


async def test_numbers_are_taken_to_the_ends_of_their_ranges_and_not_beyond(stack: Stack) -> None:
    beyond = beyond_on_the_wire()
    assert {"prompt_logprobs", "logprobs", "top_k", "max_tokens"} <= {field for field, _ in beyond}
    for field, sampling in beyond:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stack, text="a", sampling=sampling)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, sampling
        assert rpc.error_from_rpc(caught.value).field == field, sampling
    assert not stack.verifier.submitted
    for sampling in at_the_ends_on_the_wire():
        assert (await generate(stack, text="a", sampling=sampling))[-1].HasField("complete"), sampling


async def test_errors_of_the_verifier_are_statuses(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    stack.verifier.script = play
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stack, text="a")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


async def test_cancelling_aborts_at_the_verifier(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens([65])
        await player.aborted.wait()

    stack.verifier.script = play
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(gateway_pb2.GenerateRequest(text="a"))
        await call.read()
        call.cancel()
        await stack.verifier.until(lambda: len(stack.verifier.aborts) == 1)
    assert stack.gateway.verifiers.num_sequences == 0


async def test_the_callers_deadline_goes_on_to_the_verifier(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="a"), timeout=30):
            pass
    # A deadline has three digits on the wire, rounded up (grpc's timeout encoding): 30.0 s may
    # arrive as 30.1 s.
    assert 0 < stack.verifier.submitted[0].timeout_ms <= 30_100


async def test_model_and_health(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        model = await gateway_pb2_grpc.GatewayServiceStub(channel).GetModel(gateway_pb2.GetModelRequest())
        assert (model.model, model.max_model_len, list(model.drafters)) == ("tiny", 128, ["ngram"])
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", SERVICE_NAME):
            answer = await check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_without_our_protos_streams_tokens(stack: Stack) -> None:
    stack.verifier.script = steps([65, 66], [67])

    def stream() -> list[Any]:
        with grpc.insecure_channel(stack.grpc_address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert SERVICE_NAME in database.get_services()
            service = DescriptorPool(database).FindServiceByName(SERVICE_NAME)
            method = service.methods_by_name["Generate"]
            call = channel.unary_stream(
                f"/{service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            return list(call(GetMessageClass(method.input_type)(text="a", sampling={"max_tokens": 3})))

    # The reflection client blocks, and the server runs on this thread's loop.
    responses = await asyncio.to_thread(stream)
    assert [list(r.chunk.token_ids) for r in responses if r.HasField("chunk")] == [[65, 66], [67]]


async def test_a_slow_reader_gets_merged_chunks(stack: Stack) -> None:
    # More than all buffers on the way hold.
    count = 10_000
    (long_token,) = stack.ids(LONG_TOKEN)

    async def play(player: Player) -> None:
        for _ in range(count):
            player.tokens([long_token])
        player.finish(STOP)

    stack.verifier.script = play
    stack.verifier.info.max_model_len = 1_000_000
    await stack.gateway.verifiers.fetch_infos()
    request = gateway_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(max_tokens=count))
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
        first = await call.read()
        while stack.gateway.verifiers.num_sequences:
            assert (await stack.http.get("/health")).status_code == 200
        chunks = [first.chunk]
        while (response := await call.read()) is not grpc.aio.EOF:
            chunks.append(response.chunk)
            assert response.ByteSize() < 4 << 20
    assert [chunk.offset for chunk in chunks[1:-1]] == [chunk.num_output_tokens for chunk in chunks[:-2]]
    assert sum(len(chunk.token_ids) for chunk in chunks) == count
    assert len(chunks) < count


METHODS = (
    f"/{SERVICE_NAME}/Generate",
    f"/{SERVICE_NAME}/GetModel",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
# A field that claims to be longer than the message; the end of a group that nobody opened.
GARBAGE = (b"\x0a\xff\xff\xff\x7f", b"\x0c", b"\xff" * 1000)


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_the_callers_mistake(
    stack: Stack, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        for data in GARBAGE:
            call: Any = channel.stream_stream(method)
            call = call(iter([data]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "the message cannot be decoded"
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert await stack.metric("foretoken_admission_rejections_total", reason="invalid_argument") == len(GARBAGE)


async def test_a_call_without_a_message_is_the_callers_mistake(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call: Any = channel.stream_stream(METHODS[0])
        call = call(iter([]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
