"""The operator attaches, restarts and detaches a drafter beside those of ``foretoken serve``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.commands.drafter_commands import NOT_ATTACHED_YET
from tests.integration.stack import (
    ENVIRONMENT,
    EXACT,
    OUTSIDE,
    Stack,
    operator_command,
    running,
    stream,
    text_of,
    wait_until,
)

PROMPT = "for i in range(10):\n"


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("operated")
    (folder / "key").write_text("an operator's own key")
    with running(checkpoint, folder / "log", *OUTSIDE, "--admin-api-key-file", str(folder / "key")) as stack:
        yield stack


class Drafter:
    """A drafter process that only the test starts again."""

    def __init__(self, address: str, log: Path) -> None:
        self.address, self._log = address, log
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "foretoken", "drafter", "--name", "second", "--address", self.address]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, env=ENVIRONMENT, stderr=log)
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def drafter(stack: Stack, tmp_path: Path) -> Iterator[Drafter]:
    drafter = Drafter(f"unix:{tmp_path}/d", tmp_path / "log")
    yield drafter
    drafter.kill()


def operate(stack: Stack, *words: str) -> str:
    command = operator_command(stack, "drafters", *words)
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    # A drafter that has just been started may not listen yet.
    assert result.returncode == (NOT_ATTACHED_YET if "not attached yet" in result.stderr else 0), result.stderr
    return result.stdout


def drafters(stack: Stack) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{stack.url}/version", timeout=None, trust_env=False).json()
    return {drafter["name"]: drafter for drafter in answer["verifiers"][0]["drafters"]}


def is_attached(stack: Stack, num_attaches: int) -> bool:
    drafter = drafters(stack)["second"]
    return (drafter["state"], drafter["num_attaches"]) == ("attached", num_attaches)


def ask(stack: Stack, drafter: str, **more: Any) -> dict[str, Any]:
    """Return a completion drafted by ``drafter``; plain if that is empty."""
    speculative = {"drafter": drafter} if drafter else {"enabled": False}
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "speculative": speculative}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body | more, timeout=None, trust_env=False)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def text(answer: dict[str, Any]) -> str:
    written: str = answer["choices"][0]["text"]
    return written


@pytest.mark.slow
def test_a_drafter_comes_dies_comes_back_and_goes(stack: Stack, drafter: Drafter) -> None:
    plain = text(ask(stack, ""))
    attached = operate(stack, "attach", "second", drafter.address)
    assert attached.startswith("second: ") and f" at {drafter.address} for the verifier at " in attached
    wait_until(lambda: is_attached(stack, 1), stack)

    def is_of_use() -> bool:
        """Return whether it drafts; a new drafter is trusted little by little."""
        more = {"prediction": {"type": "content", "content": plain}, "speculative": {"drafter": "second"} | EXACT}
        answer = ask(stack, "second", **more)
        assert text(answer) == plain
        usage: int = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert usage > 0
        return bool(answer["metrics"]["speculative_decoding"]["drafters"].get("second"))

    wait_until(is_of_use, stack)
    chunks = []
    for chunk in stream(stack.url, max_tokens=1500, speculative={"drafter": "second"}):
        if len(chunks) == 10:
            drafter.kill()
        chunks.append(chunk)
    drafter.start()
    wait_until(lambda: is_attached(stack, 2), stack)
    wait_until(is_of_use, stack)
    assert stack.service("drafter").is_running(), "the stack's own goes on"

    again = []
    for chunk in stream(stack.url, max_tokens=1500, speculative={"drafter": "second"}):
        if len(again) == 10:
            assert operate(stack, "detach", "second") == "second: detached\n"
        again.append(chunk)
    assert text_of(again) == text_of(chunks)
    assert text_of(list(stream(stack.url, max_tokens=1500, speculative={"enabled": False}))) == text_of(chunks)
    assert text(ask(stack, "second")) == plain
    assert drafters(stack)["second"]["state"] == "detached" and drafters(stack)["ngram"]["state"] == "attached"
    assert f"second: detached, NGRAM over shared-memory at {drafter.address} for" in operate(stack, "list")

    # The drafter is free for anybody: here, the same verifier under another name.
    operate(stack, "attach", "third", drafter.address, "--transport", "grpc")
    wait_until(lambda: drafters(stack)["third"]["state"] == "attached", stack)
    assert text(ask(stack, "merge")) == plain


@pytest.mark.slow
def test_own_drafters_too(stack: Stack) -> None:
    plain = text(ask(stack, ""))
    operate(stack, "detach", "ngram")
    own = stack.service("drafter")
    assert text(ask(stack, "ngram")) == plain
    # The stack keeps it running; it may be attached again at its address.
    words = own.cmdline()
    address = words[words.index("--address") + 1]
    num_attaches = drafters(stack)["ngram"]["num_attaches"]
    operate(stack, "attach", "ngram", address)
    wait_until(lambda: drafters(stack)["ngram"]["num_attaches"] == num_attaches + 1, stack)
    assert text(ask(stack, "ngram")) == plain
    metrics = [""]

    def has_gauges() -> bool:
        metrics[0] = httpx.get(f"{stack.url}/metrics", timeout=None, trust_env=False).text
        return "foretoken_drafter_ngram_nodes{" in metrics[0]

    wait_until(has_gauges, stack)
    (line,) = [line for line in metrics[0].splitlines() if line.startswith("foretoken_drafter_ngram_capacity{")]
    assert 'drafter="ngram"' in line and float(line.rsplit(" ", 1)[1]) > 0
