"""``foretoken top`` as a user types it, against a made-up gateway, in a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from foretoken.cli import app
from foretoken.commands.gateway_reader import GatewayReader
from foretoken.errors import ForetokenError
from tests.support.command_line import ENVIRONMENT, foretoken, free_port

READY = {"status": "ready", "model": "demo", "verifiers": []}
ACTIVITY = {"verifiers": [{"max_queue": 12}], "requests": []}
OPERATOR_KEY = "an operator's own key"
# On a terminal: to the alternate screen, and back.
ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"

Answer = tuple[int, str]


def exposition(number: int) -> str:
    """Return the metrics of a gateway that ends 10 requests between two looks at it."""
    return f'foretoken_request_success_total{{model_name="demo"}} {10 * number}\nforetoken_gateway_num_requests 7\n'


def error(status: int, message: str) -> Answer:
    return status, json.dumps({"error": {"message": message}})


class Gateway:
    """Answers by path; ``keys`` are those that it was shown."""

    def __init__(self, port: int = 0, **answers: Callable[[], Answer]) -> None:
        looks = itertools.count(1)
        self.keys: list[str | None] = []
        self._answers = {
            "metrics": lambda: (200, exposition(next(looks))),
            "ready": lambda: (200, json.dumps(READY)),
            "activity": lambda: (200, json.dumps(ACTIVITY)),
        } | answers
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.keys.append(self.headers["authorization"])
                status, text = gateway._answers[self.path.rpartition("/")[2]]()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def top(gateway: Gateway, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return foretoken("top", "--url", gateway.url, "--interval", "0.1", *words, **environment)


def refusal(gateway: Gateway, operator_key: str = "") -> str:
    with GatewayReader(gateway.url, operator_key) as reader, pytest.raises(ForetokenError) as caught:
        reader.read()
    return caught.value.message


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "operator.key"
    file.write_text(OPERATOR_KEY)
    return file


@pytest.mark.parametrize("words", [("--once",), ()])
def test_without_a_terminal_one_picture_is_printed(words: tuple[str, ...]) -> None:
    with Gateway() as gateway:
        result = top(gateway, *words)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"demo at {gateway.url}: ready ") and max(map(len, lines)) <= 80
    assert "\x1b" not in result.stdout
    assert "In gateways            requests 7, " in result.stdout
    # 10 in a tenth of a second and some: two looks, and no more.
    (rates,) = [line for line in lines if line.startswith("Requests a second")]
    finished = float(rates.split()[4].rstrip(","))
    assert 0 < finished <= 100
    assert gateway.keys == [None] * 4


def test_the_environments_key_is_sent_and_of_several_the_first() -> None:
    with Gateway() as gateway:
        assert top(gateway, FORETOKEN_API_KEY="one two").returncode == 0
    assert set(gateway.keys) == {"Bearer one"}


def test_the_operators_key_is_sent_alone_and_shows_more(key_file: Path) -> None:
    with Gateway() as gateway:
        result = top(gateway, "--admin-api-key-file", str(key_file), FORETOKEN_API_KEY="one")
    assert "waiting in verifiers 0 of 12" in result.stdout and "Ended " in result.stdout
    assert set(gateway.keys) == {f"Bearer {OPERATOR_KEY}"}


@pytest.mark.parametrize(
    ("answer", "environment", "message"),
    [
        (
            error(401, "this server needs a key"),
            {},
            "this server needs a key; set FORETOKEN_API_KEY, or give the operator's with --admin-api-key-file",
        ),
        (
            error(403, "this key may not read metrics"),
            {"FORETOKEN_API_KEY": "one"},
            "this key may not read metrics (the key comes from FORETOKEN_API_KEY); or give the operator's with "
            "--admin-api-key-file",
        ),
        (error(404, "Not Found"), {}, "{url} answers, but is not a foretoken gateway"),
        ((200, "<!doctype html>\n<html>"), {}, "{url} answers, but is not a foretoken gateway"),
        ((200, "vllm:num_requests_running 3\n"), {}, "{url} answers, but is not a foretoken gateway"),
        ((500, "oh"), {}, "{url}/metrics answered with status 500"),
        # Of several gateway processes, the one that adds up the counts.
        (error(503, "the counts are not available"), {}, "the counts are not available"),
    ],
)
def test_a_refusal_says_what_to_set(
    answer: Answer, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORETOKEN_API_KEY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Gateway(metrics=lambda: answer) as gateway:
        assert refusal(gateway) == message.format(url=gateway.url)


def test_a_server_without_operators_endpoints_is_named() -> None:
    with Gateway(activity=lambda: error(404, "Not Found")) as gateway:
        assert refusal(gateway, OPERATOR_KEY) == (
            "this server has no endpoints for operators: start it with --admin-api-key-file"
        )


@pytest.mark.parametrize("text", ["<html>", "[]"])
def test_what_a_proxy_answers_is_refused(text: str) -> None:
    with Gateway(ready=lambda: (502, text)) as gateway:
        assert refusal(gateway) == f"{gateway.url}/ready answered with status 502, without a JSON object"


def test_a_gateway_that_is_not_ready_is_shown() -> None:
    with Gateway(ready=lambda: (503, '{"status": "not ready"}')) as gateway:
        result = top(gateway)
    assert result.returncode == 0
    assert result.stdout.startswith(f"{gateway.url}: not ready ")


def test_where_nothing_answers_it_says_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = foretoken("top", FORETOKEN_URL=url)
    assert result.returncode == 1
    assert result.stderr == (
        f"foretoken: nothing answers at {url}; start a server with: foretoken serve MODEL; "
        "or name a running one with --url\n"
    )


@pytest.mark.parametrize("interval", ["0", "x", "1e9"])
def test_an_interval_that_is_none_is_refused(interval: str) -> None:
    result = CliRunner().invoke(app, ["top", "--interval", interval])
    assert result.exit_code == 2 and "--interval" in result.output


def _take_the_terminal() -> None:
    """Make the terminal at its input the one that sends it Ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """``foretoken top`` on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "foretoken", "top", "--url", url, "--interval", "0.1"],
            env=ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_take_the_terminal,
        )
        os.close(inner)
        self.shown = b""

    def wait_for(self, text: bytes) -> None:
        """Read until ``text`` is shown anew."""
        self.shown = b""
        while text not in self.shown:
            more = self._read()
            assert more, self.shown
            self.shown += more

    def type(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def end(self) -> int:
        """Read to the end; return the exit status."""
        while more := self._read():
            self.shown += more
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def _read(self) -> bytes:
        try:
            return os.read(self._end, 65536)
        except OSError:
            # How Linux says that the other end is closed.
            return b""


@contextmanager
def on_a_terminal(gateway: Gateway) -> Iterator[Terminal]:
    terminal = Terminal(gateway.url)
    try:
        yield terminal
    finally:
        terminal.close()


def test_it_is_shown_anew_until_ctrl_c() -> None:
    with Gateway() as gateway, on_a_terminal(gateway) as terminal:
        terminal.wait_for(ENTERED)
        # The second picture has rates, and a third follows.
        for _ in range(2):
            terminal.wait_for(b", the last ")
        terminal.type(b"\x03")
        assert terminal.end() == 0
        assert LEFT in terminal.shown and b"Traceback" not in terminal.shown


def test_sigterm_gives_the_screen_back() -> None:
    with Gateway() as gateway, on_a_terminal(gateway) as terminal:
        terminal.wait_for(b"Requests")
        terminal.process.terminate()
        assert terminal.end() == 128 + signal.SIGTERM
        assert LEFT in terminal.shown


def test_a_gateway_that_goes_is_asked_until_it_is_back() -> None:
    gateway = Gateway()
    with on_a_terminal(gateway) as terminal:
        with gateway:
            terminal.wait_for(b"In gateways")
        terminal.wait_for(b"no answer since ")
        with Gateway(int(gateway.url.rpartition(":")[2])):
            terminal.wait_for(b"In gateways")
            terminal.type(b"\x03")
            assert terminal.end() == 0
