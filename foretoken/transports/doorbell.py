"""Doorbells between two processes: eventfd counters, and waiting on several of them at once.

Median time of a ring and its answer on an idle machine of 16 cores: 20 us when both sides block,
5.6 us when both spin and the answer comes within the spin; if it comes later, the same as blocking.
Spinning costs at most ``spin_us`` of a core a wait, and nothing while idle. On two busy cores it
takes the core that the other side needs: 8 us became 110 us with a spin of 50 us.
benchmarks/transports.py measures the whole round trip.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterable

# With more than two cores, a waiter spins for a moment before it blocks.
DEFAULT_SPIN_US = 50
MIN_CORES_TO_SPIN = 3


def default_spin_us() -> int:
    """Return the microseconds to spin before blocking.

    Do not spin if the other side needs the spinning core.
    """
    return DEFAULT_SPIN_US if len(os.sched_getaffinity(0)) >= MIN_CORES_TO_SPIN else 0


class Doorbell:
    """A counter of rings that a process can block on.

    Its descriptor may be handed to another process.

    Any thread may call ``ring``; on a closed doorbell it does nothing.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Take over ``fd``, or make a new descriptor. All holders share its non-blocking flag."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd
        # A descriptor that is closed between look-up and use may be another file's by then.
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """Add a ring. Never blocks: a counter at its limit is already rung."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def take(self) -> int:
        """Return the number of rings since the last take."""
        try:
            return os.eventfd_read(self._fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Waiter:
    """Blocks until one of several descriptors is readable or hung up. Owns none of them."""

    def __init__(self, fds: Iterable[int], spin_us: int = 0) -> None:
        """``spin_us``: microseconds to poll before blocking, at the cost of a core."""
        self._poll = select.poll()
        self._spin_ns = spin_us * 1_000
        for fd in fds:
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float | None) -> set[int]:
        """Return the descriptors that are ready.

        None after ``timeout_s``, which is rounded up to milliseconds.
        """
        if self._spin_ns:
            spin_ns = self._spin_ns if timeout_s is None else min(self._spin_ns, int(timeout_s * 1e9))
            deadline = time.monotonic_ns() + spin_ns
            while time.monotonic_ns() < deadline:
                if ready := self._poll.poll(0):
                    return {fd for fd, _ in ready}
        # -1e-9: 200 ms as a float must not become 201.
        timeout_ms = None if timeout_s is None else max(0, -int(-(timeout_s * 1e3 - 1e-9) // 1))
        return {fd for fd, _ in self._poll.poll(timeout_ms)}
