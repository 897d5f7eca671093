"""How the counts of several gateway processes become one answer of /metrics.

Each worker hands out its own counts on a private Unix socket. The parent asks all of them and adds up; whichever
worker is asked for /metrics asks the parent. So nothing that was ever shown is lost: the parent keeps the last counts
of a worker that died, and a sum never goes backwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from foretoken import liveness
from foretoken.errors import UnavailableError
from foretoken.telemetry import Family, add_up, counts, parse, render

logger = logging.getLogger(__name__)

TOTALS_SOCKET = "totals.sock"
WORKER_TIMEOUT_S = 1.0
# The parent asks all workers at once, one of which may have stopped.
TOTALS_TIMEOUT_S = 2 * WORKER_TIMEOUT_S
_TEXT_PLEASE, _ARE_YOU_THERE = b"text\n", b"alive\n"
# Drawn anew by each process: a process id may come again.
_PROCESS = f"{os.getpid()}-{secrets.token_hex(8)}"


def worker_socket(folder: Path, number: int) -> Path:
    """Where a worker hands out its counts."""
    return folder / f"worker-{number}.sock"


def liveness_socket(folder: Path, number: int) -> Path:
    """Where a worker tells when its event loop last turned."""
    return folder / f"alive-{number}.sock"


@contextlib.asynccontextmanager
async def serve_text(path: Path, text: Callable[[], Awaitable[bytes]]) -> AsyncIterator[None]:
    """Answer each connection to ``path``: a line that names this process, then ``text`` for one that asks for it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wanted = await reader.readline() == _TEXT_PLEASE
            writer.write(_PROCESS.encode() + b"\n" + (await text() if wanted else b""))
            await writer.drain()
        except ConnectionError:
            logger.debug("a reader of %s went away", path)
        finally:
            writer.close()

    # A worker that was killed left its socket file.
    path.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, path):
        yield
    path.unlink(missing_ok=True)


async def fetch_text(path: Path, timeout_s: float, request: bytes = _TEXT_PLEASE) -> tuple[str, str] | None:
    """What is served at ``path``: the process's name and the text. None if nobody answers in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(request)
                process, _, text = (await reader.read()).decode().partition("\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    return (process, text) if process else None


class WorkerProbe:
    """How the supervisor asks one worker. It is ready as soon as it listens, whether or not a verifier is there."""

    def __init__(self, path: Path, liveness_path: Path) -> None:
        self._path, self._liveness_path = path, liveness_path

    async def is_ready(self) -> bool:
        return await fetch_text(self._path, WORKER_TIMEOUT_S, _ARE_YOU_THERE) is not None

    async def last_turn(self) -> float | None:
        return await liveness.last_turn(self._liveness_path, WORKER_TIMEOUT_S)

    async def close(self) -> None:
        """Nothing stays open between two questions."""


async def totals_of_all_workers(folder: Path) -> list[Family]:
    """The parent's answer, for a worker. Raises UnavailableError if there is none."""
    answer = await fetch_text(folder / TOTALS_SOCKET, TOTALS_TIMEOUT_S)
    if answer is None:
        raise UnavailableError("the counts of the other gateway processes cannot be had")
    return parse(answer[1])


class WorkerTotals:
    """The sum over all workers, those that died included. Belongs to the parent."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        # By worker: the process that answered last, and what.
        self._last: dict[Path, tuple[str, list[Family]]] = {}
        self._ended: list[Family] = []
        self._lock = asyncio.Lock()

    async def text(self) -> bytes:
        """The sum as of now, in Prometheus' text format. A worker that does not answer counts as it last did."""
        # One after the other: an older answer must not replace a newer one.
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
