"""`foretoken serve` on a tiny checkpoint, as a user starts it: output, deaths and stops."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from foretoken.commands.complete import CompletionOptions, complete
from gateway.access.key_file import entry_text
from tests.integration.stack import (
    ENVIRONMENT,
    LONG,
    OUTSIDE,
    SERVICES,
    Stack,
    assert_all_gone,
    running,
    start,
    stream,
    text_of,
    wait_until,
)
from tests.support.certificates import Authority


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("serve") / "log", *OUTSIDE) as stack:
        # On a busy machine the stack is ready before it is.
        wait_until(lambda: is_drafter_attached(stack), stack)
        yield stack


def is_drafter_attached(stack: Stack) -> bool:
    (verifier,) = httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).json()["verifiers"]
    (drafter,) = verifier["drafters"]
    assert drafter["num_attaches"] <= 1
    return bool(drafter["state"] == "attached")


def test_ps_shows_each_service_by_its_words(stack: Stack) -> None:
    listing = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    ours = {process.pid for process in stack.children()}
    lines = [line for line in listing.splitlines()[1:] if int(line.split()[0]) in ours]
    for name in SERVICES:
        assert sum(f"foretoken {name}" in line for line in lines) == 1


@pytest.mark.slow
def test_a_server_with_keys_and_certificates_starts_and_reloads(checkpoint: Path, tmp_path: Path) -> None:
    """The supervisor sees it ready, only the gateway gets
    the key, and SIGHUP reaches the gateway.
    """
    own, secret, keys = "own-secret", "a tenant's secret", tmp_path / "keys.toml"
    authority = Authority(tmp_path)
    server = authority.issue("server")
    keys.write_text(entry_text("tenant", secret))
    flags = ("--api-key-file", str(keys), "--ssl-certfile", str(server.chain), "--ssl-keyfile", str(server.key))
    environment = {**ENVIRONMENT, "FORETOKEN_API_KEY": own}
    with running(checkpoint, tmp_path / "log", *flags, *OUTSIDE, environment=environment) as stack:
        url = f"https://127.0.0.1:{stack.port}"
        curl = f"curl -N --cacert {server.chain} {url}/v1/completions"
        assert f'{curl} -H "authorization: Bearer $FORETOKEN_API_KEY"' in stack.ready_text
        assert f"export SSL_CERT_FILE={server.chain}" in stack.ready_text
        with httpx.Client(
            base_url=url, verify=ssl.create_default_context(cafile=authority.certificate), timeout=None, trust_env=False
        ) as client:

            def status(key: str) -> int:
                return client.get("/v1/models", headers={"x-api-key": key}).status_code

            assert [status(own), status(secret), status("wrong")] == [200, 200, 401]
            for name in ("verifier", "drafter"):
                assert own not in stack.service(name).environ().values()
            shown = [word for process in stack.children() for word in process.cmdline()]
            assert own not in " ".join(shown) and own not in stack.ready_text
            keys.write_text(entry_text("other", "another secret"))
            stack.process.send_signal(signal.SIGHUP)
            wait_until(lambda: status("another secret") == 200, stack)
            assert [status(own), status(secret)] == [200, 401]
        stack.process.send_signal(signal.SIGTERM)
        assert stack.process.wait() == 0
        assert own not in stack.log.read_text() and secret not in stack.log.read_text()


def test_the_printed_curl_streams(stack: Stack) -> None:
    if shutil.which("curl") is None:
        raise AssertionError("curl is missing: the ready text could not be tried")
    line = next(line for line in stack.ready_text.splitlines() if line.strip().startswith("curl"))
    words = [*shlex.split(line), "--silent", "--noproxy", "*"]
    answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert answer.count("data: ") > 2
    assert answer.rstrip().endswith("data: [DONE]")


def test_the_printed_client_example_runs(stack: Stack) -> None:
    _, heading, lines = stack.ready_text.partition("pip install openai):\n")
    assert heading
    result = subprocess.run([sys.executable, "-c", lines], env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_complete_streams_and_tells_what_was_accepted(stack: Stack) -> None:
    # On a busy machine drafts of so small a model may not pay for a while: then none are made.
    figures, written = "nothing drafted", list[str]()
    while figures.endswith("nothing drafted"):
        written.clear()
        options = CompletionOptions("for i in range(10):\n", max_tokens=400, temperature=0)
        figures = complete(stack.url, options, write=written.append, colour=False)
    plain: list[str] = []
    options = CompletionOptions("for i in range(10):\n", max_tokens=400, temperature=0, speculation=False)
    assert complete(stack.url, options, write=plain.append, colour=False).endswith("nothing drafted")
    assert "".join(written) == "".join(plain) != ""
    assert "draft tokens accepted" in figures


def test_a_second_stack_on_the_port_is_refused_and_the_first_lives(
    stack: Stack, checkpoint: Path, tmp_path: Path
) -> None:
    second = start(checkpoint, tmp_path / "log", port=stack.port)
    assert second.process.wait() == 2
    assert (tmp_path / "log").read_text() == (
        f"foretoken: port {stack.port} is in use; choose another with --port (make serve PORT=...)\n"
    )
    second.close()
    assert httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).status_code == 200


def test_a_drafter_killed_in_mid_stream_is_started_again_and_changes_no_text(stack: Stack) -> None:
    plain = list(stream(stack.url, speculative={"enabled": False}))

    def kill_in_mid_stream() -> bool:
        """Return whether drafts were accepted; a late drafter is not waited for."""
        nonlocal killed
        chunks: list[dict[str, Any]] = []
        killed = stack.service("drafter")
        for chunk in stream(stack.url):
            chunks.append(chunk)
            if len(chunks) == 10:
                killed.kill()
        assert text_of(chunks) == text_of(plain)
        assert chunks[-1]["usage"]["completion_tokens"] == plain[-1]["usage"]["completion_tokens"] == LONG["max_tokens"]
        # Speculation comes back by itself.
        wait_until(lambda: drafted_tokens(stack) > 0, stack)
        num_accepted: int = chunks[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        return num_accepted > 0

    killed = stack.service("drafter")
    wait_until(kill_in_mid_stream, stack)
    wait_until(lambda: stack.announced("drafter ngram ended (SIGKILL); starting it again"), stack)
    assert stack.service("drafter").pid != killed.pid


def drafted_tokens(stack: Stack) -> int:
    last = list(stream(stack.url, max_tokens=200))[-1]
    num_draft_tokens: int = last["metrics"]["speculative_decoding"]["num_draft_tokens"]
    return num_draft_tokens


def test_sigterm_lets_a_running_stream_finish_and_leaves_nothing(stack: Stack) -> None:
    """This is the last test of this stack."""
    fields: dict[str, Any] = {"speculative": {"enabled": False}, "max_tokens": 400}
    expected = text_of(list(stream(stack.url, **fields)))
    folder = stack.runtime_folder()
    chunks: list[dict[str, Any]] = []
    started = threading.Event()

    def read() -> None:
        for chunk in stream(stack.url, **fields):
            chunks.append(chunk)
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    started.wait()
    stack.descendants = stack.children()
    stack.process.send_signal(signal.SIGTERM)
    assert stack.process.wait() == 0, stack.log.read_text()
    reader.join()
    assert text_of(chunks) == expected
    assert_all_gone(stack, folder)


@pytest.mark.slow
def test_sigkill_of_serve_leaves_nothing_and_the_next_one_stops_on_a_group_signal(
    checkpoint: Path, tmp_path: Path
) -> None:
    first = start(checkpoint, tmp_path / "first")
    with contextlib.closing(first):
        first.wait_ready()
        folder = first.runtime_folder()
        first.process.kill()
        first.process.wait()
        psutil.wait_procs(first.descendants)
        assert_all_gone(first, folder)
    second = start(checkpoint, tmp_path / "second", port=first.port, grpc_port=first.grpc_port)
    with contextlib.closing(second):
        second.wait_ready()
        folder = second.runtime_folder()
        os.killpg(second.process.pid, signal.SIGINT)
        assert second.process.wait() == 0, second.log.read_text()
        assert_all_gone(second, folder)


def test_a_stop_before_readiness_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    stack = start(checkpoint, tmp_path / "log", *OUTSIDE)
    with contextlib.closing(stack):
        wait_until(lambda: len(psutil.Process(stack.process.pid).children()) == 4, stack)
        folder = stack.runtime_folder()
        stack.descendants = stack.children()
        stack.process.send_signal(signal.SIGTERM)
        assert stack.process.wait() == 0
        assert_all_gone(stack, folder)


def test_a_checkpoint_that_cannot_be_loaded_ends_serve_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stack = start(tmp_path / "empty", tmp_path / "log")
    with contextlib.closing(stack):
        assert stack.process.wait() == 2
    # Nothing was started for it.
    assert (
        tmp_path / "log"
    ).read_text() == f"foretoken: {tmp_path / 'empty'} holds no checkpoint: there is no config.json\n"
