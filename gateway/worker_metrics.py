"""Add up the counts of several gateway processes for /metrics.

Each worker serves its counts on a private Unix socket. The parent asks all workers and adds up;
the worker that is scraped asks the parent. The parent keeps the last counts of a worker that died,
so no count is lost and no sum decreases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from foretoken import liveness
from foretoken.errors import UnavailableError
from foretoken.telemetry import Family, add_up, counts, parse, render
from gateway import process_socket

logger = logging.getLogger(__name__)

TOTALS_SOCKET = "totals.sock"
WORKER_TIMEOUT_S = 1.0
# The parent asks all workers at once; one of them may have stopped.
TOTALS_TIMEOUT_S = 2 * WORKER_TIMEOUT_S
_TEXT_PLEASE, _ARE_YOU_THERE = b"text\n", b"alive\n"
# The random part is needed because process ids are reused.
_PROCESS = f"{os.getpid()}-{secrets.token_hex(8)}"


def worker_socket(folder: Path, number: int) -> Path:
    """Return the path of the socket on which a worker serves its counts."""
    return folder / f"worker-{number}.sock"


def worker_number(path: Path) -> int:
    """Return the number of the worker with this socket."""
    return int(path.stem.removeprefix("worker-"))


def liveness_socket(folder: Path, number: int) -> Path:
    """Return the path of the socket on which a worker says when its event loop last turned."""
    return folder / f"alive-{number}.sock"


def serve_text(path: Path, text: Callable[[], Awaitable[bytes]]) -> contextlib.AbstractAsyncContextManager[None]:
    """Answer connections to ``path`` with this process's name, and ``text`` on request."""

    async def answer_to(request: bytes) -> bytes:
        return _PROCESS.encode() + b"\n" + (await text() if request == _TEXT_PLEASE else b"")

    return process_socket.serve(path, answer_to)


async def fetch_text(path: Path, timeout_s: float, request: bytes = _TEXT_PLEASE) -> tuple[str, str] | None:
    """Return the process's name and the text from ``path``; None if nobody answers in time."""
    try:
        process, _, text = (await process_socket.ask(path, request, timeout_s)).decode().partition("\n")
    except (OSError, TimeoutError):
        return None
    return (process, text) if process else None


class WorkerProbe:
    """Probes one worker for the supervisor.

    A worker is ready when it listens, even without a verifier.
    """

    def __init__(self, path: Path, liveness_path: Path) -> None:
        self._path, self._liveness_path = path, liveness_path

    async def is_ready(self) -> bool:
        return await fetch_text(self._path, WORKER_TIMEOUT_S, _ARE_YOU_THERE) is not None

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self._liveness_path, WORKER_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: no connection stays open between probes."""


async def totals_of_all_workers(folder: Path) -> list[Family]:
    """Fetch the sum of all workers from the parent.

    Raises UnavailableError if it does not answer.
    """
    answer = await fetch_text(folder / TOTALS_SOCKET, TOTALS_TIMEOUT_S)
    if answer is None:
        raise UnavailableError("the counts of the other gateway processes are not available")
    return parse(answer[1])


class WorkerTotals:
    """Sums the counts of all workers, dead ones included. It runs in the parent."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        # By worker: the process that answered last, and its answer.
        self._last: dict[Path, tuple[str, list[Family]]] = {}
        self._ended: list[Family] = []
        self._lock = asyncio.Lock()

    async def text(self) -> bytes:
        """Return the sum in Prometheus' text format.

        A silent worker counts with its last answer.
        """
        # One at a time: an older answer must not replace a newer one.
        async with self._lock:
            answers = await asyncio.gather(*(fetch_text(path, WORKER_TIMEOUT_S) for path in self._paths))
            answered = {path for path, answer in zip(self._paths, answers, strict=True) if answer is not None}
            for path, answer in zip(self._paths, answers, strict=True):
                if answer is not None:
                    self._take(path, *answer)
            parts = [self._ended]
            for path, (_, families) in self._last.items():
                parts.append(families if path in answered else counts(families))
            return render(add_up(parts))

    def _take(self, path: Path, process: str, text: str) -> None:
        last = self._last.get(path)
        if last is not None and last[0] != process:
            self._ended = add_up([self._ended, counts(last[1])])
        self._last[path] = (process, parse(text))
