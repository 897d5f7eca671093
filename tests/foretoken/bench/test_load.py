"""Client processes drive a scripted server: closed streams, arrivals, errors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.stack import free_ports
from foretoken.bench.client import Address, StreamError, request_bytes
from foretoken.bench.load import Clients, Stream, record_streams, running_clients
from tests.support.scripted_server import STREAM_HEAD, chunk, event, scripted_server, text_event, usage_event


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with running_clients(2) as found:
        yield found


def answer(body: dict[str, Any]) -> Iterator[bytes]:
    """Answer with as many chunks as tokens were asked for, one token each."""
    yield STREAM_HEAD
    for number in range(body["max_tokens"]):
        yield chunk(event(text_event(f"{number} ")))
    yield chunk(event(usage_event(body["max_tokens"]))) + chunk(event(b"[DONE]")) + chunk(b"")


def body(name: str, max_tokens: int = 3) -> dict[str, Any]:
    return {"name": name, "max_tokens": max_tokens}


def test_a_stream_sends_its_next_request_after_the_last_one(clients: Clients) -> None:
    lock = threading.Lock()
    running: set[str] = set()
    together: list[frozenset[str]] = []

    def script(request: dict[str, Any]) -> Iterator[bytes]:
        with lock:
            running.add(request["name"])
            together.append(frozenset(running))
        pieces = list(answer(request))
        yield from pieces[:-1]
        with lock:
            running.discard(request["name"])
        yield pieces[-1]

    streams = [Stream(tuple(body(f"{user}{turn}") for turn in range(3)), group=user) for user in "abc"]
    with scripted_server(script) as server:
        load = clients.run(server.address, streams)
    order = [request["name"] for request in server.bodies]
    assert sorted(order) == sorted(f"{user}{turn}" for user in "abc" for turn in range(3))
    for user in "abc":
        assert [name for name in order if name[0] == user] == [f"{user}{turn}" for turn in range(3)]
    assert all(len({name[0] for name in names}) == len(names) for names in together)
    assert sorted(each.group for each in load.answers) == list("aaabbbccc")
    assert 0 <= load.busiest <= 1.5


def test_an_answer_has_times_counts_and_gaps(clients: Clients) -> None:
    with scripted_server(answer) as server:
        (found,) = clients.run(server.address, [Stream((body("a", 4),))]).answers
    assert (found.num_tokens, found.num_prompt_tokens, found.num_cached_tokens) == (4, 3, 0)
    assert len(found.gaps) == 3 and all(gap >= 0 for gap in found.gaps)
    assert found.sent_at < found.first_at <= found.last_at
    assert found.first_at + sum(found.gaps) == pytest.approx(found.last_at)


def test_arrivals_wait_for_their_time() -> None:
    now = time.perf_counter()
    starts = [now + 0.02 * number for number in (2, 0, 1)]
    with scripted_server(answer) as server:
        requests = [[request_bytes(server.address, body(str(number)))] for number in (2, 0, 1)]
        recordings = record_streams(server.address, requests, starts, 60.0)
    sent = [recording.sent_at for (recording,) in recordings]
    assert all(at >= start for at, start in zip(sent, starts, strict=True))
    assert sent[1] < sent[2] < sent[0]


def test_a_refusal_is_an_error_and_the_clients_go_on(clients: Clients) -> None:
    def refuse(request: dict[str, Any]) -> Iterator[bytes]:
        yield b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy"

    streams = [Stream((body("a"),)), Stream((body("b"),)), Stream((body("c"),))]
    with scripted_server(refuse) as server, pytest.raises(StreamError, match="status 429: busy"):
        clients.run(server.address, streams)
    with scripted_server(answer) as server:
        assert len(clients.run(server.address, streams).answers) == 3


def test_a_server_that_says_nothing_is_an_error(clients: Clients) -> None:
    release = threading.Event()

    def wait(request: dict[str, Any]) -> Iterator[bytes]:
        yield STREAM_HEAD
        release.wait()

    with scripted_server(wait) as server:
        try:
            with pytest.raises(StreamError, match=r"nothing came for 0\.2 s"):
                clients.run(server.address, [Stream((body("a"),))], timeout_s=0.2)
        finally:
            release.set()


def test_a_server_that_is_not_there_is_an_error(clients: Clients) -> None:
    (port,) = free_ports(1)
    with pytest.raises(StreamError, match=f"127.0.0.1:{port}"):
        clients.run(Address("127.0.0.1", port), [Stream((body("a"),))])


def test_clients_end_quietly_in_the_middle_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    release, arrived = threading.Event(), threading.Event()

    def wait(request: dict[str, Any]) -> Iterator[bytes]:
        yield STREAM_HEAD
        arrived.set()
        release.wait()

    def run(clients: Clients, address: Address) -> None:
        with contextlib.suppress(EOFError, OSError):
            clients.run(address, [Stream((body("a"),))])

    with scripted_server(wait) as server:
        try:
            with running_clients(1) as clients:
                thread = threading.Thread(target=run, args=(clients, server.address))
                thread.start()
                arrived.wait()
            thread.join()
        finally:
            release.set()
    assert capfd.readouterr().err == ""
