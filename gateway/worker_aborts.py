"""Abort a request that may run in another gateway process.

Each worker listens on a private Unix socket, and the worker that gets the call asks all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson

from foretoken.errors import UnavailableError

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0


def aborts_socket(folder: Path, number: int) -> Path:
    """Return the path of the socket on which a worker takes aborts."""
    return folder / f"aborts-{number}.sock"


@contextlib.asynccontextmanager
async def serve_aborts(path: Path, abort: Callable[[str | None, str], int]) -> AsyncIterator[None]:
    """Answer each line, a name or null and a tenant, with the number of requests that ``abort`` ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"%d\n" % abort(*orjson.loads(await reader.readline())))
            await writer.drain()
        except ConnectionError:
            logger.debug("a worker disconnected from %s", path)
        finally:
            writer.close()

    # A worker that was killed left its socket file.
    path.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, path):
        yield
    path.unlink(missing_ok=True)


async def abort_in_all_workers(folder: Path, num_workers: int, name: str | None, tenant: str) -> int:
    """Abort a tenant's requests in all workers; return their number.

    A worker that is not there has no requests. Raises UnavailableError if one does not answer.
    """
    counts = [_abort_in(aborts_socket(folder, number), name, tenant) for number in range(num_workers)]
    return sum(await asyncio.gather(*counts))


async def _abort_in(path: Path, name: str | None, tenant: str) -> int:
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(orjson.dumps([name, tenant]) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        raise UnavailableError("a gateway process does not answer; some requests may go on") from None
    except OSError:
        return 0
    # An empty line: it ended meanwhile.
    return int(line or b"0")
