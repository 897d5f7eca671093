"""Drive a server over HTTP with many streams, from client processes of their own.

A stream is one user: it sends its next request when the last one has ended. A client process only
records bytes and arrival times while streams run (foretoken/bench/client.py), and parses them at the
end.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from foretoken.bench.client import (
    RECEIVE_BYTES,
    Address,
    Completion,
    Recording,
    StreamError,
    read_completion,
    request_bytes,
)

# All clients begin this long after they have been told to.
LEAD_S = 0.1
# Client processes on a machine with many cores.
MOST_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Stream:
    """One user's request bodies; the first is sent ``starts_after`` seconds after the start.

    ``group`` is a label that its answers keep.
    """

    bodies: tuple[dict[str, Any], ...]
    starts_after: float = 0.0
    group: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The times of one completed request, in perf_counter seconds, and its tokens.

    ``gaps`` are the seconds between two chunks that follow each other.
    """

    sent_at: float
    first_at: float
    last_at: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    gaps: tuple[float, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients saw. ``busiest``: the largest CPU share of one client while it recorded."""

    answers: list[Answer]
    busiest: float


@dataclass(frozen=True, slots=True)
class _Work:
    address: Address
    streams: Sequence[Stream]
    timeout_s: float


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

    def close(self) -> None:
        """End the processes, also in the middle of a run."""
        # First the processes: one that is in the middle of a run would report that its pipe is gone.
        for process in self._processes:
            process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def run(self, address: Address, streams: Sequence[Stream], timeout_s: float = 120.0) -> Load:
        """Send all streams' requests and return the answers.

        Raises:
            StreamError: a stream broke, or nothing arrived at a client for ``timeout_s`` seconds.
        """
        pipes = self._pipes[: len(streams)]
        for index, pipe in enumerate(pipes):
            pipe.send(_Work(address, streams[index :: len(pipes)], timeout_s))
        for pipe in pipes:
            pipe.recv()
        start = time.perf_counter() + LEAD_S
        for pipe in pipes:
            pipe.send(start)
        found = [pipe.recv() for pipe in pipes]
        for each in found:
            if isinstance(each, StreamError):
                raise each
        return Load([answer for load in found for answer in load.answers], max(load.busiest for load in found))


@contextlib.contextmanager
def running_clients(count: int) -> Iterator[Clients]:
    """Start ``count`` client processes, and end them at the end of the block."""
    clients = Clients(count)
    try:
        yield clients
    finally:
        clients.close()


def _client(pipe: Connection) -> None:
    """Run one client process until its pipe is closed."""
    while True:
        try:
            work: _Work = pipe.recv()
        except EOFError:
            return
        requests = [[request_bytes(work.address, body) for body in stream.bodies] for stream in work.streams]
        pipe.send("prepared")
        try:
            pipe.send(_run(work, requests, pipe.recv()))
        except StreamError as error:
            pipe.send(error)


def _run(work: _Work, requests: Sequence[Sequence[bytes]], start: float) -> Load:
    time.sleep(max(0.0, start - time.perf_counter()))
    began, used = time.perf_counter(), time.process_time()
    starts = [start + stream.starts_after for stream in work.streams]
    try:
        recordings = record_streams(work.address, requests, starts, work.timeout_s)
    except OSError as error:
        raise StreamError(f"http://{work.address.host}:{work.address.port}: {error}") from error
    busy = (time.process_time() - used) / (time.perf_counter() - began)
    pairs = zip(work.streams, recordings, strict=True)
    return Load([answer_of(read_completion(one), stream.group) for stream, each in pairs for one in each], busy)


def record_streams(
    address: Address, requests: Sequence[Sequence[bytes]], starts: Sequence[float], timeout_s: float
) -> list[list[Recording]]:
    """Run all streams to their ends; return each one's responses.

    Args:
        requests: each stream's requests.
        starts: when each stream's first request is sent, in perf_counter seconds.

    Raises:
        StreamError: nothing arrived for ``timeout_s`` seconds.
        OSError: a connection failed.
    """
    recordings: list[list[Recording]] = [[] for _ in requests]
    waiting = sorted(((at, index) for index, at in enumerate(starts)), reverse=True)
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                while waiting and waiting[-1][0] <= time.perf_counter():
                    index = waiting.pop()[1]
                    _send(selector, address, requests[index][0], index, recordings[index])
                until = max(0.0, waiting[-1][0] - time.perf_counter()) if waiting else timeout_s
                ready = selector.select(min(until, timeout_s))
                if not ready and not waiting:
                    raise StreamError(f"nothing came for {timeout_s:g} s")
                for key, _ in ready:
                    if _receive(selector, key):
                        continue
                    index = key.data[0]
                    if len(recordings[index]) < len(requests[index]):
                        _send(selector, address, requests[index][len(recordings[index])], index, recordings[index])
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    return recordings


def _send(
    selector: selectors.BaseSelector, address: Address, request: bytes, index: int, recordings: list[Recording]
) -> None:
    recording = Recording(time.perf_counter())
    connection = socket.create_connection((address.host, address.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    selector.register(connection, selectors.EVENT_READ, (index, recording))
    connection.sendall(request)
    recordings.append(recording)


def _receive(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    """Read what has arrived; return whether the response goes on."""
    connection = key.fileobj
    assert isinstance(connection, socket.socket)
    recording: Recording = key.data[1]
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        selector.unregister(connection)
        connection.close()
        return False
    recording.times.append(time.perf_counter())
    recording.raw += data
    recording.ends.append(len(recording.raw))
    return True


def answer_of(completion: Completion, group: str) -> Answer:
    """Return a completion's times and counts."""
    gaps = tuple(later.at - earlier.at for earlier, later in itertools.pairwise(completion.chunks))
    return Answer(
        completion.sent_at,
        completion.first_at,
        completion.last_at,
        completion.num_prompt_tokens,
        completion.num_cached_tokens,
        completion.num_tokens,
        gaps,
        group,
    )
