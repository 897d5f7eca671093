"""Abort a request that may run in another gateway process.

Each worker listens on a private Unix socket, and the worker that gets the call asks all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import orjson

from foretoken.errors import UnavailableError
from gateway import process_socket

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0


def aborts_socket(folder: Path, number: int) -> Path:
    """Return the path of the socket on which a worker takes aborts."""
    return folder / f"aborts-{number}.sock"


def serve_aborts(path: Path, abort: Callable[[str | None, str], int]) -> contextlib.AbstractAsyncContextManager[None]:
    """Answer each line with the number of requests that ``abort`` ended.

    A line is a name or null, and a tenant.
    """

    async def answer_to(request: bytes) -> bytes:
        return b"%d" % abort(*orjson.loads(request))

    return process_socket.serve(path, answer_to)


async def abort_in_all_workers(folder: Path, num_workers: int, name: str | None, tenant: str) -> int:
    """Abort a tenant's requests in all workers; return their number.

    A worker that is not there has no requests. Raises UnavailableError if one does not answer.
    """
    counts = [_abort_in(aborts_socket(folder, number), name, tenant) for number in range(num_workers)]
    return sum(await asyncio.gather(*counts))


async def _abort_in(path: Path, name: str | None, tenant: str) -> int:
    try:
        answer = await process_socket.ask(path, orjson.dumps([name, tenant]) + b"\n", ABORT_TIMEOUT_S)
    except TimeoutError:
        raise UnavailableError("a gateway process does not answer; some requests may go on") from None
    except OSError:
        return 0
    # An empty answer: it ended meanwhile.
    return int(answer or b"0")
