"""Wait in a drafter client's thread; each wait ends when the client closes or its circuit opens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from foretoken import rpc
from foretoken.errors import UnavailableError
from foretoken.transports.doorbell import Doorbell, Waiter


class Interrupts:
    """Wakes the client's thread. Other threads call ``close`` and ``open_circuit``."""

    def __init__(self) -> None:
        self.is_closing = False
        # Why the circuit opened; empty while it is closed.
        self._reason = ""
        self._wake = Doorbell()

    def close(self) -> None:
        """End all waits, now and later."""
        self.is_closing = True
        self._wake.ring()

    def release(self) -> None:
        """Close the doorbell, once the client's thread has ended."""
        self._wake.close()

    def open_circuit(self, reason: str) -> None:
        """End the attachment: its current wait, or else its next one."""
        self._reason = reason
        self._wake.ring()

    def close_circuit(self) -> str:
        """Forget that the circuit opened. Return why it did; empty if it did not."""
        reason, self._reason = self._reason, ""
        return reason

    def waiter(self, *fds: int) -> Waiter:
        """Return a Waiter for these descriptors and for rings, which ``take`` acknowledges."""
        return Waiter((self._wake.fileno(), *fds))

    def take(self) -> None:
        """Acknowledge all rings so far."""
        self._wake.take()

    def sleep(self, seconds: float) -> None:
        """Sleep until the client closes.

        Any other ring was for the attachment that has just ended.
        """
        deadline = time.monotonic() + seconds
        waiter = self.waiter()
        while not self.is_closing and (left_s := deadline - time.monotonic()) > 0:
            if waiter.wait(left_s):
                self._wake.take()
        self._reason = ""

    def result(self, call: Any, on_connect: Callable[[], None] | None = None, listener_fd: int | None = None) -> Any:
        """Return a call's result. ``on_connect`` runs when the listener gets a connection.

        Raises UnavailableError as soon as the client closes or the circuit opens.
        """
        try:
            call.add_done_callback(lambda _: self._wake.ring())
            waiter = self.waiter() if listener_fd is None else self.waiter(listener_fd)
            while not call.done():
                ready = waiter.wait(None)
                self._wake.take()
                if self.is_closing or self._reason:
                    raise UnavailableError(self._reason or "the verifier stops")
                if on_connect is not None and listener_fd in ready:
                    on_connect()
                    # Accepted and closed: its number may soon be another descriptor's.
                    waiter = self.waiter()
            return call.result()
        except grpc.RpcError as error:
            raise rpc.error_from_rpc(error) from error
        finally:
            call.cancel()
