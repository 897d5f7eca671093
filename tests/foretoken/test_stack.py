"""Commands, ports and the ready text of a stack; readiness probes against real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from drafter_svc.config import DrafterSettings
from foretoken import probes, rpc, stack
from foretoken.errors import ConfigError


def test_ps_shows_the_words_of_each_service() -> None:
    settings = DrafterSettings(name="ngram", address="unix:/d")
    command = stack.command("drafter", settings, ("--log-level", "info"))
    assert command[0] == sys.executable
    assert "foretoken drafter --name ngram --address unix:/d --log-level info" in " ".join(command)
    # The user's current folder is not on the import path.
    assert "-P" in command[: command.index("foretoken")]


def test_grace_periods_together_stay_under_thirty_seconds() -> None:
    assert stack.GATEWAY_DRAIN_S < stack.GATEWAY_GRACE_S
    assert stack.GATEWAY_GRACE_S + stack.VERIFIER_GRACE_S + stack.DRAFTER_GRACE_S < 30


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_in_use_is_one_line_that_says_what_to_do(reuse_port: bool) -> None:
    with socket.socket() as listener:
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            stack.check_port_free("127.0.0.1", port, "--port", "PORT")
    assert str(caught.value) == f"port {port} is in use; choose another with --port (make serve PORT=...)"
    stack.check_port_free("127.0.0.1", port, "--port", "PORT")


def test_one_address_of_a_host_that_can_be_listened_on_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost in a container without IPv6: no machine has the second address."""
    here = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    nowhere = (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("2001:db8::1", 0, 0, 0))
    found = [here, nowhere]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
    stack.check_port_free("localhost", 8000, "--port", "PORT")
    found.remove(here)
    with pytest.raises(ConfigError, match=r"^--host: cannot listen on localhost: "):
        stack.check_port_free("localhost", 8000, "--port", "PORT")


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^--host: cannot resolve '{re.escape(host)}': not a host's name$"):
        stack.check_port_free(host, 8000, "--port", "PORT")


def test_a_connection_that_lingers_is_no_use_of_the_port() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listener.accept()
            served.close()  # The server closes first: its side goes to TIME_WAIT.
            assert client.recv(1) == b""
    stack.check_port_free("127.0.0.1", port, "--port", "PORT")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no.such.host.invalid", "--host: cannot resolve 'no.such.host.invalid'"),
        ("192.0.2.1", "--host: cannot listen on 192.0.2.1"),
    ],
)
def test_a_host_that_is_not_ours(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stack.check_port_free(host, 8000, "--port", "PORT")


def test_ready_text_holds_requests_to_copy() -> None:
    text = stack.ready_text("demo", "0.0.0.0", 9000, 50052, ".venv/bin/foretoken")
    assert "foretoken is ready: demo at http://127.0.0.1:9000 (OpenAI REST) and 127.0.0.1:50052 (gRPC)" in text
    curl = shlex.split(next(line for line in text.splitlines() if line.startswith("  curl")))
    assert curl[2] == "http://127.0.0.1:9000/v1/completions"
    assert json.loads(curl[-1])["model"] == "demo"
    words = shlex.split(next(line for line in text.splitlines() if "complete" in line))
    assert words == [
        ".venv/bin/foretoken",
        "complete",
        "def read_json(path):",
        "--temperature",
        "0",
        "--url",
        "http://127.0.0.1:9000",
    ]
    _, heading, lines = text.partition("In Python (.venv/bin/pip install openai):\n")
    assert heading
    compile(lines, "example", "exec")


def test_ready_text_names_pip_of_the_same_python() -> None:
    texts = {
        program: stack.ready_text("demo", "127.0.0.1", 8000, 50051, program)
        for program in ("foretoken", "/opt/env/bin/foretoken", "python -m foretoken")
    }
    assert "(pip install openai)" in texts["foretoken"] and "(pip install openai)" in texts["python -m foretoken"]
    assert "(/opt/env/bin/pip install openai)" in texts["/opt/env/bin/foretoken"]


@pytest.fixture(name="patient")
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes wait for late answers of a slow machine."""
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 600.0)


@pytest.mark.usefixtures("patient")
def test_grpc_probe_follows_readiness_and_liveness(tmp_path: Path) -> None:
    """It is live from the first answer to the last, and ready between the marks."""
    address = f"unix:{tmp_path}/health.sock"

    async def scenario() -> list[tuple[bool, bool]]:
        probe, other = probes.GrpcProbe(address, "a.Service"), probes.GrpcProbe(address, "another.Service")

        async def ask() -> tuple[bool, bool]:
            return await probe.is_ready(), await probe.last_turn() is not None

        seen = [await ask()]
        for _ in range(2):  # The second server on the address is found as fast as the first.
            server = rpc.async_server()
            health = rpc.HealthService(server, ["a.Service"])
            await health.mark(False)
            rpc.bind(server, address)
            await server.start()
            seen.append(await ask())
            await health.mark(True)
            seen.append(await ask())
            assert not await other.is_ready()
            await health.drain()
            await health.mark(True)
            seen.append(await ask())
            await server.stop(None)
            seen.append(await ask())
        await probe.close()
        await other.close()
        return seen

    life = [(False, True), (True, True), (False, True), (False, False)]
    assert asyncio.run(scenario()) == [(False, False), *life, *life]


@pytest.mark.usefixtures("patient")
def test_a_grpc_probe_that_gets_answers_keeps_its_connection(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/health.sock"

    async def scenario() -> tuple[int, int]:
        server = rpc.async_server()
        await rpc.HealthService(server, ["a.Service"]).mark(True)
        rpc.bind(server, address)
        await server.start()
        probe = probes.GrpcProbe(address, "a.Service")
        await probe.is_ready()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert await probe.last_turn() is not None
        after = len(os.listdir("/proc/self/fd"))
        await probe.close()
        await server.stop(None)
        return before, after

    before, after = asyncio.run(scenario())
    # Fewer, if objects of earlier tests have gone meanwhile.
    assert after <= before


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 503),
        (b"SSH-2.0-x\r\n", None),
        (b"", None),
    ],
)
def test_http_probe_reads_the_status(answer: bytes, status: int | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /ready HTTP/1.1")
        writer.write(answer)
        writer.close()

    async def scenario() -> int | None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            found = await probes.http_answer("0.0.0.0", server.sockets[0].getsockname()[1], "/ready")
            return None if found is None else found[0]

    assert asyncio.run(scenario()) == status


def test_the_gateway_s_probe_keeps_the_drafters_that_are_not_attached(tmp_path: Path) -> None:
    drafters = [
        {"name": "ngram", "state": "attached", "reason": ""},
        {"name": "head", "state": "broken", "reason": "another target's"},
    ]
    body = json.dumps({"status": "ready", "verifiers": [{"drafters": drafters}, {"drafters": []}]}).encode()
    status = "503 Service Unavailable"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body))
        writer.close()

    async def scenario() -> None:
        nonlocal status
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            probe = probes.GatewayProbe("0.0.0.0", server.sockets[0].getsockname()[1], tmp_path / "gateway.sock")
            assert not await probe.is_ready() and probe.unattached == {}
            status = "200 OK"
            assert await probe.is_ready() and probe.unattached == {"head": "another target's"}

    asyncio.run(scenario())


def test_http_probe_of_a_port_that_nobody_listens_on() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert asyncio.run(probes.http_answer("127.0.0.1", port, "/ready")) is None
