"""The streaming client against a scripted server on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.client import Address, complete, get
from foretoken.bench.completion import Recording, StreamError, read_completion
from tests.support.certificates import Authority
from tests.support.scripted_server import STREAM_HEAD, chunk, event, scripted_server, text_event, usage_event

END = chunk(event(b"[DONE]")) + chunk(b"")


def plain_script(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield an answer: the prompt's name, then two and three more tokens in one chunk."""
    yield STREAM_HEAD
    yield chunk(event(text_event(body["prompt"])))
    yield chunk(event(text_event("b")))
    yield chunk(event(text_event("cde"))) + chunk(event(text_event("", finish="length")))
    yield chunk(event(usage_event(5, drafted=4))) + END


def test_reads_text_usage_and_figures_of_a_stream() -> None:
    with scripted_server(plain_script) as server:
        (completion,) = complete(server.address, [{"prompt": "a", "stream": True}])
    assert server.bodies == [{"prompt": "a", "stream": True}]
    assert completion.text == "abcde"
    assert (completion.num_prompt_tokens, completion.num_tokens, completion.num_cached_tokens) == (3, 5, 0)
    assert completion.finish_reason == "length"
    assert completion.speculation == {"num_draft_tokens": 4, "mean_tokens_per_step": 2.0}
    assert [each.num_tokens for each in completion.chunks] == [None, None, None]
    assert completion.sent_at <= completion.first_at <= completion.last_at


def test_streams_run_at_once_and_answers_keep_their_order() -> None:
    together = threading.Barrier(3)

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        # Nobody gets a byte before all three requests are there.
        together.wait()
        yield from plain_script(body)

    with scripted_server(script) as server:
        completions = complete(server.address, [{"prompt": name} for name in ("x", "y", "z")])
    assert [completion.text for completion in completions] == ["xbcde", "ybcde", "zbcde"]


def test_each_arrival_comes_with_the_tokens_of_all_streams() -> None:
    both_have_text = threading.Event()
    seen = []

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        yield STREAM_HEAD + chunk(event(text_event("a")))
        both_have_text.wait()
        yield chunk(event(usage_event(1))) + END

    def on_arrival(recordings: Sequence[Recording]) -> None:
        seen.append([len(each.times) for each in recordings])
        if all(b"data" in each.raw for each in recordings):
            both_have_text.set()

    with scripted_server(script) as server:
        complete(server.address, [{}, {}], on_arrival=on_arrival)
    assert seen[0] in ([1, 0], [0, 1]) and all(sum(counts) == number for number, counts in enumerate(seen, start=1))


def recording(*arrivals: tuple[float, bytes]) -> Recording:
    """Return a response that came in these pieces at these times."""
    made = Recording(sent_at=0.0)
    for at, data in arrivals:
        made.raw += data
        made.ends.append(len(made.raw))
        made.times.append(at)
    return made


def test_an_event_arrives_with_its_last_byte() -> None:
    first, second = event(text_event("a", 1)), event(text_event("bcd", 4))
    # One event in two HTTP chunks, and the second event's HTTP chunk in two TCP segments.
    stream = STREAM_HEAD + chunk(first[:20]) + chunk(first[20:])
    tail = chunk(second)
    rest = chunk(event(usage_event(4))) + END
    completion = read_completion(
        recording((1.0, stream[:-30]), (2.0, stream[-30:] + tail[:10]), (3.0, tail[10:]), (4.0, rest))
    )
    assert [(each.at, each.text, each.num_tokens) for each in completion.chunks] == [(2.0, "a", 1), (3.0, "bcd", 4)]
    assert (completion.first_at, completion.last_at) == (2.0, 3.0)


def test_chunks_without_text_have_no_part_in_the_times() -> None:
    completion = read_completion(
        recording(
            (1.0, STREAM_HEAD + chunk(event(text_event("")))),
            (2.0, chunk(b": keep-alive\n\n") + chunk(event(text_event("a")))),
            (3.0, chunk(event(text_event("b")))),
            (4.0, chunk(event(text_event("", finish="length"))) + chunk(event(usage_event(2))) + END),
        )
    )
    assert (completion.first_at, completion.last_at) == (2.0, 3.0)


def test_token_ids_are_joined() -> None:
    completion = read_completion(
        recording(
            (
                1.0,
                STREAM_HEAD
                + chunk(event(text_event("a", token_ids=[5])))
                + chunk(event(text_event("", token_ids=[6, 7])))
                + chunk(event(usage_event(3)))
                + END,
            )
        )
    )
    assert completion.token_ids == (5, 6, 7)


def test_a_chats_text_comes_from_its_deltas() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "yes"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]},
    ]
    pieces = [(float(number), chunk(event({"choices": [{"delta": delta}]}))) for number, delta in enumerate(deltas)]
    end = chunk(event({"choices": [{"delta": {}, "finish_reason": "stop"}]})) + chunk(event(usage_event(7))) + END
    completion = read_completion(recording((0.0, STREAM_HEAD), *pieces, (4.0, end)))
    assert completion.text == "hmyesf{}" and completion.finish_reason == "stop" and completion.num_tokens == 7
    assert (completion.first_at, completion.last_at) == (1.0, 3.0)


def test_tokens_are_those_of_usage_and_not_chunks() -> None:
    # A server that puts several tokens in a chunk, several chunks in a
    # segment, and one text in none.
    merged = recording(
        (1.0, STREAM_HEAD + chunk(event(text_event("a b c")))),
        (2.0, chunk(event(text_event("d e f g")) + event(text_event("h")))),
        (3.0, chunk(event(usage_event(9))) + END),
    )
    completion = read_completion(merged)
    assert completion.num_tokens == 9 and len(completion.chunks) == 3
    assert (completion.first_at, completion.last_at) == (1.0, 2.0)


def test_an_output_without_text_ends_when_the_server_says_so() -> None:
    pieces = [
        (1.0, STREAM_HEAD),
        (2.0, chunk(event(text_event("", finish="stop"))) + chunk(event(usage_event(1))) + END),
    ]
    completion = read_completion(recording(*pieces))
    assert (completion.text, completion.num_tokens, completion.first_at) == ("", 1, 2.0)


def test_a_body_without_chunks_has_its_times_and_any_line_ends() -> None:
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    first, rest = event(text_event("a")), event(text_event("b")) + event(usage_event(2)) + event(b"[DONE]")
    split = len(first) - 1
    for ends in (b"\n", b"\r\n"):
        one, two = first.replace(b"\n", ends), rest.replace(b"\n", ends)
        completion = read_completion(recording((1.0, head + one[:split]), (2.0, one[split:]), (3.0, two)))
        assert [(each.at, each.text) for each in completion.chunks] == [(2.0, "a"), (3.0, "b")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 9\r\n\r\nqueuefull", "status 429: queuefull"),
        (STREAM_HEAD + chunk(event(text_event("a"))), "cut off"),
        (STREAM_HEAD + chunk(event(text_event("a")))[:-6], "cut off"),
        (STREAM_HEAD + chunk(event(text_event("a"))) + chunk(event(usage_event(1))) + chunk(b""), "DONE"),
        (STREAM_HEAD + chunk(event(text_event("a"))) + END, "usage"),
        (STREAM_HEAD + chunk(event(usage_event(1))) + END, "text"),
        (STREAM_HEAD + chunk(event({"error": {"message": "gone"}})) + END, "gone"),
        (b"", "no HTTP response"),
        (STREAM_HEAD + b"no number\r\n", "no chunked response"),
        (STREAM_HEAD + chunk(event(b"{")) + END, "no JSON object"),
    ],
)
def test_an_incomplete_stream_is_an_error(answer: bytes, message: str) -> None:
    with scripted_server(lambda body: iter([answer])) as server, pytest.raises(StreamError, match=message):
        complete(server.address, [{}])


def test_silence_is_an_error() -> None:
    ended = threading.Event()

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        ended.wait()
        yield b""

    with scripted_server(script) as server:
        with pytest.raises(StreamError, match="nothing came"):
            complete(server.address, [{}], timeout_s=0.05)
        ended.set()


def test_get_reads_status_and_body() -> None:
    answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"
    with scripted_server(lambda body: iter([answer])) as server:
        assert get(server.address, "/ready") == (503, b"{}")


def test_a_server_that_keeps_connections_open_is_not_waited_for() -> None:
    release = threading.Event()

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if body.get("path") is None:
            yield from plain_script(body)
        else:
            yield b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab"
            yield b"cd"
        release.wait()

    with scripted_server(script) as server:
        try:
            assert get(server.address, "/ready") == (200, b"abcd")
            assert complete(server.address, [{"prompt": "a"}])[0].text == "abcde"
        finally:
            release.set()


def test_address_of_a_url() -> None:
    assert Address.parse("http://127.0.0.1:8000/") == Address("127.0.0.1", 8000)
    assert Address.parse("https://host/a/b/", "k") == Address("host", 443, True, "/a/b", "k")
    for url in ("127.0.0.1:8000", "ftp://host:1", "http://:80", "http://host:99999"):
        with pytest.raises(ValueError, match="expected http"):
            Address.parse(url)


def test_a_request_has_prefix_key_and_body_and_the_key_is_never_shown() -> None:
    address = Address("h", 1, prefix="/a", key="secret")
    head, _, payload = address.request("POST", "/v1/completions", {"a": 1}).partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /a/v1/completions HTTP/1.1"
    assert b"Authorization: Bearer secret" in head and b"Content-Length: 8" in head and payload == b'{"a": 1}'
    assert "secret" not in f"{address} {address!r}"


def test_tls_is_used_and_the_servers_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    with scripted_server(plain_script, authority.issue("server")) as server:
        address = Address("localhost", server.address.port, is_encrypted=True)
        with pytest.raises(StreamError, match="certificate verify failed"):
            complete(address, [{"prompt": "a"}])
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        (completion,) = complete(address, [{"prompt": "a"}])
    assert completion.text == "abcde"
