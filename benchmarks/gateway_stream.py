"""Measure what one gateway process pays for a streamed chunk, and how evenly the chunks arrive.

    python -m benchmarks.gateway_stream [--streams 256] [--rate 20000] [--seconds 10] [--clients N] [--tokenize CHARS]

A scripted verifier sends one message a step over a real session, with one token for each stream, at
``--rate`` tokens a second in all. Clients in processes of their own read the streams. It prints the
gateway's CPU time a chunk, the tokens a second that it carried, and the gaps between a stream's
chunks. The exit status is 1 if a text is wrong or a bar is missed.

With ``--tokenize`` one more client sends a text of so many characters to
/tokenize, again and again. Then the only bar is the longest gap: a step and 50 ms,
so long may encoding hold up a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks import environment
from benchmarks.command import finish
from benchmarks.prompts import code_prompts
from benchmarks.stack import READY_TIMEOUT_S, StackError, answers, running_server
from foretoken import rpc
from foretoken.bench.client import Address, complete, post
from foretoken.bench.completion import StreamError
from foretoken.free_ports import free_ports
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc

InfoContext: TypeAlias = "grpc.aio.ServicerContext[verifier_pb2.GetInfoRequest, verifier_pb2.GetInfoResponse]"
SessionContext: TypeAlias = "grpc.aio.ServicerContext[verifier_pb2.SessionRequest, verifier_pb2.SessionResponse]"
DEMO = environment.ROOT / "models" / "demo" / "target"
MAX_MODEL_LEN = 1 << 20
CLIENT_TIMEOUT_S = 60.0
# The first steps are not counted: connections, caches and branch predictors are cold.
WARM_UP_S = 1.0
MAX_CHUNK_US = 40.0
MAX_P99_GAP_MS = 30.0
# Beyond a step, while texts are tokenized.
MAX_HELD_UP_MS = 50.0
# Of the rate. The window ends with the last step sent, whose chunks arrive after it.
MIN_CARRIED = 0.98


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What is streamed: each stream gets one of ``token_ids`` a step."""

    num_streams: int
    rate: float
    token_ids: tuple[int, ...]

    @property
    def step_s(self) -> float:
        return self.num_streams / self.rate

    @property
    def num_warm_steps(self) -> int:
        return min(round(WARM_UP_S / self.step_s), len(self.token_ids) // 2)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What the clients of one process saw: the times of each stream's chunks, and the texts."""

    times: list[list[float]]
    texts: set[str]


class SteadyVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Waits for all streams, then sends one step after the other at a fixed pace."""

    def __init__(self, load: StreamLoad, vocab_size: int, marks: Connection) -> None:
        """``marks`` gets a message when the counted steps begin and when the last one was sent."""
        self._load = load
        self._marks = marks
        self._sequences: list[verifier_pb2.Sequence] = []
        self._has_all = asyncio.Event()
        self._info = verifier_pb2.GetInfoResponse(
            version="bench",
            epoch=1,
            model_name="bench",
            model_fingerprint="bench",
            device="CPU",
            dtype="float32",
            mode="strict",
            vocab_size=vocab_size,
            max_model_len=MAX_MODEL_LEN,
        )

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: InfoContext) -> verifier_pb2.GetInfoResponse:
        return self._info

    async def Session(
        self, request_iterator: AsyncIterator[verifier_pb2.SessionRequest], context: SessionContext
    ) -> AsyncGenerator[verifier_pb2.SessionResponse, None]:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            started = verifier_pb2.SessionStarted(epoch=1, model_fingerprint="bench")
            yield verifier_pb2.SessionResponse(started=started)
            while not self._has_all.is_set():
                yield verifier_pb2.SessionResponse(heartbeat=verifier_pb2.Heartbeat())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_all.wait(), 1.0)
            began = time.perf_counter()
            for number in range(len(self._load.token_ids)):
                if number == self._load.num_warm_steps:
                    self._marks.send("counted steps begin")
                response = self._step(number)
                await asyncio.sleep(began + number * self._load.step_s - time.perf_counter())
                yield response
            self._marks.send("last step sent")
            yield verifier_pb2.SessionResponse(finished=[self._end(sequence) for sequence in self._sequences])
            await reader
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[verifier_pb2.SessionRequest]) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self._sequences.append(request.submit)
            if len(self._sequences) == self._load.num_streams:
                self._has_all.set()

    def _step(self, number: int) -> verifier_pb2.SessionResponse:
        token_ids = [self._load.token_ids[number]]
        return verifier_pb2.SessionResponse(
            tokens=[
                verifier_pb2.Tokens(request_id=sequence.request_id, offset=number, token_ids=token_ids, sources=[0])
                for sequence in self._sequences
            ]
        )

    def _end(self, sequence: verifier_pb2.Sequence) -> verifier_pb2.Finished:
        return verifier_pb2.Finished(
            request_id=sequence.request_id,
            reason=common_pb2.FINISH_REASON_LENGTH,
            num_prompt_tokens=len(sequence.prompt_token_ids),
            num_output_tokens=len(self._load.token_ids),
        )


def run_verifier(load: StreamLoad, vocab_size: int, address: str, marks: Connection) -> None:
    """Serve the scripted verifier until this process is ended."""

    async def serve() -> None:
        server = rpc.async_server()
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(SteadyVerifier(load, vocab_size, marks), server)
        rpc.bind(server, address)
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


def run_clients(address: Address, bodies: Sequence[dict[str, Any]]) -> Arrivals:
    """Read one stream for each body; parse them after all have ended."""
    completions = complete(address, bodies, CLIENT_TIMEOUT_S)
    return Arrivals(
        [[chunk.at for chunk in completion.chunks] for completion in completions],
        {completion.text for completion in completions},
    )


def tokenize_texts(address: Address, num_chars: int, done: Connection) -> None:
    """Send a long text to /tokenize until this process is ended; report each call's seconds."""
    text = ("def read_json(path):\n    return json.loads(path.read_text())\n" * num_chars)[:num_chars]
    while True:
        began = time.perf_counter()
        status, body = post(address, "/tokenize", {"prompt": text}, CLIENT_TIMEOUT_S)
        done.send(time.perf_counter() - began if status == 200 else StackError(f"/tokenize: {status} {body[:200]!r}"))


@contextlib.contextmanager
def tokenizing(address: Address, num_chars: int) -> Iterator[list[float]]:
    """Tokenize texts beside the streams, if they have characters; fill the list at the end.

    Raises:
        StackError: a text was refused.
    """
    context = multiprocessing.get_context("spawn")
    done, results = context.Pipe(duplex=False)
    client = context.Process(target=tokenize_texts, args=(address, num_chars, results))
    seconds: list[float] = []
    if num_chars:
        client.start()
    try:
        yield seconds
    finally:
        if num_chars:
            client.kill()
            client.join()
    while done.poll():
        result = done.recv()
        if isinstance(result, StackError):
            raise result
        seconds.append(result)


@contextlib.contextmanager
def running_gateway(model: Path, verifier: str) -> Iterator[tuple[Address, psutil.Process]]:
    """Start one gateway process; yield its address and its process.

    Raises:
        StackError: it ended or was not ready in time.
    """
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "foretoken", "gateway", str(model), "--verifier", verifier]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), "--gateway-workers", "1"]
    command += ["--served-model-name", "bench", "--log-level", "warning"]
    # -P leaves out the working folder: foretoken need not be installed.
    paths = os.pathsep.join(filter(None, (str(environment.ROOT), os.environ.get("PYTHONPATH"))))
    address = Address("127.0.0.1", port)
    with running_server("the gateway", command, environment={**os.environ, "PYTHONPATH": paths}) as server:
        server.wait_until(lambda: answers(address, "/ready"), READY_TIMEOUT_S)
        yield address, psutil.Process(server.pid)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One run, between the start of the counted steps and the sending of the last one."""

    num_chunks: int
    num_tokens: int
    cpu_s: float
    wall_s: float
    # Seconds between two chunks of a stream.
    gaps: np.ndarray
    # How long each call of /tokenize took.
    tokenized_s: list[float]

    @property
    def chunk_us(self) -> float:
        return 1e6 * self.cpu_s / self.num_chunks

    @property
    def carried(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.wall_s

    @property
    def p99_gap_ms(self) -> float:
        return 1e3 * float(np.percentile(self.gaps, 99))

    @property
    def longest_gap_ms(self) -> float:
        return 1e3 * float(self.gaps.max())

    def missed(self, load: StreamLoad) -> list[str]:
        """Return the names of the bars that the run missed."""
        if self.tokenized_s:
            return ["longest gap"] if self.longest_gap_ms > 1e3 * load.step_s + MAX_HELD_UP_MS else []
        return [
            *(["CPU a chunk"] if self.chunk_us > MAX_CHUNK_US else []),
            *(["tokens a second"] if self.carried < MIN_CARRIED * load.rate else []),
            *(["p99 gap"] if self.p99_gap_ms > MAX_P99_GAP_MS else []),
        ]

    def text(self) -> str:
        gaps = f"gap p50 {1e3 * float(np.percentile(self.gaps, 50)):.1f}, p99 {self.p99_gap_ms:.1f}"
        if self.tokenized_s:
            call_ms = 1e3 * statistics.median(self.tokenized_s)
            calls = f"tokenized {len(self.tokenized_s)} texts, {call_ms:.0f} ms each"
            return f"{gaps}, longest {self.longest_gap_ms:.1f} ms; {calls}"
        return (
            f"CPU a chunk {self.chunk_us:.1f} us (bar {MAX_CHUNK_US:g}), of one core {self.cpu_s / self.wall_s:.0%}; "
            f"carried {self.carried:,.0f} tok/s in {self.num_chunks / self.wall_s:,.0f} chunks/s; "
            f"{gaps} (bar {MAX_P99_GAP_MS:g}), longest {self.longest_gap_ms:.1f} ms"
        )


def measure(
    load: StreamLoad, model: Path, prompt: Sequence[int], text: str, num_clients: int, num_chars: int = 0
) -> StreamFigures:
    """Run the load once. ``num_chars``: of a text to tokenize meanwhile; 0: none.

    Raises:
        StackError: the gateway did not start, or an answer is not ``text``.
        StreamError: a stream broke.
    """
    context = multiprocessing.get_context("spawn")
    marks, verifier_marks = context.Pipe(duplex=False)
    vocab_size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(num_clients, context) as clients:
        address = f"unix:{folder}/verifier.sock"
        verifier = context.Process(target=run_verifier, args=(load, vocab_size, address, verifier_marks))
        verifier.start()
        try:
            with running_gateway(model, address) as (gateway_address, gateway):
                bodies = [_body(prompt, len(load.token_ids)) for _ in range(load.num_streams)]
                shares = [bodies[number::num_clients] for number in range(num_clients)]
                seen = [clients.submit(run_clients, gateway_address, share) for share in shares]
                began = _await_mark(marks, gateway)
                with tokenizing(gateway_address, num_chars) as tokenized_s:
                    ended = _await_mark(marks, gateway)
                arrivals = [share.result() for share in seen]
        finally:
            verifier.kill()
            verifier.join()
    if any(arrived.texts != {text} for arrived in arrivals):
        raise StackError("a stream's text is not the text of its tokens")
    streams = [times for arrived in arrivals for times in arrived.times]
    return replace(_figures(streams, load, began, ended), tokenized_s=tokenized_s)


def _body(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": "bench", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, **options}


def _await_mark(marks: Connection, gateway: psutil.Process) -> tuple[float, float]:
    """Return the time of the verifier's next mark, and the gateway's CPU seconds at it."""
    if not marks.poll(CLIENT_TIMEOUT_S):
        raise StackError(f"the verifier sent nothing for {CLIENT_TIMEOUT_S:g} s")
    marks.recv()
    used = gateway.cpu_times()
    return time.perf_counter(), used.user + used.system


def _figures(
    streams: list[list[float]], load: StreamLoad, began: tuple[float, float], ended: tuple[float, float]
) -> StreamFigures:
    # perf_counter is one clock for all processes.
    counted = [[at for at in times if began[0] <= at <= ended[0]] for times in streams]
    num_chunks = sum(map(len, counted))
    tokens_per_chunk = load.num_streams * len(load.token_ids) / sum(map(len, streams))
    gaps = np.array([later - earlier for times in counted for earlier, later in pairwise(times)])
    cpu_s, wall_s = ended[1] - began[1], ended[0] - began[0]
    return StreamFigures(num_chunks, round(num_chunks * tokens_per_chunk), cpu_s, wall_s, gaps, [])


def _output(model: Path, prompt: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], str]:
    """Return an output of printable tokens, so that each of them is a chunk, and its text."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = {token_id: tokenizer.decode([token_id]) for token_id in set(prompt)}
    printable = [token_id for token_id in prompt if texts[token_id].isascii() and texts[token_id]]
    token_ids = (printable * -(-num_tokens // len(printable)))[:num_tokens]
    return tuple(token_ids), "".join(texts[token_id] for token_id in token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gateway_stream", description="Measure a streamed chunk's cost.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20_000, help="tokens a second, over all streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="of streaming, besides a second to warm up")
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 1) - 3)), help="processes")
    parser.add_argument("--tokenize", type=int, default=0, metavar="CHARS", help="tokenize such texts meanwhile")
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the tokenizer (default: the demo model)")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompt = code_prompts(tokenizer, 1)[0].token_ids
    num_steps = round((options.seconds + WARM_UP_S) * options.rate / options.streams)
    token_ids, text = _output(options.model, prompt, num_steps)
    load = StreamLoad(options.streams, options.rate, token_ids)
    print(f"{environment.machine()}; {options.streams} streams, {options.rate:,.0f} tok/s, a step each "
          f"{1e3 * load.step_s:.1f} ms, {options.clients} client processes")  # fmt: skip
    try:
        figures = measure(load, options.model, prompt, text, options.clients, options.tokenize)
    except (StackError, StreamError) as error:
        sys.exit(f"failed: {error}")
    print(figures.text())
    finish(figures.missed(load))


if __name__ == "__main__":
    main()
