"""Drive a server over HTTP with many streams, from client processes of their own.

A stream is one user: it sends its next request when the last one has ended. A client process only
records bytes and arrival times while streams run, and parses them at the end. It also measures
itself: the CPU time that it takes, and how late its event loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from foretoken.bench.client import Address, Connector, run_loop
from foretoken.bench.completion import HttpStatusError, Recording, StreamedCompletion, StreamError, read_completion
from foretoken.bench.stream import UserStream
from foretoken.bench.supply import MORE, Supply

# All clients begin this long after they got the signal.
LEAD_S = 0.1
# Client processes on a machine with many cores.
MOST_CLIENTS = 8
# How often a client looks how late its event loop is, and how often it reports what has ended.
HEARTBEAT_S = 0.02
PROGRESS_S = 0.5

# Called with the number of ended requests.
OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """The times of one completed request, in perf_counter seconds, and its tokens.

    ``gaps`` are the seconds between two chunks that follow each other. ``due_at`` is when the
    request was to be sent: its stream's start, or the end of the answer before it.
    """

    sent_at: float
    first_at: float
    last_at: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    gaps: tuple[float, ...]
    group: str = ""
    due_at: float = 0.0
    finish_reason: str = ""
    # The server's own figures of this request.
    speculation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the clients saw.

    Attributes:
        busiest: the largest CPU share of one client while it recorded.
        failures: why each failed request failed.
        lags: how late the clients' event loops were, in seconds, every HEARTBEAT_S.
        started_at, ended_at: perf_counter seconds.
    """

    answers: list[CompletedRequest]
    busiest: float
    failures: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    address: Address
    streams: Sequence[UserStream]
    timeout_s: float
    # Streams that run at once; 0: all.
    limit: int
    # No request starts later than this after the start.
    duration_s: float = math.inf
    # Whether there are more streams, which a client gets for ``MORE``.
    has_more: bool = False


def default_clients() -> int:
    """Return how many client processes to use: half of the cores, from 1 to 8."""
    return max(1, min(MOST_CLIENTS, len(os.sched_getaffinity(0)) // 2))


class Clients:
    """Client processes that live through many runs."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def count(self) -> int:
        """The number of client processes."""
        return len(self._processes)

    def close(self) -> None:
        """End the processes, also in the middle of a run."""
        # First the processes: one that is in the middle of a run would
        # report that its pipe is gone.
        for process in self._processes:
            process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def run(self, address: Address, streams: Sequence[UserStream], timeout_s: float = 120.0) -> LoadResult:
        """Send all streams' requests and return the answers.

        Raises:
            StreamError: a request failed, or nothing came on a stream for ``timeout_s`` seconds.
        """
        load = self.drive(address, streams, timeout_s)
        if load.failures:
            raise StreamError(load.failures[0])
        return load

    def drive(
        self,
        address: Address,
        streams: Sequence[UserStream],
        timeout_s: float = 120.0,
        limit: int = 0,
        on_progress: OnProgress = lambda count: None,
        *,
        duration_s: float = math.inf,
        more: Iterator[UserStream] | None = None,
    ) -> LoadResult:
        """Send all streams' requests; return the answers, and why the others failed.

        Args:
            limit: streams that run at once; the next one starts when one has ended. 0: all.
            duration_s: no request starts later than this after the start; those that run then end.
            more: streams that follow, each taken when it is needed soon.
        """
        most = min(len(streams), limit or len(streams), len(self._pipes))
        pipes = self._pipes[:most]
        for index, pipe in enumerate(pipes):
            share = limit // most + (index < limit % most)
            pipe.send(_Work(address, streams[index::most], timeout_s, share, duration_s, more is not None))
        for pipe in pipes:
            pipe.recv()
        start = time.perf_counter() + LEAD_S
        for pipe in pipes:
            pipe.send(start)
        # As many at once as a client begins with.
        batch = math.ceil(len(streams) / most)
        return _joined(_collect(pipes, on_progress, lambda: list(itertools.islice(more or (), batch))))


@contextlib.contextmanager
def running_clients(count: int) -> Iterator[Clients]:
    """Start ``count`` client processes, and end them at the end of the block."""
    clients = Clients(count)
    try:
        yield clients
    finally:
        clients.close()


def _collect(
    pipes: Sequence[Connection], on_progress: OnProgress, next_streams: Callable[[], list[UserStream]]
) -> list[LoadResult]:
    """Return each client's load; a number from a client is how many of its requests have ended."""
    ended = dict.fromkeys(pipes, 0)
    loads: dict[Connection, LoadResult] = {}
    while len(loads) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in loads]):
            assert isinstance(pipe, Connection)
            found = pipe.recv()
            if found == MORE:
                pipe.send(next_streams())
                continue
            if isinstance(found, LoadResult):
                loads[pipe] = found
                found = len(found.answers) + len(found.failures)
            ended[pipe] = found
            on_progress(sum(ended.values()))
    return [loads[pipe] for pipe in pipes]


def _joined(loads: Sequence[LoadResult]) -> LoadResult:
    return LoadResult(
        [answer for load in loads for answer in load.answers],
        max(load.busiest for load in loads),
        [failure for load in loads for failure in load.failures],
        [lag for load in loads for lag in load.lags],
        min(load.started_at for load in loads),
        max(load.ended_at for load in loads),
    )


def _client(pipe: Connection) -> None:
    """Run one client process until its pipe is closed."""
    # Ctrl-C reaches the whole process group; the parent process ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            work: _Work = pipe.recv()
        except EOFError:
            return
        run = _ClientRun(work, pipe.send, pipe if work.has_more else None)
        pipe.send("prepared")
        start = pipe.recv()
        # A collection would hold the event loop up. The next run's collection takes what is left.
        gc.collect()
        gc.disable()
        try:
            load = run_loop(run.load(start))
        finally:
            gc.enable()
        pipe.send(load)


@dataclass(frozen=True, slots=True)
class _Response:
    group: str
    due_at: float
    recording: Recording


class _ClientRun:
    """One client's share of a load."""

    def __init__(self, work: _Work, on_progress: OnProgress, pipe: Connection | None = None) -> None:
        """``on_progress`` gets the number of ended requests now and then.

        ``pipe``: as for Supply.
        """
        self._work, self._on_progress = work, on_progress
        self._ends_at = math.inf
        # Encoding takes time: what does not depend on answers is ready before it is needed.
        self._requests: dict[int, list[bytes]] = {}
        self._supply = Supply(work.streams, self._encode, pipe)
        self._connector = Connector(work.address, work.timeout_s)
        self._responses: list[_Response] = []
        self._failures: list[str] = []
        self._lags: list[float] = []

    async def load(self, start: float) -> LoadResult:
        """Run all streams from ``start`` on (perf_counter seconds)."""
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        used = time.process_time()
        self._ends_at = start + self._work.duration_s
        watches = [asyncio.create_task(task) for task in (self._connector.watch(), self._beat(), self._report())]
        workers = [self._worker(start) for _ in range(self._work.limit or len(self._work.streams))]
        try:
            await asyncio.gather(*workers)
            await self._supply.close()
        finally:
            for watch in watches:
                watch.cancel()
        ended = time.perf_counter()
        busy = (time.process_time() - used) / max(ended - start, HEARTBEAT_S)
        answers = []
        for response in self._responses:
            try:
                answers.append(answer_of(read_completion(response.recording), response.group, response.due_at))
            except HttpStatusError as error:
                self._failures.append(self._work.address.refusal(error.status_code, error.body))
            except StreamError as error:
                self._failures.append(error.message)
        return LoadResult(answers, busy, self._failures, self._lags, start, ended)

    def _encode(self, streams: Sequence[UserStream]) -> None:
        for stream in streams:
            if not stream.is_conversation:
                requests = [self._work.address.request("POST", stream.path, body) for body in stream.bodies]
                self._requests[id(stream)] = requests

    async def _worker(self, start: float) -> None:
        while not self._is_over and (stream := await self._supply.next()) is not None:
            due_at = start + stream.starts_after
            # The loop's clock has milliseconds: it may wake too early.
            while (rest := due_at - time.perf_counter()) > 0:
                await asyncio.sleep(rest)
            if stream.is_conversation:
                await self._converse(stream, due_at)
                continue
            for request in self._requests.pop(id(stream)):
                if self._is_over:
                    return
                await self._send(stream, request, due_at)
                due_at = time.perf_counter()

    @property
    def _is_over(self) -> bool:
        """Return whether no request may start any more."""
        return time.perf_counter() >= self._ends_at

    async def _converse(self, stream: UserStream, due_at: float) -> None:
        """Send one turn after the other; the first that fails ends the conversation."""
        messages: list[dict[str, Any]] = []
        for body in stream.bodies:
            if self._is_over:
                return
            messages += body["messages"]
            request = self._work.address.request("POST", stream.path, {**body, "messages": messages})
            recording = await self._send(stream, request, due_at)
            if recording is None:
                return
            try:
                messages.append({"role": "assistant", "content": read_completion(recording).text})
            except StreamError:
                # It is counted where all responses are read.
                return
            due_at = time.perf_counter()

    async def _send(self, stream: UserStream, request: bytes, due_at: float) -> Recording | None:
        """Send a request and keep its response; None if it failed."""
        try:
            async with self._connector.connected() as exchange:
                exchange.send(request)
                recording = await exchange.response()
        except StreamError as error:
            self._failures.append(error.message)
            return None
        self._responses.append(_Response(stream.group, due_at, recording))
        return recording

    async def _beat(self) -> None:
        """Note how late the event loop wakes this task, every HEARTBEAT_S."""
        while True:
            due_at = time.perf_counter() + HEARTBEAT_S
            try:
                await asyncio.sleep(HEARTBEAT_S)
            finally:
                # The end of a load may find a beat overdue, too.
                self._lags.append(max(0.0, time.perf_counter() - due_at))

    async def _report(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(PROGRESS_S)
            ended = len(self._responses) + len(self._failures)
            if ended > reported:
                self._on_progress(ended)
                reported = ended


def answer_of(completion: StreamedCompletion, group: str, due_at: float = 0.0) -> CompletedRequest:
    """Return a completion's times and counts."""
    gaps = tuple(later.at - earlier.at for earlier, later in itertools.pairwise(completion.chunks))
    return CompletedRequest(
        completion.sent_at,
        completion.first_at,
        completion.last_at,
        completion.num_prompt_tokens,
        completion.num_cached_tokens,
        completion.num_tokens,
        gaps,
        group,
        due_at,
        completion.finish_reason,
        completion.speculation,
    )
