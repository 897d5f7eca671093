"""Accept TLS connections, and bound their handshakes in time and number.

asyncio's servers let any number of clients stay in a handshake for a minute, and the limit of
connections counts only those that have finished it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from gateway.access.certificates import Certificates

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
# At once, in one process. A handshake of a client that answers takes milliseconds.
MAX_HANDSHAKES = 256
# How long nothing is accepted when the process or the machine has no room for a connection.
FULL_PAUSE_S = 1.0
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TlsListener:
    """Accepts connections of a bound socket, and gives each that has shaken hands a protocol."""

    def __init__(
        self, listener: socket.socket, certificates: Certificates, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listener = listener
        self._certificates = certificates
        self._make_protocol = make_protocol
        # The oldest first.
        self._handshakes: dict[asyncio.Task[None], None] = {}

    async def run(self) -> None:
        """Accept until cancelled; then end the handshakes that still run."""
        self._listener.setblocking(False)
        try:
            while True:
                self._start(await self._accept())
        finally:
            ending = [*self._handshakes]
            for handshake in ending:
                handshake.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _accept(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return (await loop.sock_accept(self._listener))[0]
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                logger.error("no connection accepted", extra={"reason": error.strerror})
                await asyncio.sleep(FULL_PAUSE_S)

    def _start(self, connection: socket.socket) -> None:
        if len(self._handshakes) == MAX_HANDSHAKES:
            # Of a flood of silent clients the oldest gives way, so that others still get in.
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._shake_hands(connection))
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop, context = asyncio.get_running_loop(), self._certificates.rest
        try:
            await loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except (OSError, ssl.SSLError) as error:
            # Its transport is closed; whoever it was has to try again.
            logger.debug("TLS handshake failed", extra={"reason": str(error)})
