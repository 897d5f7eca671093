"""A real stack's stopped and killed processes are found and restarted, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from foretoken import rpc
from protos import verifier_pb2, verifier_pb2_grpc
from tests.integration.stack import (
    ANNOUNCED,
    ENVIRONMENT,
    OUTSIDE,
    ROOT,
    SERVICES,
    Stack,
    assert_all_gone,
    is_ready,
    running,
    stream,
    text_of,
    wait_until,
)

pytestmark = pytest.mark.slow

DEMO = ROOT / "models" / "demo" / "target"


@pytest.fixture(scope="module", name="stack")
def _stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("supervision") / "log", *OUTSIDE) as stack:
        yield stack


def lines(stack: Stack) -> list[str]:
    return stack.log.read_text().splitlines()


def verifier_info(folder: Path) -> Any:
    with rpc.sync_channel(f"unix:{folder}/verifier.sock") as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        return stub.GetInfo(verifier_pb2.GetInfoRequest(), wait_for_ready=True)


def is_unused(info: Any) -> bool:
    """Return whether a verifier has no sequence and all blocks are free."""
    return (info.num_running, info.num_waiting, info.num_free_blocks) == (0, 0, info.num_blocks)


def test_a_killed_gateway_frees_its_requests_at_the_verifier(stack: Stack) -> None:
    folder = stack.runtime_folder()
    before = verifier_info(folder)
    # The figures of one answer are of slightly different moments, and the last test's
    # requests may just have ended.
    wait_until(lambda: is_unused(verifier_info(folder)), stack)

    def read() -> None:
        with contextlib.suppress(httpx.TransportError):
            for _ in stream(stack.url, n=8, temperature=1.0):
                pass

    # More sequences than the verifier runs at once: some run, some wait.
    readers = [threading.Thread(target=read) for _ in range(10)]
    for reader in readers:
        reader.start()
    wait_until(lambda: verifier_info(folder).num_running > 0 and verifier_info(folder).num_waiting > 0, stack)
    verifier, gateway = stack.service("verifier"), stack.service("gateway")
    gateway.kill()
    for reader in readers:
        reader.join()
    wait_until(lambda: is_unused(verifier_info(folder)), stack)
    assert verifier_info(folder).epoch == before.epoch
    assert stack.service("verifier") == verifier
    wait_until(lambda: stack.announced("gateway is ready again after"), stack)
    assert is_ready(stack)


@pytest.mark.parametrize("name", SERVICES)
def test_a_stopped_service_is_found_killed_and_started_again(stack: Stack, name: str) -> None:
    expected = text_of(list(stream(stack.url, max_tokens=50)))
    num_lines, called = len(lines(stack)), ANNOUNCED.get(name, name)
    victim = stack.service(name)
    victim.suspend()
    wait_until(lambda: any(f"{called} did not answer for" in line for line in lines(stack)[num_lines:]), stack)
    wait_until(lambda: any(f"{called} is ready again after" in line for line in lines(stack)[num_lines:]), stack)
    wait_until(lambda: is_ready(stack), stack)
    assert not victim.is_running()
    # No other process was taken for dead, and the supervisor said no more than this.
    said = [line for line in lines(stack)[num_lines:] if line.startswith("foretoken: ")]
    assert len(said) == 2, said
    assert text_of(list(stream(stack.url, max_tokens=50))) == expected


def test_a_drafters_death_is_one_line_of_the_supervisor_and_one_of_the_verifier(stack: Stack) -> None:
    folder = stack.runtime_folder()
    # The last test's outage is over, and the log has all its lines.
    wait_until(lambda: drafter_state(folder).state == "attached", stack)
    num_lines = len(lines(stack))
    attaches = drafter_state(folder).num_attaches
    stack.service("drafter").kill()
    wait_until(lambda: drafter_state(folder).num_attaches > attaches, stack)
    wait_until(lambda: any("drafter ngram is ready again after" in line for line in lines(stack)[num_lines:]), stack)
    said = lines(stack)[num_lines:]
    assert not [line for line in said if "fork" in line]
    first, second = [line for line in said if line.startswith("foretoken: ")]
    assert first.startswith("foretoken: drafter ngram ended (SIGKILL); starting it again")
    assert "is ready again after" in second
    (warning,) = [line for line in said if line.startswith("{")]
    assert "the drafter is gone; no drafts from it until it is" in warning


def drafter_state(folder: Path) -> Any:
    (state,) = verifier_info(folder).drafters
    return state


def test_sigkill_of_serve_leaves_no_memory(stack: Stack) -> None:
    """This is the last test of this stack. Nameless memory lives as long as its holders."""
    stack.descendants = stack.children()
    folder = stack.runtime_folder()
    wait_until(lambda: drafter_state(folder).state == "attached", stack)
    held = [Path(line.split()[-1]) for name in SERVICES for line in maps(stack.service(name))]
    assert any("memfd:foretoken-requests" in str(path) for path in held)
    named = {path for path in held if path.is_relative_to("/dev/shm")}
    stack.process.kill()
    stack.process.wait()
    psutil.wait_procs(stack.descendants)
    assert_all_gone(stack, folder)
    assert not [path for path in named if path.exists()]


def maps(process: psutil.Process) -> list[str]:
    """Return the mapped files of a process."""
    text = Path(f"/proc/{process.pid}/maps").read_text().replace(" (deleted)", "")
    return [line for line in text.splitlines() if "/" in line]


def test_sigterm_ends_a_verifier_that_is_loading(tmp_path: Path) -> None:
    socket = tmp_path / "v.sock"
    command = [sys.executable, "-P", "-m", "foretoken", "verifier", str(DEMO), "--address", f"unix:{socket}"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while not socket.exists():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 0, said
    # The load takes seconds and ends with these words.
    assert "a step costs" not in said and "Traceback" not in said
    assert not socket.exists()
