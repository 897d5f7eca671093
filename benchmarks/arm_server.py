"""Start the server of an arm: ``foretoken serve``, or vLLM from a folder of packages."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arms import Arm
from benchmarks.stack import ServerProcess, StackError, answers, drafters_attached, running_server
from foretoken.bench.client import Address
from foretoken.free_ports import free_ports
from foretoken.tune.server import serve_command

READY_TIMEOUT_S = 600.0
# After this long, drafters that are not attached are measured as missing.
ATTACH_TIMEOUT_S = 60.0
SERVED_NAME = "benchmark"
# It starts without the network, and without libraries that a small bundle leaves out.
VLLM_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, slots=True)
class ArmServer:
    """A running server.

    Attributes:
        ready_s: seconds from its start until it was ready.
        attached_s: until all drafters were attached too; None: they are not.
    """

    address: Address
    flags: tuple[str, ...]
    ready_s: float
    attached_s: float | None


@dataclass(frozen=True, slots=True)
class Launch:
    """What the servers of all arms have in common.

    Attributes:
        model, head: folders of the target and of the draft head.
        extra: more flags of ``foretoken serve``.
        vllm_path: the folder with vLLM's packages, or None.
        logs: the folder for the servers' logs, or None.
    """

    model: Path
    head: Path
    max_running: int
    extra: tuple[str, ...] = ()
    vllm_path: Path | None = None
    logs: Path | None = None

    @contextlib.contextmanager
    def start(self, arm: Arm, more: Sequence[str] = ()) -> Iterator[ArmServer]:
        """Start an arm's server with ``more`` flags; yield it when it is ready.

        Raises:
            StackError: it ended or was not ready in time.
        """
        flags = [*arm.server_flags(self.head, self.max_running), *more]
        log_file = None
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            log_file = self.logs / f"{arm.name}-{int(time.time())}.log"
        if arm.engine == "vllm":
            command, address = self._vllm_command(flags)
            with running_server(
                "vLLM", command, environment=self._vllm_environment(), folder=self.vllm_path, log_file=log_file
            ) as server:
                ready_s = server.wait_until(lambda: answers(address, "/health"), READY_TIMEOUT_S)
                yield ArmServer(address, tuple(flags), ready_s, ready_s)
            _end_group(server.pid)
            return
        flags += self.extra
        command, address = serve_command([str(self.model), "--served-model-name", SERVED_NAME, *flags])
        with running_server("foretoken serve", command, log_file=log_file) as server:
            ready_s = server.wait_until(lambda: answers(address, "/ready"), READY_TIMEOUT_S)
            yield ArmServer(address, tuple(flags), ready_s, _attached(server, address, arm.num_drafters, ready_s))

    def _vllm_command(self, flags: Sequence[str]) -> tuple[list[str], Address]:
        if self.vllm_path is None:
            raise StackError("vLLM needs --vllm-path")
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port), *flags]
        return command, Address("127.0.0.1", port)

    def _vllm_environment(self) -> dict[str, str]:
        return os.environ | VLLM_ENVIRONMENT | {"PYTHONPATH": str(self.vllm_path)}


def _end_group(group: int) -> None:
    """Kill what a server left of its process group; it would keep the GPU's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _attached(server: ServerProcess, address: Address, num_drafters: int, ready_s: float) -> float | None:
    """Return the seconds from the start until ``num_drafters`` were attached, or None."""
    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    is_attached = False

    def has_ended() -> bool:
        nonlocal is_attached
        # Kept: a busy verifier may not answer the next time, and then shows no drafters.
        is_attached = drafters_attached(address, num_drafters)
        return is_attached or time.monotonic() > deadline

    waited = server.wait_until(has_ended, 2 * ATTACH_TIMEOUT_S)
    return ready_s + waited if is_attached else None
