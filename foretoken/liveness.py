"""Answer, from a separate thread, when an event loop last turned, even while the loop is blocked.

The answer shows a supervisor whether a process is busy or hung. Questions and answers are datagrams
of a Unix socket: they need no connection, so a process without a free file descriptor still
answers.
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

# Shorter than the time between two questions, so that a free loop turns in between.
TURN_S = 0.5
_QUESTION = b"?"
_MAX_ANSWER_BYTES = 64


@contextlib.contextmanager
def answering(path: Path) -> Iterator[None]:
    """Serve at ``path`` the time at which the running event loop last turned."""
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
            if asker is None:  # The socket was shut down, or the asker's socket has no name.
                continue
            try:
                listener.sendto(repr(last_turn).encode(), socket.MSG_DONTWAIT, asker)
            except OSError:
                logger.debug("the asker at %s has gone", path)

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
    """Ask at ``path`` when the loop last turned (time.monotonic()); None without an answer."""
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            # The kernel chooses the name to which the answer is sent.
            asker.bind("")
            asker.connect(str(path))
            asker.send(_QUESTION)
            async with asyncio.timeout(timeout_s):
                return float(await loop.sock_recv(asker, _MAX_ANSWER_BYTES))
    except (OSError, TimeoutError):
        return None
