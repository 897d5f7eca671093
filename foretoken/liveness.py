"""When an event loop last turned, answered by a thread of its own while the loop itself is held up.

A supervisor needs it to tell a busy process from a hung one. Questions and answers are datagrams of a Unix socket: they
need no connection, so a process that has no file descriptor left still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

# Shorter than the time between two questions, so that a free loop turns between them.
TURN_S = 0.5
_QUESTION = b"?"
_MAX_ANSWER_BYTES = 64


@contextlib.contextmanager
def answering(path: Path) -> Iterator[None]:
    """Answer at ``path`` when the running event loop last turned."""
    loop = asyncio.get_running_loop()
    last_turn: float
    timer: asyncio.TimerHandle
    is_closing = False

    def turn() -> None:
        nonlocal last_turn, timer
        last_turn = time.monotonic()
        timer = loop.call_later(TURN_S, turn)

    def answer() -> None:
        while not is_closing:
            _, asker = listener.recvfrom(_MAX_ANSWER_BYTES)
            if asker is None:  # Nobody: the socket was shut down, or whoever asks has no name to answer to.
                continue
            try:
                listener.sendto(repr(last_turn).encode(), socket.MSG_DONTWAIT, asker)
            except OSError:
                logger.debug("whoever asked at %s has gone", path)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        # A process that was killed left its socket file.
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        turn()
        thread = threading.Thread(target=answer, name="liveness", daemon=True)
        thread.start()
        try:
            yield
        finally:
            timer.cancel()
            is_closing = True
            listener.shutdown(socket.SHUT_RD)
            thread.join()
            path.unlink(missing_ok=True)


async def last_turn(path: Path, timeout_s: float) -> float | None:
    """Return when the loop behind ``path`` last turned, by its monotonic clock; None if nobody answers in time."""
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            # The kernel picks the name that the answer goes to.
            asker.bind("")
            asker.connect(str(path))
            asker.send(_QUESTION)
            async with asyncio.timeout(timeout_s):
                return float(await loop.sock_recv(asker, _MAX_ANSWER_BYTES))
    except (OSError, TimeoutError):
        return None
