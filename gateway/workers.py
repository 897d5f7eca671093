"""Run several gateway processes on the same ports.

Their parent holds the ports, keeps the workers alive and adds up their counts; it serves no
requests. The kernel spreads connections over the workers (SO_REUSEPORT). Each worker has its own
verifier sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from foretoken import liveness, stack
from foretoken.config import to_environment
from foretoken.runtime_folder import runtime_folder
from foretoken.service import Service
from foretoken.supervisor import Supervisor
from gateway.config import GatewaySettings
from gateway.sockets import hold
from gateway.worker_metrics import (
    TOTALS_SOCKET,
    WorkerProbe,
    WorkerTotals,
    liveness_socket,
    serve_text,
    worker_socket,
)

logger = logging.getLogger(__name__)

# From SIGTERM to SIGKILL, besides the drain.
STOP_GRACE_S = 2.5


def run(settings: GatewaySettings, extra: Sequence[str] = ()) -> int:
    """Run the workers until SIGTERM or SIGINT, then drain them all; return the exit status.

    ``extra``: more flags for each worker's command. Raises ConfigError for a port in use.
    """
    with (
        hold(settings.host, settings.port, "--port"),
        hold(settings.host, settings.grpc_port, "--grpc-port"),
        runtime_folder() as folder,
    ):
        return asyncio.run(_run(settings, folder, extra))


async def _run(settings: GatewaySettings, folder: Path, extra: Sequence[str]) -> int:
    paths = [worker_socket(folder, number) for number in range(settings.num_workers)]
    services = [_worker(settings, number, path, extra) for number, path in enumerate(paths)]
    announcer = _Announcer(settings)
    async with contextlib.AsyncExitStack() as context:
        await context.enter_async_context(serve_text(folder / TOTALS_SOCKET, WorkerTotals(paths).text))
        if settings.liveness_socket is not None:
            context.enter_context(liveness.answering(settings.liveness_socket))
        # Stop them together, so that no worker takes requests while another drains.
        supervisor = Supervisor(services, on_ready=announcer.ready, announce=announcer.announce, stops_together=True)
        return await supervisor.run()


def _worker(settings: GatewaySettings, number: int, path: Path, extra: Sequence[str]) -> Service:
    liveness_path = liveness_socket(path.parent, number)
    own = settings.model_copy(
        update={
            "gateway_workers": settings.num_workers,
            "worker_socket": path,
            "liveness_socket": liveness_path,
        }
    )
    return Service(
        f"gateway worker {number}",
        stack.command("gateway", own, extra),
        WorkerProbe(path, liveness_path),
        settings.drain_timeout_s + STOP_GRACE_S,
        environment=to_environment(own),
        max_stall_s=stack.GATEWAY_MAX_STALL_S,
        reloads=settings.is_reloadable,
    )


class _Announcer:
    """Logs the supervisor's events: information during the start, warnings after it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._is_ready = False

    def ready(self) -> None:
        self._is_ready = True
        logger.info(
            "all workers listen",
            extra={
                "num_workers": self._settings.num_workers,
                "host": self._settings.host,
                "port": self._settings.port,
                "grpc_port": self._settings.grpc_port,
            },
        )

    def announce(self, line: str) -> None:
        logger.log(logging.WARNING if self._is_ready else logging.INFO, line)
