"""Runs ``foretoken serve`` as a user does, on a tiny checkpoint, in its own process group."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from foretoken.event_lines import event_lines
from foretoken.free_ports import free_ports
from tests.support.environment import child_environment

ROOT = Path(__file__).parents[2]
ENVIRONMENT = child_environment()
SERVICES = ("gateway", "verifier", "drafter")
# The supervisor's names where they differ.
ANNOUNCED = {"drafter": "drafter ngram"}
# For tests that need a drafter's process: n-grams are in the verifier's by default.
OUTSIDE = ("--drafter-placement", "process")
# Drafts of an exact shape are verified whether they pay or not: on a
# busy machine they may never pay.
EXACT = {"shape": {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}}
# A stream that outlasts its drafter's death and return: its repeating text makes n-grams hit.
LONG: dict[str, Any] = {
    "prompt": "for i in range(10):\n",
    "max_tokens": 3000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "speculative": EXACT,
}


@dataclass
class Stack:
    """One ``foretoken serve`` in its own process group."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int
    log: Path
    ready_text: str = ""
    descendants: list[psutil.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.ready_text += line
            if "client.completions.create" in line:
                self.ready_text += self.process.stdout.readline()
                self.descendants = self.children()
                return
        raise AssertionError(f"it ended before it was ready:\n{self.log.read_text()}")

    def service(self, name: str) -> psutil.Process:
        """Return the one descendant with ``foretoken <name>`` on its command line, once there."""
        while len(found := [child for child in self.children() if f"foretoken {name} " in _words(child)]) != 1:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return found[0]

    def children(self) -> list[psutil.Process]:
        """Return all descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def runtime_folder(self) -> Path:
        words = self.service("verifier").cmdline()
        return Path(words[words.index("--address") + 1].removeprefix("unix:")).parent

    def announced(self, text: str) -> bool:
        return text in self.log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _words(process: psutil.Process) -> str:
    """Return the process's command line; empty if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def start(
    checkpoint: Path | None,
    log: Path,
    *flags: str,
    port: int = 0,
    grpc_port: int = 0,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Stack:
    """Start a stack. ``checkpoint`` None: ``flags`` say what is served."""
    free = free_ports(2)
    port, grpc_port = port or free[0], grpc_port or free[1]
    # One gateway, however many cores there are: ``service`` finds one process by its name.
    ports = ("--port", str(port), "--grpc-port", str(grpc_port), "--gateway-workers", "1")
    model = () if checkpoint is None else (str(checkpoint),)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "foretoken", "serve", *model, *ports, "--threads", "1", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    return Stack(process, port, grpc_port, log)


@contextlib.contextmanager
def running(
    checkpoint: Path | None, log: Path, *flags: str, environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[Stack]:
    """Run a stack from when it is ready; kill it on leaving, if it is still there."""
    stack = start(checkpoint, log, *flags, environment=environment)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.close()


def wait_until(condition: Any, stack: Stack) -> None:
    while not condition():
        assert stack.process.poll() is None, stack.log.read_text()
        time.sleep(0.02)


def operator_command(stack: Stack, *words: str) -> list[str]:
    """Return a command of the operator, whose key lies in the file ``key`` beside the log."""
    options = ("--url", stack.url, "--admin-api-key-file", str(stack.log.parent / "key"))
    return [sys.executable, "-P", "-m", "foretoken", *words, *options]


def is_ready(stack: Stack) -> bool:
    """Return whether the gateway answers and a verifier answers it."""
    try:
        return httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def assert_all_gone(stack: Stack, folder: Path) -> None:
    alive = [process for process in stack.descendants if process.is_running() and process.status() != "zombie"]
    assert alive == []
    assert not folder.exists()
    for port in (stack.port, stack.grpc_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def stream(url: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a completion."""
    body = LONG | {"model": "tiny", "stream_options": {"include_usage": True}} | fields
    with (
        httpx.Client(trust_env=False, timeout=None) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in event_lines(response):
            data = line.removeprefix("data: ")
            if data and data != "[DONE]" and not data.startswith(":"):
                yield json.loads(data)


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
