"""This process's descendants, as the kernel knows them: which have ended, and that none outlives it."""

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
    """Whether a signal has stopped a process; a debugger's stop does not count."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def ended_child() -> int | None:
    """The process id of a child that has ended and was not waited for, or None. Leaves it waitable."""
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if result is None else result.si_pid


def die_with(parent: int) -> Callable[[], None]:
    """What a new child runs before its program: from now on the kernel kills it when ``parent`` dies."""

    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before the line above.
            os._exit(1)

    return in_child


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Orphaned descendants become children of this process, so that it can see and end them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def kill_descendants(spared: set[int]) -> None:
    """Kill what children left behind in sessions of its own, and wait for it. ``spared`` are process ids.

    For a subreaper: the children of what dies fall to us, those forked a moment before too, so we look until nobody is
    left.
    """
    while left := [child for child in psutil.Process().children() if child.pid not in spared]:
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left)
