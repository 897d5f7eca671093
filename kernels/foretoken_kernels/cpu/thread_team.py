"""Threads that run one compiled function together, from the OpenMP pool that PyTorch has loaded.

A second pool beside PyTorch's would compete with it for the cores. Without GNU OpenMP (not Linux) a
team is one thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import torch  # loads the OpenMP library that is looked up below
from numba.core.ccallback import CFunc

from foretoken_kernels.cpu.addresses import call_at
from foretoken_kernels.cpu.compile import types

_THREAD = "foretoken_thread_num"
_THREADS = "foretoken_num_threads"
_BARRIER = "foretoken_barrier"
_PARALLEL = "foretoken_parallel"

# Compiled functions call these. They are linked by name at load time, so call ``load_symbols``
# first.
thread_num = types.ExternalFunction(_THREAD, numba.int32())
num_threads = types.ExternalFunction(_THREADS, numba.int32())
barrier = types.ExternalFunction(_BARRIER, numba.void())
# Runs a callback on a number of threads: its address, the address of its arguments, the number, 0.
_PARALLEL_TYPE = numba.void(types.int64, types.int64, types.uint32, types.uint32)
parallel = types.ExternalFunction(_PARALLEL, _PARALLEL_TYPE)


def _zero() -> int:
    return 0


def _one() -> int:
    return 1


def _nothing() -> None:
    return None


def _run_alone(function: int, arguments: int, _num_threads: int, _flags: int) -> None:
    call_at(function, arguments)


def _find_openmp() -> ctypes.CDLL | None:
    if "openmp" not in torch.__config__.parallel_info().lower():
        return None
    try:
        library = ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
    return library if hasattr(library, "GOMP_parallel") else None


@cache
def load_symbols() -> ctypes.CDLL | None:
    """Register the functions above with the linker.

    Returns:
        The OpenMP library, or None where a team is one thread.
    """
    library = _find_openmp()
    if library is None:
        for name, function, signature in (
            (_THREAD, _zero, numba.int32()),
            (_THREADS, _one, numba.int32()),
            (_BARRIER, _nothing, numba.void()),
            (_PARALLEL, _run_alone, _PARALLEL_TYPE),
        ):
            llvm.add_symbol(name, _single_thread_function(function, signature))
        return None
    for name, symbol in (
        (_THREAD, "omp_get_thread_num"),
        (_THREADS, "omp_get_num_threads"),
        (_BARRIER, "GOMP_barrier"),
        (_PARALLEL, "GOMP_parallel"),
    ):
        llvm.add_symbol(name, ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value)
    return library


@cache
def _kept(function: Any, signature: Any) -> Any:
    compiled = CFunc(function, (signature.args, signature.return_type), {}, {})
    compiled.compile()
    return compiled


def _single_thread_function(function: Any, signature: Any) -> int:
    return int(_kept(function, signature).address)


class ThreadTeam:
    """A team of ``num_threads`` threads, the caller included.

    Idle threads spin for some milliseconds and then sleep, according to OpenMP's settings.
    """

    def __init__(self, num_threads: int) -> None:
        library = load_symbols()
        self.num_threads = num_threads if library is not None else 1
        self._parallel = library.GOMP_parallel if library is not None else None
        if self._parallel is not None:
            self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            self._parallel.restype = None

    def run(self, function: Any, arguments: int, num_threads: int) -> None:
        """Run a callback (see compile.callback) on ``num_threads`` of the team.

        Args:
            arguments: the address that each thread's call gets.
        """
        if self._parallel is None:
            function.ctypes(arguments)
        else:
            self._parallel(function.address, arguments, min(num_threads, self.num_threads), 0)
