"""Ask a process of this gateway over a private Unix socket: one request, one answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serve(path: Path, answer_to: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[None]:
    """Answer each connection to ``path`` within the block.

    ``answer_to`` gets the request's line.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await answer_to(await reader.readline()))
            await writer.drain()
        except ConnectionError:
            logger.debug("a reader of %s disconnected", path)
        finally:
            writer.close()

    # A worker that was killed left its socket file.
    path.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, path):
        yield
    path.unlink(missing_ok=True)


async def ask(path: Path, request: bytes, timeout_s: float) -> bytes:
    """Return the answer to a request, which ends with a newline.

    Raises TimeoutError, and OSError if nobody listens.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()
