"""``foretoken complete`` against a scripted REST server: requests, output, colours, figures."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from foretoken.cli import app
from foretoken.commands.complete import LEAST_TIMED_TOKENS, CompletionOptions, _Summary, complete, render
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.free_ports import free_ports
from tests.support.certificates import Authority

GREEN, RESET = "\x1b[32m", "\x1b[0m"
SPECULATION = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "mean_acceptance_length": 2.5}


def chunk(texts: list[str], sources: list[int]) -> dict[str, Any]:
    choice = {"index": 0, "text": "".join(texts), "token_texts": texts, "token_sources": sources}
    return {"object": "text_completion", "choices": [choice]}


LAST = {"choices": [], "usage": {"completion_tokens": 5}, "metrics": {"speculative_decoding": SPECULATION}}
CHUNKS = [chunk(["def", " f"], [0, 1]), chunk(["(", ")", ":\n"], [0, 2, 2]), LAST]


class Server(ThreadingHTTPServer):
    """A server that lists one model, streams ``events`` and keeps the bodies that it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[str] = [json.dumps(item) for item in CHUNKS] + ["[DONE]"]
        self.refusal: tuple[int, bytes] | None = None
        self.models: bytes = b'{"data": [{"id": "demo"}]}'
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply(200, self.server.models)

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.refusal is not None:
            self.reply(*self.server.refusal)
        else:
            self.reply(
                200, b": a comment\n\n" + b"".join(f"data: {event}\n\n".encode() for event in self.server.events)
            )

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(server: Server, *, colour: bool = False, **options: Any) -> tuple[str, str]:
    """Return the written text and the line of figures."""
    written: list[str] = []
    figures = complete(server.url, CompletionOptions("def", **options), write=written.append, colour=colour)
    return "".join(written), figures


def test_plain_text_is_what_the_server_sent(server: Server) -> None:
    text, figures = run(server)
    assert text == "def f():\n"
    assert figures.startswith("5 tokens, ")
    assert figures.endswith("6 of 8 draft tokens accepted (75%), mean acceptance length 2.50")


def test_accepted_draft_tokens_are_green_and_no_other_token_is(server: Server) -> None:
    text, _ = run(server, colour=True)
    assert text == f"def{GREEN} f{RESET}({GREEN}){RESET}{GREEN}:\n{RESET}"


def test_the_request_names_what_was_asked_for_and_nothing_else(server: Server) -> None:
    run(server)
    run(server, max_tokens=7, temperature=0.5, seed=3, drafter="ngram")
    run(server, speculation=False)
    default, full, plain = server.bodies
    assert default == {
        "model": "demo",
        "prompt": "def",
        "max_tokens": 128,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_sources": True,
    }
    assert (full["max_tokens"], full["temperature"], full["seed"]) == (7, 0.5, 3)
    assert full["speculative"] == {"drafter": "ngram"}
    assert plain["speculative"] == {"enabled": False}


def test_a_prompt_may_come_on_standard_input(server: Server) -> None:
    result = CliRunner().invoke(app, ["complete", "-", "--url", server.url], input="def main(\n")
    assert result.exit_code == 0 and "def f():" in result.output
    assert [body["prompt"] for body in server.bodies] == ["def main(\n"]


def test_nothing_drafted_is_said(server: Server) -> None:
    speculation = {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "mean_acceptance_length": 1.0}
    server.events[2] = json.dumps(LAST | {"metrics": {"speculative_decoding": speculation}})
    assert run(server)[1].endswith("nothing drafted")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"text": "a\x1b[2Jb\x07\tc\n"}, "a\ufffd[2Jb\ufffd\tc\n"),
        ({"text": "a\x1bb", "token_texts": ["a", "\x1bb"], "token_sources": [0, 1]}, f"a{GREEN}\ufffdb{RESET}"),
        ({"text": "", "token_texts": [""], "token_sources": [3]}, ""),
        ({"text": "ab", "token_texts": ["a"], "token_sources": [0, 1]}, "ab"),
        ({"text": "ab", "token_texts": ["a", "c"], "token_sources": [0, 1]}, "ab"),
        ({"text": "ab", "token_sources": [2, 1]}, f"{GREEN}ab{RESET}"),
        ({"text": "ab", "token_sources": [2, 0]}, "ab"),
        ({"text": None}, ""),
    ],
)
def test_a_model_cannot_drive_the_terminal(choice: dict[str, Any], shown: str) -> None:
    assert render(choice, colour=True) == shown


def test_nothing_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UnavailableError, match=f"^nothing answers at {url}$"):
        complete(url, CompletionOptions("x"), write=print, colour=False)


def test_a_grpc_port_is_distinguished_from_no_server() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    result = CliRunner().invoke(app, ["complete", "x", "--url", url])
    server.stop(None).wait()
    message = str(result.exception)
    assert f"the server at http://{url} does not answer in HTTP" in message and "is it the gRPC port?" in message
    assert "start a server" not in message


def test_a_server_that_dies_is_taken_for_no_other_one() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def hang_up() -> None:
            connection = listener.accept()[0]
            connection.recv(65536)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ForetokenError, match=f"^{url}: Server disconnected .*; if this server has TLS, give "):
            complete(url, CompletionOptions("x"), write=print, colour=False)
        thread.join()


def test_a_failed_handshake_says_what_to_change(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own, elsewhere = authority.issue("server"), authority.issue("elsewhere", names="DNS:elsewhere")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.chain, own.key)

    def message(url: str) -> str:
        return str(CliRunner().invoke(app, ["complete", "x", "--url", url]).exception)

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    secure = server.url.replace("http:", "https:")
    assert message(secure) == (
        f"the server at {secure} does not answer in TLS; if it has none, give --url {server.url}"
    )
    server.socket = context.wrap_socket(server.socket, server_side=True)
    unknown = message(secure)
    assert unknown.startswith(f"the certificate of {secure} is refused: ") and "; set SSL_CERT_FILE to " in unknown
    assert message(server.url).endswith(f"; if this server has TLS, give --url {secure}")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    assert CliRunner().invoke(app, ["complete", "x", "--url", secure]).exit_code == 0
    context.load_cert_chain(elsewhere.chain, elsewhere.key)
    assert "is not valid for" in message(secure) and "SSL_CERT_FILE" not in message(secure)


def test_a_refusal_is_the_servers_own_message(server: Server) -> None:
    server.refusal = (400, b'{"error": {"message": "max_tokens: at most 4096", "param": "max_tokens"}}')
    with pytest.raises(ForetokenError, match=r"^max_tokens: at most 4096$") as caught:
        run(server)
    assert caught.value.field == "max_tokens"


def test_a_missing_key_and_a_wrong_one_name_the_variable(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.refusal = (401, b'{"error": {"message": "invalid API key", "param": null}}')
    monkeypatch.delenv("FORETOKEN_API_KEY", raising=False)
    with pytest.raises(ForetokenError, match=r"invalid API key; set FORETOKEN_API_KEY$"):
        run(server)
    monkeypatch.setenv("FORETOKEN_API_KEY", "another")
    with pytest.raises(ForetokenError, match=r"invalid API key \(the key comes from FORETOKEN_API_KEY\)$"):
        run(server)


def test_a_refusal_without_a_message_names_the_status(server: Server) -> None:
    server.refusal = (502, b"<html>")
    with pytest.raises(ForetokenError, match="answered with status 502"):
        run(server)


def test_an_error_in_the_stream_is_raised(server: Server) -> None:
    server.events[1:] = [json.dumps({"error": {"message": "the engine stopped"}})]
    with pytest.raises(ForetokenError, match=r"^the engine stopped$"):
        run(server)


def test_a_stream_that_breaks_off_is_an_error(server: Server) -> None:
    del server.events[1:]
    with pytest.raises(ForetokenError, match="ended the stream before it was complete"):
        run(server)


@pytest.mark.parametrize("models", [b"hello", b"{}", b'{"data": []}', b"[]"])
def test_a_server_of_another_kind(server: Server, models: bytes) -> None:
    server.models = models
    with pytest.raises(UnavailableError, match="is not an OpenAI-compatible server"):
        run(server)


def test_an_address_that_is_none() -> None:
    (port,) = free_ports(1)
    with pytest.raises(UnavailableError, match=f"localhost:{port}"):
        complete(f"localhost:{port}", CompletionOptions("x"), write=print, colour=False)


def test_a_few_tokens_have_no_speed() -> None:
    for num_tokens, is_shown in ((LEAST_TIMED_TOKENS - 1, False), (LEAST_TIMED_TOKENS, True)):
        summary = _Summary()
        summary.add(chunk(["a"], [0]), 1.0)
        summary.add(chunk(["b"], [0]) | {"usage": {"completion_tokens": num_tokens}}, 2.0)
        assert (f"{num_tokens - 1}.0 tok/s" in summary.line()) == is_shown


def test_the_speed_is_the_servers_however_late_chunks_are_read() -> None:
    summary = _Summary()
    summary.add(chunk(["a"], [0]), 1.0)
    summary.add(chunk(["b"], [0]), 1.0001)
    summary.add({"usage": {"completion_tokens": 64}, "metrics": {"tokens_per_second": 700.5}}, 1.0002)
    assert "64 tokens, 700.5 tok/s" in summary.line()
