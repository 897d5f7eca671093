"""The stack under test is started and watched: real processes, no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.stack import (
    StackError,
    cpu_seconds,
    describe,
    idle_share,
    running_server,
    running_stack,
    service,
    terminable,
)
from foretoken.free_ports import free_ports
from foretoken.tune import server
from tests.support.scripted_server import scripted_server

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=sys.stdin)
print("started", flush=True)
child.wait()
"""
# Says nothing, uses CPU time at once, and waits for its input to end. It uses more time than the
# test waits for: the kernel cuts a process's user and system time down to whole ticks.
BUSY_CHILD = """
import sys, time
while time.process_time() < 0.7:
    pass
sys.stdin.read()
"""


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def start(child: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a process with one child that runs ``child`` with these arguments."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, child, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    return process


def test_cpu_time_counts_descendants() -> None:
    with start(BUSY_CHILD) as process:
        root = psutil.Process(process.pid)
        while sum(cpu_seconds(root).values()) < 0.5:
            pass
        used = cpu_seconds(root)
        assert len(used) == 2
        (child,) = root.children()
        assert used[child.pid] > used[root.pid]
        assert process.stdin is not None
        process.stdin.close()


def test_idle_share_of_sleepers_is_near_nothing() -> None:
    with start("import sys; print('ready', flush=True); sys.stdin.read()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert 0.0 <= idle_share(psutil.Process(process.pid), 0.2) < 0.5
        assert process.stdin is not None
        process.stdin.close()


def test_a_process_that_ends_meanwhile_spoils_the_idle_figure() -> None:
    with start("import sys; sys.stdin.read(1)") as process:
        assert process.stdin is not None
        root = psutil.Process(process.pid)
        (child,) = root.children()

        class Ending(psutil.Process):  # type: ignore[misc]
            """A process whose child ends between the first and the second look."""

            looks = 0

            def children(self, recursive: bool = False) -> list[psutil.Process]:
                self.looks += 1
                if self.looks == 2:
                    process.stdin.close()
                    psutil.wait_procs([child])
                    process.wait()
                    return []
                return super().children(recursive)

            def cpu_times(self):  # type: ignore[no-untyped-def]
                return psutil.Process().cpu_times()

        with pytest.raises(StackError, match="changed"):
            idle_share(Ending(process.pid), 0.01)


def test_a_service_is_found_by_its_command() -> None:
    """Any program whose command line reads like a service's is found."""
    with start("import sys; print('ready', flush=True); sys.stdin.read()", "foretoken", "verifier") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        root = psutil.Process(process.pid)
        assert service(root, "verifier") == root.children()[0]
        with pytest.raises(StackError, match="0 processes that run drafter"):
            service(root, "drafter")
        process.stdin.close()


def test_a_stack_that_cannot_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    refused = pytest.raises(StackError, match=r"ended with status \d+")
    with refused, running_stack(tmp_path / "nothing", 1, log_file=log):
        pass
    assert "nothing" in log.read_text()


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.2)
    deaf, ready = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", tmp_path / "ready"
    command = [sys.executable, "-c", f"{deaf}; open({str(ready)!r}, 'x'); signal.pause()"]
    with pytest.raises(StackError, match="a server did not stop"), running_server("a server", command) as running:
        running.wait_until(ready.exists, 60.0)
    assert not psutil.pid_exists(running.pid)


def test_describe_reads_the_version() -> None:
    details = {"model": "demo", "verifiers": [{"mode": "strict", "drafters": []}]}
    payload = json.dumps(details).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload)
    with scripted_server(lambda body: iter([answer])) as scripted:
        assert describe(scripted.address) == details


def test_describe_of_nothing_names_the_address() -> None:
    (port,) = free_ports(1)
    from foretoken.bench.client import Address

    with pytest.raises(StackError, match=f"127.0.0.1:{port}"):
        describe(Address("127.0.0.1", port))


def test_a_benchmark_that_gets_a_signal_ends_its_stack_first() -> None:
    ended = []

    def run() -> None:
        try:
            with terminable():
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            ended.append("stack")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run()
    assert ended == ["stack"] and signal.getsignal(signal.SIGTERM) is before
    # Only the main thread may have handlers.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(terminable().__enter__).result()
    assert signal.getsignal(signal.SIGTERM) is before
