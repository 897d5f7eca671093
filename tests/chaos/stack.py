"""Starts and stops the real ``foretoken serve`` on the demo model, and finds its processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil

from foretoken.free_ports import free_ports
from tests.chaos.device import Device
from tests.chaos.schedule import DRAFTERS, Process
from tests.support.environment import child_environment

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo" / "target"
HEAD = ROOT / "models" / "demo" / "eagle3"
TOKEN_MAP = ROOT / "models" / "demo" / "token_map.safetensors"
HOST = "127.0.0.1"
# The drain that the stack promises, and some time for a busy machine.
STOP_TIMEOUT_S = 45.0
POLL_S = 0.1
LOG_TAIL_LINES = 30


class StackError(Exception):
    """The stack did not start, did not come back, or did not stop as it should."""


@dataclass(slots=True)
class Stack:
    """One running ``foretoken serve``."""

    process: subprocess.Popen[bytes]
    port: int
    grpc_port: int
    log: IO[bytes]
    device: Device
    folder: Path | None = field(default=None)

    @classmethod
    async def start(cls, device: Device, flags: Sequence[str]) -> Stack:
        """Start on free ports, with ``flags`` added; return when it is ready. Raises StackError."""
        port, grpc_port = free_ports(2)
        command = [sys.executable, "-P", "-m", "foretoken", "serve", str(MODEL)]
        command += ["--port", str(port), "--grpc-port", str(grpc_port), *flags]
        command += ["--drafter", f"name={DRAFTERS['head']},algorithm=EAGLE3,model={HEAD},token_map={TOKEN_MAP}"]
        command += ["--drafter", f"name={DRAFTERS['drafter']},algorithm=NGRAM,placement=process"]
        log = tempfile.TemporaryFile()  # noqa: SIM115  # kill() closes it.
        process = subprocess.Popen(
            command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        stack = cls(process, port, grpc_port, log, device)
        try:
            await stack._wait_ready()
            words = stack.find("verifier").cmdline()
            stack.folder = Path(words[words.index("--address") + 1].removeprefix("unix:")).parent
        except BaseException:
            stack.kill()
            raise
        return stack

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    @property
    def verifier_address(self) -> str:
        return f"unix:{self.folder}/verifier.sock"

    def drafter_address(self, process: Process) -> str:
        return f"unix:{self.folder}/drafters/{DRAFTERS[process]}.sock"

    def find(self, name: Process) -> psutil.Process:
        """Return the process of that name. Raises psutil.NoSuchProcess while there is none."""
        if name == "supervisor":
            return psutil.Process(self.process.pid)
        words = f" foretoken drafter --name {DRAFTERS[name]} " if name in DRAFTERS else f" foretoken {name} "
        for child in psutil.Process(self.process.pid).children():
            try:
                if words in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            except psutil.NoSuchProcess:
                continue
        raise psutil.NoSuchProcess(0, name)

    async def _wait_ready(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            deadline = time.monotonic() + self.device.ready_s
            while not await answers(client, f"{self.url}/ready"):
                self.check_alive()
                if time.monotonic() > deadline:
                    limit = f"{self.device.ready_s:g} s"
                    raise StackError(f"foretoken serve was not ready within {limit}:\n{self.log_tail()}")
                await asyncio.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise StackError if ``foretoken serve`` has ended."""
        if self.process.poll() is not None:
            raise StackError(f"foretoken serve ended with status {self.process.returncode}:\n{self.log_tail()}")

    async def stop(self) -> float:
        """Send SIGTERM; return the seconds until the end.

        Raises StackError unless the status is 0 and nothing is left.
        """
        family = psutil.Process(self.process.pid).children(recursive=True)
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise StackError(f"foretoken serve did not stop within {STOP_TIMEOUT_S:g} s:\n{self.log_tail()}") from None
        seconds = time.monotonic() - began
        if status != 0:
            raise StackError(f"foretoken serve stopped with status {status}:\n{self.log_tail()}")
        left = [process for process in family if process.is_running()]
        if left and self.device.gone_s:
            _, left = await asyncio.to_thread(psutil.wait_procs, left, self.device.gone_s)
        if left:
            raise StackError(f"processes are left: {left}")
        if self.folder is not None and self.folder.exists():
            raise StackError(f"the sockets' folder is left: {self.folder}")
        return seconds

    def kill(self) -> None:
        """End it in any state; its children end with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def log_text(self) -> str:
        """Return everything that it has written."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    """Return whether a GET is answered with 200."""
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False
