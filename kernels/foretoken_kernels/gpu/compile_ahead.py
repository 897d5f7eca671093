"""Compile many Triton kernels at once, before they are launched."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

# More hardly helps: each kernel is parsed under the GIL.
_MAX_THREADS = 8

_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Make ``launcher`` compile kernels instead of launching them. All are compiled at the end.

    Raises what the compiler raises.
    """
    num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    with ThreadPoolExecutor(num_threads, "compiler") as threads, triton.AsyncCompileMode(threads):
        token = _is_ahead.set(True)
        try:
            yield
        finally:
            _is_ahead.reset(token)


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Return what launches a kernel with its arguments.

    Within ``compiling_ahead`` it compiles the kernel for these arguments.
    """
    return functools.partial(kernel.warmup, grid=grid) if _is_ahead.get() else kernel[grid]
