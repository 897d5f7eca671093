"""Sequences with grammars over real gRPC: compiled while others run, refused, and aborted."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from foretoken import rpc
from foretoken.limits import MAX_GRAMMAR_BYTES, ModelLimits
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.block_books import check_blocks
from tests.support.engine_harness import Harness
from tests.support.grammars import END, VOCAB, ids_of, text_of, vocabulary, write_tokenizer
from tests.support.hash_target import HashTarget
from tests.support.services import verifier_info
from tests.verifier_svc.sampling.test_grammar_compiler import ENDLESS
from verifier_svc.sampling.grammar_compiler import GrammarCompiler
from verifier_svc.service import VerifierService

CONTEXT = 256
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
Stub = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("vocabulary"))


def run(folder: Path, scenario: Callable[[Stub, Harness], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with served(folder, **options) as (stub, harness):
            await scenario(stub, harness)
            blocks = harness.blocks
            while not (harness.engine.is_idle and blocks.num_free_blocks == blocks.num_blocks):
                await asyncio.sleep(0.01)
        # The engine has stopped: it is in no step that could be half done.
        check_blocks(blocks)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def served(
    folder: Path, *, timeout_s: float = 5.0, grammars: bool = True, **options: Any
) -> AsyncIterator[tuple[Stub, Harness]]:
    harness = Harness(
        HashTarget(VOCAB, 400, 4),
        vocab_size=VOCAB,
        num_blocks=400,
        block_size=4,
        max_model_len=CONTEXT,
        eos_ids=frozenset({END}),
        **options,
    )
    info = verifier_info(ModelLimits(VOCAB, CONTEXT, ()), (END,))
    # The time limit is met before the other limit, however fast the machine.
    compiler = GrammarCompiler(lambda: vocabulary(folder), timeout_s=timeout_s, max_compile_bytes=8 << 30)
    server = rpc.async_server()
    service = VerifierService(harness.engine, info, grammars=compiler if grammars else None)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
    port = rpc.bind(server, "127.0.0.1:0")
    harness.engine.start()
    await server.start()
    try:
        async with rpc.async_channel(f"127.0.0.1:{port}") as channel:
            yield verifier_pb2_grpc.VerifierServiceStub(channel), harness
    finally:
        await server.stop(None)
        harness.engine.stop()
        compiler.close()


def sequence(request_id: str = "r", *, output: list[int] | None = None, **sampling: Any) -> verifier_pb2.Sequence:
    values = {"max_tokens": 40, "temperature": 1.0, "seed": 3} | sampling
    return verifier_pb2.Sequence(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=output or [],
        attempt=1 if output else 0,
        sampling=common_pb2.SamplingParams(**values),
    )


def submit(message: verifier_pb2.Sequence) -> verifier_pb2.SessionRequest:
    return verifier_pb2.SessionRequest(submit=message)


async def outcomes(call: Any, num_ends: int) -> dict[str, Any]:
    """Return by request its text and its Finished or SequenceError, in the order of the ends."""
    tokens: dict[str, list[int]] = {}
    ended: dict[str, Any] = {}
    while len(ended) < num_ends:
        message = await call.read()
        for part in message.tokens:
            tokens.setdefault(part.request_id, []).extend(part.token_ids)
        for end in [*message.finished, *message.errors]:
            ended[end.request_id] = (text_of(tokens.get(end.request_id, [])), end)
    return ended


async def generate(stub: Stub, message: verifier_pb2.Sequence) -> tuple[str, verifier_pb2.Finished]:
    tokens: list[int] = []
    async for event in stub.Generate(verifier_pb2.GenerateRequest(sequence=message)):
        tokens += event.tokens.token_ids
        if event.HasField("finished"):
            return text_of(tokens), event.finished
    raise AssertionError("no end")


def test_outputs_follow_their_grammars(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        patterns = {f"r{i}": f"(ab|cd){{{i + 1}}}(1|2)" for i in range(5)}
        for name, pattern in patterns.items():
            await call.write(submit(sequence(name, regex=pattern)))
        ended = await outcomes(call, 5)
        for name, pattern in patterns.items():
            text, finished = ended[name]
            assert re.fullmatch(pattern, text)
            assert finished.reason == common_pb2.FINISH_REASON_STOP and not finished.HasField("stop_token_id")
        await call.done_writing()
        text, finished = await generate(stub, sequence(json_object=True, max_tokens=1))
        assert text in ("{", '{"') and finished.reason == common_pb2.FINISH_REASON_LENGTH

    run(folder, scenario)


def test_a_hostile_grammar_is_refused_while_others_run(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.write(submit(sequence("hostile", json_schema=ENDLESS.text)))
        await call.write(submit(sequence("plain")))
        await call.write(submit(sequence("after", regex="ab+")))
        ended = await outcomes(call, 3)
        # The plain one did not wait for the compiler; the one with a grammar did.
        assert list(ended) == ["plain", "hostile", "after"]
        error = ended["hostile"][1]
        assert (error.code, error.field) == (INVALID, "json_schema")
        assert "2 s" in error.message
        await call.done_writing()

    run(folder, scenario, timeout_s=2.0)


def test_bad_grammars_are_errors_of_their_sequences(folder: Path) -> None:
    bad = {
        "schema": ({"json_schema": '{"type": "robot"}'}, "json_schema"),
        "not json": ({"json_schema": "{"}, "json_schema"),
        "long": ({"json_schema": " " * (MAX_GRAMMAR_BYTES["json_schema"] + 1)}, "json_schema"),
        "pattern": ({"regex": "("}, "regex"),
        "long pattern": ({"regex": "a" * (MAX_GRAMMAR_BYTES["regex"] + 1)}, "regex"),
    }

    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        for name, (sampling, _) in bad.items():
            await call.write(submit(sequence(name, **sampling)))
        ended = await outcomes(call, len(bad))
        for name, (_, field) in bad.items():
            assert (ended[name][1].code, ended[name][1].field) == (INVALID, field), name
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, sequence(regex="("))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(folder, scenario)


def test_an_abort_of_a_sequence_that_waits_for_its_grammar_is_answered(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.write(submit(sequence("hostile", json_schema=ENDLESS.text)))
        await call.write(submit(sequence("waits", regex="[ab]{400}", max_tokens=250)))
        await call.write(verifier_pb2.SessionRequest(abort=verifier_pb2.Abort(request_id="waits", choice_index=0)))
        ended = await outcomes(call, 2)
        assert ended["waits"][1].reason == common_pb2.FINISH_REASON_ABORT
        await call.done_writing()

    run(folder, scenario, timeout_s=2.0)


def test_a_session_that_closes_forgets_what_waits(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.read()
        for number in range(5):
            await call.write(submit(sequence(f"r{number}", regex=f"[ab]{{{number},}}")))
        call.cancel()
        # The service goes on, also for the same grammars.
        text, _ = await generate(stub, sequence(regex="[ab]{2}"))
        assert re.fullmatch("[ab]{2}", text)

    run(folder, scenario)


def test_sequences_that_wait_for_grammars_stand_in_the_queue(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        for number in range(4):
            await call.write(submit(sequence(f"r{number}", json_schema=ENDLESS.text)))
        ended = await outcomes(call, 4)
        codes = sorted(error.code for _, error in ended.values())
        assert codes == [INVALID, INVALID, INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
        await call.done_writing()

    run(folder, scenario, timeout_s=2.0, max_running=1, max_waiting=2)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_resumed_output_goes_on_in_its_grammar(folder: Path, cut: int) -> None:
    pattern = "(ab|cd){2}(1[0-9]){2}"

    async def scenario(stub: Stub, harness: Harness) -> None:
        whole, finished = await generate(stub, sequence(regex=pattern))
        tokens: list[int] = []
        async for event in stub.Generate(verifier_pb2.GenerateRequest(sequence=sequence(regex=pattern))):
            tokens += event.tokens.token_ids
        assert text_of(tokens) == whole
        rest, again = await generate(stub, sequence(regex=pattern, output=tokens[:cut]))
        assert text_of(tokens[:cut]) + rest == whole
        assert again.num_output_tokens == finished.num_output_tokens == len(tokens)
        # Its verifier died between the last token and its end: only the end remains to be sent.
        rest, again = await generate(stub, sequence(regex=pattern, output=tokens))
        assert rest == "" and again.reason == common_pb2.FINISH_REASON_STOP

    run(folder, scenario)


def test_a_resumed_output_that_the_grammar_does_not_know_is_refused(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, sequence(regex="abc", output=ids_of("x")))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    run(folder, scenario)


def test_without_a_compiler_grammars_are_refused(folder: Path) -> None:
    async def scenario(stub: Stub, harness: Harness) -> None:
        call = stub.Session()
        await call.write(submit(sequence("grammar", regex="a")))
        await call.write(submit(sequence("plain")))
        ended = await outcomes(call, 2)
        assert (ended["grammar"][1].code, ended["grammar"][1].field) == (INVALID, "regex")
        assert ended["plain"][1].num_output_tokens > 0
        await call.done_writing()

    run(folder, scenario, grammars=False)
