"""A free port that one process was given, no other process gets."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

import pytest

from foretoken import free_ports as module
from foretoken.free_ports import free_ports

OTHER_PROCESS = "from foretoken.free_ports import free_ports; print(*free_ports(2), flush=True); input()"


@pytest.fixture(autouse=True)
def _nothing_given_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_given_ports", set())


def draw(monkeypatch: pytest.MonkeyPatch, ports: Sequence[int]) -> None:
    """Let these be the next ports that are tried."""
    turns = iter(ports)
    monkeypatch.setattr(random.SystemRandom, "choice", lambda self, candidates: next(turns))


def test_ports_of_a_process_that_lives_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        first, second = map(int, other.stdout.readline().split())
        (mine,) = free_ports(1)
        draw(monkeypatch, [first, second, *range(mine + 1, mine + 100)])
        assert free_ports(1)[0] not in (first, second)
        other.communicate("\n")
    assert other.returncode == 0
    draw(monkeypatch, [first, second])
    assert free_ports(2) == [first, second]


def test_the_latest_claims_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_claims", claims := deque[int]())
    monkeypatch.setattr(module, "NUM_CLAIMS", 3)
    given = free_ports(8)
    names = []
    for claim in claims:
        with socket.socket(fileno=claim) as name:
            names.append(name.getsockname())
    assert names == [f"\0foretoken-port-{port}".encode() for port in given[-3:]]


def test_a_port_that_is_bound_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (mine,) = free_ports(1)
        bound = server.getsockname()[1]
        draw(monkeypatch, [bound, *range(mine + 1, mine + 100)])
        assert free_ports(1) != [bound]
