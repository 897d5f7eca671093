"""Run a verifier and its drafters on this machine for an actor; none outlives the actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from foretoken import rpc
from foretoken.common_settings import LinkSettings
from foretoken.descendants import die_with
from foretoken.free_ports import free_ports
from foretoken.links import read_credentials
from foretoken.probes import GrpcProbe
from foretoken.ray.command_line import parse
from foretoken.runtime_folder import runtime_folder
from foretoken.stack import VERIFIER_HEALTH_NAME
from foretoken.supervisor import describe_status
from protos import verifier_pb2, verifier_pb2_grpc

POLL_S = 0.2
FIGURES_TIMEOUT_S = 2.0
# Longer than it takes until all gateways know that they must send no more.
IDLE_S = 4.0


class EndedError(Exception):
    """The process ended without being stopped."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    def __str__(self) -> str:
        return f"the verifier ended ({describe_status(self.status)}); its log says why"


@dataclass(frozen=True)
class SequenceCounts:
    """Sequences at a verifier, and how many of them it runs at once."""

    running: int
    waiting: int


class VerifierProcess:
    """A ``foretoken serve`` that supervises one verifier and its drafters, without a gateway.

    The kernel kills it when the thread ends that has made this object. Call the asynchronous
    methods on one event loop.
    """

    def __init__(self, words: Sequence[str], host: str, folder: str, link_token: str | None = None) -> None:
        """Start the process.

        Args:
            words: the command line of ``foretoken serve``, with the model.
            host: this machine's address for the gateways.
            folder: the working folder, if there is such a folder here.
            link_token: the token of the verifier and its gateways, if no flag names a file with it.
        """
        self.address = f"{host}:{free_ports(1, host)[0]}"
        self._stack = contextlib.ExitStack()
        # ``drain`` has waited for the streams before the process is stopped.
        words = [*words, "--executor", "ray", "--verifier-address", self.address, "--drain-timeout", "0"]
        if link_token is not None:
            file = self._stack.enter_context(runtime_folder()) / "link-token"
            file.write_text(link_token)
            words += ["--link-token-file", str(file)]
        self._credentials = read_credentials(parse(words).settings(LinkSettings))
        self._probe = GrpcProbe(self.address, VERIFIER_HEALTH_NAME, self._credentials)
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", "foretoken", "serve", *words),
            stdin=subprocess.DEVNULL,
            cwd=folder if Path(folder).is_dir() else None,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )

    async def wait_ready(self) -> None:
        """Return when the verifier takes sequences. Raises EndedError if it ends before."""
        while not await self.is_serving():
            await asyncio.sleep(POLL_S)

    async def is_serving(self) -> bool:
        """Return whether the verifier takes sequences now. Raises EndedError."""
        if (status := self._process.poll()) is not None:
            raise EndedError(status)
        return await self._probe.is_ready()

    async def wait_end(self) -> EndedError:
        """Return when the process has ended."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return EndedError(status)

    async def load(self) -> SequenceCounts | None:
        """Return the verifier's sequences; None while it does not answer."""
        async with rpc.async_channel(self.address, self._credentials) as channel:
            # Any: the generated stub is untyped.
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
            try:
                info = await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=FIGURES_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return None
        return SequenceCounts(info.num_running, info.num_waiting)

    async def drain(self, timeout_s: float) -> None:
        """Return when the verifier has had no sequence for IDLE_S, or after ``timeout_s``."""
        idle_since = None
        with contextlib.suppress(TimeoutError, EndedError):
            async with asyncio.timeout(timeout_s):
                while idle_since is None or _now() - idle_since < IDLE_S:
                    load = await self.load() if await self.is_serving() else None
                    is_idle = load is not None and load.running + load.waiting == 0
                    idle_since = (idle_since or _now()) if is_idle else None
                    await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop all, and return when it has ended. Gateways resume the streams elsewhere."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await self.wait_end()
        await self._probe.close()
        self._stack.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
