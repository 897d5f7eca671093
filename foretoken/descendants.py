"""Watch this process's descendants, and let none outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; a debugger's stop does not count."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def ended_child() -> int | None:
    """Return the process id of an ended child, or None. The child can still be waited for."""
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if result is None else result.si_pid


def die_with(parent: int, *, ignored: signal.Signals | None = None) -> Callable[[], None]:
    """Return a function that a new child calls first, so that it is killed when ``parent`` dies.

    ``ignored``: a signal that the child ignores until it has a handler for it.
    """

    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before the line above.
            os._exit(1)
        if ignored is not None:
            signal.signal(ignored, signal.SIG_IGN)

    return in_child


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Make orphaned descendants children of this process, so that it can see and end them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def kill_descendants(spared: set[int]) -> None:
    """Kill all children except ``spared`` process ids, and wait for them.

    For a subreaper: it inherits the children of every process that dies, even if forked a moment
    before, so this repeats until none is left.
    """
    while left := [child for child in psutil.Process().children() if child.pid not in spared]:
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left)
