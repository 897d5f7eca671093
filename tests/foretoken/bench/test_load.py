"""Client processes drive a scripted server: closed streams, arrivals, errors."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.bench import load
from foretoken.bench.client import CHAT, Address, run_loop
from foretoken.bench.completion import StreamError
from foretoken.bench.load import Clients, running_clients
from foretoken.bench.stream import UserStream
from foretoken.free_ports import free_ports
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

    streams = [UserStream(tuple(body(f"{user}{turn}") for turn in range(3)), group=user) for user in "abc"]
    with scripted_server(script) as server:
        found = clients.run(server.address, streams)
    order = [request["name"] for request in server.bodies]
    assert sorted(order) == sorted(f"{user}{turn}" for user in "abc" for turn in range(3))
    for user in "abc":
        assert [name for name in order if name[0] == user] == [f"{user}{turn}" for turn in range(3)]
    assert all(len({name[0] for name in names}) == len(names) for names in together)
    assert sorted(each.group for each in found.answers) == list("aaabbbccc")
    assert 0 <= found.busiest <= 1.5


def test_an_answer_has_times_counts_and_gaps(clients: Clients) -> None:
    with scripted_server(answer) as server:
        (found,) = clients.run(server.address, [UserStream((body("a", 4),))]).answers
    assert (found.num_tokens, found.num_prompt_tokens, found.num_cached_tokens) == (4, 3, 0)
    assert len(found.gaps) == 3 and all(gap >= 0 for gap in found.gaps)
    assert found.sent_at < found.first_at <= found.last_at
    assert found.first_at + sum(found.gaps) == pytest.approx(found.last_at)


def test_arrivals_wait_for_their_time(clients: Clients) -> None:
    streams = [UserStream((body(str(number)),), starts_after=0.02 * number) for number in (2, 0, 1)]
    with scripted_server(answer) as server:
        found = clients.run(server.address, streams)
    due = sorted(each.due_at for each in found.answers)
    assert all(each.sent_at >= each.due_at for each in found.answers)
    assert [later - due[0] for later in due] == pytest.approx([0, 0.02, 0.04])
    assert len(found.lags) >= 1 and min(found.lags) >= 0 and found.ended_at > found.started_at


def test_no_more_streams_run_than_the_limit_says_and_all_are_run(clients: Clients) -> None:
    lock = threading.Lock()
    running: set[str] = set()
    most = 0

    def script(request: dict[str, Any]) -> Iterator[bytes]:
        nonlocal most
        with lock:
            running.add(request["name"])
            most = max(most, len(running))
        pieces = list(answer(request))
        yield from pieces[:-1]
        with lock:
            running.discard(request["name"])
        yield pieces[-1]

    reported: list[int] = []
    with scripted_server(script) as server:
        found = clients.drive(server.address, [UserStream((body(str(i)),)) for i in range(9)], 60.0, 3, reported.append)
    assert sorted(each["name"] for each in server.bodies) == [str(i) for i in range(9)]
    assert 1 <= most <= 3 and len(found.answers) == 9 and reported[-1] == 9 and reported == sorted(reported)


def test_a_conversation_carries_the_servers_answers(clients: Clients) -> None:
    def script(request: dict[str, Any]) -> Iterator[bytes]:
        text = f"re: {request['messages'][-1]['content']}"
        yield STREAM_HEAD + chunk(event({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}))
        yield chunk(event(usage_event(2))) + chunk(event(b"[DONE]")) + chunk(b"")

    bodies = tuple({"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("one", "two"))
    with scripted_server(script) as server:
        found = clients.drive(server.address, [UserStream(bodies, path=CHAT, is_conversation=True)])
    assert server.paths == [CHAT, CHAT] and len(found.answers) == 2
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "re: one", "two"]
    assert server.bodies[1]["model"] == "m" and found.answers[1].due_at >= found.answers[0].last_at


def test_no_request_starts_after_the_duration_and_those_that_run_are_waited_for(clients: Clients) -> None:
    duration_s = 0.5

    def wait(request: dict[str, Any]) -> Iterator[bytes]:
        # It came after the start, so the duration is over then.
        time.sleep(duration_s)
        yield from answer(request)

    streams = [UserStream((body(f"{user}0"), body(f"{user}1"))) for user in "abcd"]
    with scripted_server(wait) as server:
        # A client that is held up for all of the duration sends nothing.
        while not server.bodies:
            found = clients.drive(server.address, streams, 60.0, 2, duration_s=duration_s)
    # Two may run at once; their next requests and the other streams were due too late.
    names = [request["name"] for request in server.bodies]
    assert set(names) <= {"a0", "b0"}
    assert len(found.answers) == len(names) and found.failures == []


def test_more_streams_come_until_the_duration_is_over(clients: Clients) -> None:
    """Then the next run gets its own streams, and none that was asked for in vain."""
    more = (UserStream((body(f"more {number}"),)) for number in itertools.count())
    with scripted_server(answer) as server:
        found = clients.drive(server.address, [UserStream((body("first"),))] * 2, 60.0, 2, duration_s=0.5, more=more)
        names = [request["name"] for request in server.bodies]
        assert len(found.answers) == len(names) and found.failures == []
        assert len({*names} - {"first"}) == len(names) - names.count("first")
        few = iter([UserStream((body("few"),))])
        found = clients.drive(server.address, [UserStream((body("first"),))], 60.0, 1, more=few)
        assert [request["name"] for request in server.bodies][len(names) :] == ["first", "few"]
        assert len(found.answers) == 2
        assert len(clients.drive(server.address, [UserStream((body("last"),))]).answers) == 1


def test_failures_are_counted_beside_answers(clients: Clients) -> None:
    def script(request: dict[str, Any]) -> Iterator[bytes]:
        if request["name"] == "bad":
            yield b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull"
        else:
            yield from answer(request)

    streams = [UserStream((body("bad"), body("good"))), UserStream((body("good"),))]
    with scripted_server(script) as server:
        found = clients.drive(server.address, streams)
    assert found.failures == ["status 503: full"] and len(found.answers) == 2


def test_a_held_up_event_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PROGRESS_S", 0.0)
    held_s = 3 * load.HEARTBEAT_S

    def hold_up(ended: int) -> None:
        time.sleep(held_s)

    with scripted_server(answer) as server:
        work = load._Work(server.address, [UserStream((body("a"), body("b"), body("c")))], 60.0, 1)
        found = run_loop(load._ClientRun(work, hold_up).load(time.perf_counter()))
    assert len(found.answers) == 3
    # A beat became due while the loop was held, at most one beat after that began.
    assert max(found.lags) >= held_s - load.HEARTBEAT_S


def test_a_refusal_is_an_error_and_the_clients_go_on(clients: Clients) -> None:
    def refuse(request: dict[str, Any]) -> Iterator[bytes]:
        yield b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy"

    streams = [UserStream((body("a"),)), UserStream((body("b"),)), UserStream((body("c"),))]
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
                clients.run(server.address, [UserStream((body("a"),))], timeout_s=0.2)
        finally:
            release.set()


def test_a_server_that_is_not_there_is_an_error(clients: Clients) -> None:
    (port,) = free_ports(1)
    with pytest.raises(StreamError, match=f"127.0.0.1:{port}"):
        clients.run(Address("127.0.0.1", port), [UserStream((body("a"),))])


def test_clients_end_quietly_in_the_middle_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    release, arrived = threading.Event(), threading.Event()

    def wait(request: dict[str, Any]) -> Iterator[bytes]:
        yield STREAM_HEAD
        arrived.set()
        release.wait()

    def run(clients: Clients, address: Address) -> None:
        with contextlib.suppress(EOFError, OSError):
            clients.run(address, [UserStream((body("a"),))])

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
