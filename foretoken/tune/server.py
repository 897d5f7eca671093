"""Start a server as a user would, with ``foretoken serve``, and end it with this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from foretoken.bench.client import Address, get
from foretoken.bench.completion import StreamError
from foretoken.descendants import die_with
from foretoken.errors import ConfigError, ForetokenError, UnavailableError
from foretoken.free_ports import free_ports
from foretoken.supervisor import CONFIG_ERROR_STATUS

HOST = "127.0.0.1"
POLL_S = 0.2
# For drafters that are not attached when the server is ready; it waits for them
# by itself for half a minute.
ATTACH_S = 300.0
# A stack ends within 30 s of SIGTERM.
STOP_S = 40.0


@contextlib.contextmanager
def running_server(words: Sequence[str]) -> Iterator[Address]:
    """Run ``foretoken serve`` with these words on free ports of this machine.

    Yield its address when it is ready.

    Its messages go to stderr.

    Raises:
        ConfigError: it refused its settings, and has said why.
        ForetokenError: it ended before it was ready.
    """
    command, address = serve_command(words)
    with server_process(command, stdout=subprocess.DEVNULL) as child:
        ready_at: float | None = None
        while (states := drafter_states(address)) is None or set(states) - {"attached"}:
            if (status := child.poll()) is not None:
                kind = ConfigError if status == CONFIG_ERROR_STATUS else ForetokenError
                raise kind("foretoken serve ended before it was ready; it has said why")
            ready_at = ready_at or (None if states is None else time.monotonic())
            if ready_at is not None and time.monotonic() - ready_at > ATTACH_S:
                # Whoever asks for the drafters says which one is missing, and why.
                break
            time.sleep(POLL_S)
        yield address


def serve_command(words: Sequence[str]) -> tuple[list[str], Address]:
    """Return a ``foretoken serve`` command with these words on free ports.

    Also return its REST address.
    """
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "foretoken", "serve", *words]
    command += ["--host", HOST, "--port", str(port), "--grpc-port", str(grpc_port)]
    return command, Address(HOST, port)


@contextlib.contextmanager
def server_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server with these options of Popen, yield it at once, and stop it at the end.

    It gets SIGTERM; if it takes too long, its process group is killed. If this
    process dies, it is killed, too.
    """
    child: subprocess.Popen[bytes] = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Ctrl-C is this process's; it stops the server when it has said what it knows.
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
        **options,
    )
    try:
        yield child
    finally:
        # Does nothing if it has ended.
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            # Its children end with it.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def drafter_states(address: Address) -> list[str] | None:
    """Return the state of each drafter of a foretoken server; None while it takes no requests."""
    try:
        status, body = get(address, "/ready")
    except StreamError:
        return None
    if status != 200:
        return None
    return [drafter["state"] for verifier in json.loads(body)["verifiers"] for drafter in verifier["drafters"]]


def attached_drafters(address: Address) -> dict[str, str]:
    """Return the algorithms of a foretoken server's drafters, by name.

    Raises UnavailableError for another server or none, and for a drafter that is not attached.
    """
    try:
        status, body = get(address, "/version", 30.0)
        details = json.loads(body) if status == 200 else {}
    except (StreamError, ValueError) as error:
        raise UnavailableError(f"{address}/version: {error}") from None
    verifiers = details.get("verifiers") if isinstance(details, dict) else None
    if not isinstance(verifiers, list):
        raise UnavailableError(f"{address} is no foretoken server, or wants a key: /version has status {status}")
    found = {}
    for drafter in (drafter for verifier in verifiers for drafter in verifier["drafters"]):
        if drafter["state"] == "detached":
            continue
        if drafter["state"] != "attached":
            why = drafter.get("reason") or drafter["state"]
            raise UnavailableError(f"drafter {drafter['name']} is not attached: {why}")
        found[drafter["name"]] = drafter["algorithm"]
    return found
