"""A drafter crashes on the verifier's GPU while streams run, with MPS and without: no text changes.

``foretoken serve`` runs as a user starts it, on the demo model; its drafter faults when it gets a
signal (benchmarks/gpu/faults.py). It runs in float32, where the demo's near-ties do not depend on
the batch. ``-s`` shows the times.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu.faults import FAIL_ASSERTION, WRITE_ASTRAY, with_hooks
from foretoken import rpc
from foretoken.lost_context import ASSERTION_STATUS, CONTEXT_LOST_STATUS
from foretoken.mps import PIPES
from protos import verifier_pb2, verifier_pb2_grpc
from tests.integration.stack import ENVIRONMENT, ROOT, Stack, running, stream, wait_until

# Most of it is the first start, which compiles kernels; a case takes some twenty seconds.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = ROOT / "models" / "demo"
# Fixed shapes: each step drafts, whether it pays or not.
FLAGS = (
    *("--device", "cuda", "--dtype", "float32"),
    *("--drafter", f"name=eagle3,algorithm=EAGLE3,model={DEMO / 'eagle3'}"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"),
)
REQUEST = {
    "prompt": "def read_json(path):\n",
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "speculative": {"drafter": "eagle3"},
}
# The fault comes after this chunk.
FAULT_AT = 40


@dataclass
class Server:
    stack: Stack
    mps: str
    expected: str
    folder: Path

    def lines(self) -> list[str]:
        return self.stack.log.read_text().splitlines()

    def info(self) -> Any:
        with rpc.sync_channel(f"unix:{self.folder}/verifier.sock") as channel:
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
            return stub.GetInfo(verifier_pb2.GetInfoRequest(), wait_for_ready=True)

    def wait_attached(self) -> None:
        wait_until(lambda: self.info().drafters[0].state == "attached", self.stack)

    def daemon(self) -> list[psutil.Process]:
        """Return the processes of this stack's MPS daemon."""
        named = {PIPES: str(self.folder / "mps")}
        return [
            process
            for process in psutil.process_iter(["name", "environ"])
            if process.info["name"].startswith("nvidia-cuda-mps")
            and named.items() <= (process.info["environ"] or {}).items()
        ]


@pytest.fixture(scope="module", name="server", params=["on", "off"])
def _server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp(f"mps-{request.param}") / "log"
    environment = with_hooks(ENVIRONMENT)
    environment.pop(PIPES, None)
    with running(DEMO / "target", log, *FLAGS, "--mps", request.param, environment=environment) as stack:
        server = Server(stack, request.param, "", stack.runtime_folder())
        server.wait_attached()
        for _ in range(2):  # The first one captures graphs.
            server.expected = Course.of(stack).text
        daemon = server.daemon()
        assert bool(daemon) == (server.mps == "on")
        yield server
        stack.process.terminate()
        stack.process.wait(60)
        _, alive = psutil.wait_procs(daemon, timeout=10)
        assert alive == []
        assert not server.folder.exists()


@dataclass
class Course:
    """One stream: its text, and when each piece of it came."""

    text: str = ""
    times: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, stack: Stack, at_chunk: Callable[[int], None] = lambda number: None) -> Course:
        course = cls()
        for chunk in stream(stack.url, model="target", **REQUEST):
            for choice in chunk["choices"]:
                course.text += choice["text"]
                course.times.append(time.monotonic())
                at_chunk(len(course.times))
        return course


def stream_until(server: Server, fault: Callable[[], None], is_over: Callable[[], bool], case: str) -> None:
    """Run streams from before the fault until it is over; each has the undisturbed text."""
    struck: list[float] = []

    def strike(number: int) -> None:
        if number == FAULT_AT and not struck:
            struck.append(time.monotonic())
            fault()

    gaps: list[float] = []
    num_streams = 0
    while not (struck and is_over()):
        course = Course.of(server.stack, strike)
        num_streams += 1
        assert course.text == server.expected, f"{case}: stream {num_streams}"
        pairs = itertools.pairwise(course.times)
        gaps += [after - max(before, struck[0]) for before, after in pairs if after > struck[0]]
    assert gaps
    print(
        f"\n{case}, MPS {server.mps}: next token {gaps[0] * 1e3:.1f} ms after the fault, longest pause "
        f"{max(gaps) * 1e3:.0f} ms, all well after {time.monotonic() - struck[0]:.1f} s and {num_streams} streams"
    )


def is_ready_again(server: Server, name: str, num_lines: int) -> bool:
    return any(line.startswith(f"foretoken: {name} is ready again") for line in server.lines()[num_lines:])


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "drafter eagle3 ended (SIGKILL)"),
        (signal.SIGSTOP, "drafter eagle3 did not answer for"),
        (FAIL_ASSERTION, f"drafter eagle3 ended (status {ASSERTION_STATUS}"),
    ],
    ids=["killed", "stopped", "assertion"],
)
def test_the_verifier_outlives_its_drafter(server: Server, number: signal.Signals, said: str) -> None:
    num_lines, stack = len(server.lines()), server.stack
    verifier, drafter = stack.service("verifier"), stack.service("drafter")
    stream_until(
        server,
        lambda: os.kill(drafter.pid, number),
        lambda: is_ready_again(server, "drafter eagle3", num_lines),
        said,
    )
    server.wait_attached()
    assert any(said in line for line in server.lines()[num_lines:])
    assert stack.service("verifier") == verifier and not drafter.is_running()


def test_a_drafter_that_is_stopped_for_a_moment_drafts_again(server: Server) -> None:
    stack = server.stack
    verifier, drafter = stack.service("verifier"), stack.service("drafter")
    until = 0.0

    def stop() -> None:
        nonlocal until
        drafter.suspend()
        until = time.monotonic() + 1.0

    stream_until(server, stop, lambda: time.monotonic() > until, "stopped for a moment")
    drafter.resume()
    server.wait_attached()
    assert Course.of(stack).text == server.expected
    assert (stack.service("verifier"), stack.service("drafter")) == (verifier, drafter)


def test_an_illegal_address_costs_a_pause(server: Server) -> None:
    num_lines, stack = len(server.lines()), server.stack
    verifier, drafter = stack.service("verifier"), stack.service("drafter")
    names = ["drafter eagle3", "verifier"] if server.mps == "on" else ["drafter eagle3"]
    stream_until(
        server,
        lambda: os.kill(drafter.pid, WRITE_ASTRAY),
        lambda: all(is_ready_again(server, name, num_lines) for name in names),
        "illegal address",
    )
    server.wait_attached()
    lines = server.lines()[num_lines:]
    assert any(f"(status {CONTEXT_LOST_STATUS}: its GPU context is lost)" in line for line in lines)
    assert not drafter.is_running()
    assert (stack.service("verifier") == verifier) == (server.mps == "off")
    assert Course.of(stack).text == server.expected
